"""The memory preflight of a config: what the run will take, and what to turn down."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrl.memory import (
    Backend,
    FitResult,
    MemoryEstimate,
    ModelShape,
    RunShape,
    UncountedError,
    available_memory,
    estimate,
    fit,
    known_config,
)
from mlxrl.policy import ModelError, find_model, is_target, on_cuda
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import load_config
from mlxrl.train.errors import ConfigError, UnplannedError
from mlxrl.train.optimizers import STATES

# Where a field of the run's shape lives in the config, when it has another name there.
CONFIG_FIELDS = {
    "max_tokens_per_micro_batch": "update.max_tokens_per_micro_batch",
    "rollout_width": "rollout.width",
    "kv_budget_bytes": "rollout.kv_budget_gb",
    "has_merged_copy": "rollout.weights",
}


@dataclass(frozen=True)
class Plan:
    """The prediction for a config.

    Args:
        model: shape of the model.
        run: shape of the run; without a merged copy where rollout.weights is "auto" and the copy does not fit.
        estimate: predicted bytes by part.
        fit: whether it fits the budget, and what to change where it does not.
    """

    model: ModelShape
    run: RunShape
    estimate: MemoryEstimate
    fit: FitResult


def make_plan(config: TrainConfig, *, max_turns: int | None = None, available_bytes: int | None = None) -> Plan:
    """Predict the peak device memory of a run from the model's config.json; nothing is loaded.

    Args:
        config: the run.
        max_turns: turns of an episode, where they are known; by default the config's, or else 1.
        available_bytes: the budget; by default what this machine has.

    Raises:
        ConfigError: the model's config.json cannot be had or understood, or has no layers of the names in the config.
        UnplannedError: its blocks are of a kind that is not counted.
    """
    max_turns = max_turns or config.max_turns or 1
    try:
        shape = model_shape(config.model_id)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except UncountedError as error:
        raise UnplannedError(f"model_id = {config.model_id!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model_id = {config.model_id!r}: {error}") from error
    model = adapted(shape.on(memory_backend()), config)
    context = config.rollout.max_context or model.context_length
    run = run_shape(config, max_turns=max_turns, max_context=context)
    budget = device_memory() if available_bytes is None else available_bytes
    if config.rollout.weights == "auto" and estimate(model, run).peak > budget:
        run = replace(run, has_merged_copy=False)
    fitted = fit(model, run, budget, lambda field, value: refusal(config, max_turns, field, value))
    return Plan(model, run, estimate(model, run), fitted)


def memory_backend() -> Backend:
    """The backend that computes here, as the memory model names it."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "cuda" if on_cuda() else "metal"


def device_memory() -> int:
    """Bytes that the device has for this process: an NVIDIA GPU's own, else those of `available_memory`."""
    return int(mx.device_info()["total_memory"]) if on_cuda() else available_memory()


def model_shape(model_id: str) -> ModelShape:
    """The shape of a model: from its own folder, or else the table of known models, the hub's cache, or the hub.

    Raises:
        ModelError: there is no such model.
        ValueError: its config.json cannot be understood.
    """
    is_hub_name = model_id.count("/") == 1 and not model_id.startswith((".", "~", "/"))
    known = known_config(model_id) if is_hub_name and not Path(model_id).is_dir() else None
    if known is not None:
        return ModelShape.from_config(known)
    return ModelShape.from_path(find_model(model_id, config_only=True))


def adapted(model: ModelShape, config: TrainConfig) -> ModelShape:
    """The model with adapters where the config has them.

    Where the names of a model's layers are guessed, targets that name none of them are taken to name all.

    Raises:
        ConfigError: the targets name no layer of the model, or it has fewer blocks than last_layers.
    """
    blocks, last, targets = len(model.blocks), config.last_layers, config.targets
    if last is not None and last > blocks:
        raise ConfigError(f"last_layers = {last} exceeds the {blocks} blocks of the model; lower it.")
    first = blocks - (last or blocks)
    names = {
        f"{model.blocks_path}.{number}.{linear.name}": linear.name
        for number, block in enumerate(model.blocks[first:], first)
        for linear in block.linears
    }
    missing = [target for target in targets if not any(is_target(path, [target]) for path in names)]
    if missing and model.known_family:
        where = "model" if last is None else f"last {last} of the {blocks} blocks"
        raise ConfigError(
            f"LoRA targets {missing} name no linear layer of the {where}, which has {sorted(set(names.values()))} in "
            f"its blocks, in full for example {min(names)!r}."
        )
    chosen = {path for path in names if missing or is_target(path, targets)}
    return model.adapting(lambda block, name: f"{model.blocks_path}.{block}.{name}" in chosen)


def run_shape(config: TrainConfig, *, max_turns: int, max_context: int | None) -> RunShape:
    """The part of a config that memory depends on, with what environment and model leave open in it."""
    rows = max(config.groups_per_step * config.group_size, config.eval.tasks)
    return RunShape(
        max_prompt_len=config.max_prompt_len,
        max_completion_len=config.max_completion_len,
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_turns=max_turns,
        max_observation_len=config.max_observation_len or (config.max_prompt_len if max_turns > 1 else 0),
        max_context=max_context,
        eval_tasks=config.eval.tasks,
        rollout_width=1 if config.rollout_mode == "sequential" else min(config.rollout.width, rows),
        kv_budget_bytes=config.rollout.cache_bytes,
        has_merged_copy=config.rollout.weights != "shared",
        micro_batch_size=config.micro_batch_size,
        max_tokens_per_micro_batch=config.update.max_tokens_per_micro_batch,
        gradient_checkpointing=config.gradient_checkpointing,
        lora_rank=config.rank,
        use_dora=config.use_dora,
        optimizer_states=STATES[config.optimizer.name],
        has_reference=config.kl_beta > 0,
        has_reference_adapter=config.reference == "initial_adapter",
        shares_prompts=config.dropout == 0,
        backend=memory_backend(),
    )


def refusal(config: TrainConfig, max_turns: int, field: str, value: int) -> str | None:
    """Why the config may not have this value of a field of the run's shape, all else being as it is; None if it may."""
    buffer, longest = config.algorithm.overlong_buffer, max_turns * value
    if field == "max_completion_len" and buffer is not None and buffer > longest:  # as `make_curriculum` has it
        return f"algorithm.overlong_buffer = {buffer} exceeds the {longest} tokens of a trajectory then; lower it"
    name, value_there = config_field(field, value)
    try:
        load_config(None, config.model_dump(exclude_unset=True) | {name: value_there})
    except ConfigError as error:
        return str(error).removeprefix("config error: ").rstrip(".")
    return None


def fitted_overrides(plan: Plan) -> dict[str, Any]:
    """The config fields that make the run fit, for `load_config(overrides=...)`."""
    return dict(config_field(proposal.field, proposal.new) for proposal in plan.fit.proposals)


def config_field(field: str, value: int | bool | None) -> tuple[str, Any]:
    """A field of the run's shape and its value, as the config has them."""
    if field == "has_merged_copy":
        value_there: Any = "merged" if value else "shared"
    elif field == "kv_budget_bytes" and value is not None:
        value_there = value / 2**30
    else:
        value_there = value
    return CONFIG_FIELDS.get(field, field), value_there
