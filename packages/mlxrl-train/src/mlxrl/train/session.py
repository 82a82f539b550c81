"""Everything live that a run works with, built from its config."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.algo import Algorithm, Correction, EchoSchedule
from mlxrl.policy import LoRAConfig, ModelError, PolicyReport, adapter_parameters, load_adapter, load_policy_with_lora
from mlxrl.rollout import Engine, SamplingConfig
from mlxrl.train.algorithms import build_algorithm, build_correction
from mlxrl.train.config import TrainConfig
from mlxrl.train.errors import ConfigError
from mlxrl.train.inactive import inactive_fields
from mlxrl.train.loader import TaskLoader
from mlxrl.train.optimizers import make_optimizer
from mlxrl.train.overlong import LeftOut, leave_out_overlong
from mlxrl.train.reward_calls import NamedReward
from mlxrl.train.rewards import OVERLONG
from mlxrl.train.tasks import Curriculum, make_curriculum
from mlxrl.train.unread import unread_answers


@dataclass(frozen=True)
class Session:
    """The live objects of a run."""

    config: TrainConfig
    curriculum: Curriculum
    model: nn.Module
    tokenizer: TokenizerWrapper
    report: PolicyReport
    lora: LoRAConfig
    engine: Engine
    loader: TaskLoader
    algorithm: Algorithm
    rewards: tuple[NamedReward, ...]
    """The rewards of the tasks, and what they are shaped by."""
    correction: Correction | None
    optimizer: optim.Optimizer
    reference_adapter: dict[str, mx.array] | None
    """The adapter of the reference: that the run started from, or none."""
    echo: EchoSchedule
    pad_token_id: int
    inactive: tuple[str, ...]
    """Sentences about fields that are set and cannot act here, and answers that a reward cannot read."""
    left_out: tuple[LeftOut, ...]
    """The tasks that are left out of each split, for their prompts are too long."""

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How evaluations draw tokens."""
        return replace(self.engine.sampling, temperature=self.config.eval.temperature)


def open_session(config: TrainConfig, *, adapter: Path | None = None, curriculum: Curriculum | None = None) -> Session:
    """Build tasks and rewards first, then load the model.

    Args:
        config: the run.
        adapter: folder of the adapter that the run started from, where `config.adapter` may have changed since.
        curriculum: what `make_curriculum` made of the config, where that has been done.

    Raises:
        ConfigError: a part of the config cannot be had, or the model does not fit it.
    """
    curriculum = curriculum or make_curriculum(config)
    if adapter is None and config.adapter is not None:
        adapter = Path(config.adapter)
    if adapter is not None and not Path(adapter, "adapter_config.json").is_file():
        raise ConfigError(f"adapter = {str(adapter)!r} holds no adapter_config.json; name the folder of an adapter.")
    lora = LoRAConfig(
        rank=config.rank,
        scale=config.scale,
        dropout=config.dropout,
        grad_checkpoint=config.gradient_checkpointing,
        rank_stabilized=config.rank_stabilized,
        use_dora=config.use_dora,
        targets=config.targets,
        last_layers=config.last_layers,
        seed=config.seed,
    )
    if config.iogpu_wired_limit_mb is not None and mx.metal.is_available():
        mx.set_wired_limit(config.iogpu_wired_limit_mb * 2**20)
    try:
        model, tokenizer, report = load_policy_with_lora(config.model_id, lora)
        if adapter is not None:
            load_adapter(model, adapter)
        engine = _engine(config, model, tokenizer, report)
    except (ModelError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _check_bits(config, report)
    if config.echo_alpha and curriculum.max_turns > 1 and engine.encoder.rewrites_history:
        raise ConfigError(
            f"echo_alpha = {config.echo_alpha} has nothing to predict: the chat template of model_id = "
            f"{config.model_id!r} rewrites earlier turns, so that every observation is part of a prompt; set "
            "echo_alpha = 0 or use_chat_template = false."
        )
    longest_prompt = min(config.max_prompt_len, (engine.limits.max_context or sys.maxsize) - 1)  # an action follows
    optimizer = make_optimizer(config.optimizer)
    optimizer.init(model.trainable_parameters())
    rule = "drop" if config.data is None else config.data.overlong
    fitting, left_out = leave_out_overlong(curriculum, engine.encoder, longest=longest_prompt, rule=rule)
    if not fitting.train or (curriculum.held_out and not fitting.held_out):
        which = "held-out prompt" if fitting.train else "prompt"
        if longest_prompt < config.max_prompt_len:
            raise ConfigError(
                f"model_id = {config.model_id!r} was made for {engine.limits.max_context} tokens, which every {which} "
                "fills; shorten the prompts, or set rollout.max_context if the model takes more."
            )
        raise ConfigError(
            f"max_prompt_len = {config.max_prompt_len} is shorter than every {which}; raise it or shorten the prompts."
        )
    return Session(
        config=config,
        curriculum=fitting,
        model=model,
        tokenizer=tokenizer,
        report=report,
        lora=lora,
        engine=engine,
        loader=TaskLoader(fitting.train, config.seed),
        algorithm=build_algorithm(config, max_turns=curriculum.max_turns),
        rewards=(*curriculum.rewards, *_shaping(config)),
        correction=build_correction(config),
        optimizer=optimizer,
        reference_adapter=adapter_parameters(model) if config.reference == "initial_adapter" else None,
        echo=EchoSchedule(config.echo_alpha, config.echo_schedule, config.echo_taper_steps),
        pad_token_id=_pad_token_id(tokenizer),
        inactive=(*inactive_fields(config, curriculum, _template(engine)), *unread_answers(curriculum)),
        left_out=left_out,
    )


def _engine(config: TrainConfig, model: nn.Module, tokenizer: TokenizerWrapper, report: PolicyReport) -> Engine:
    rollout = config.rollout
    return Engine(
        model,
        tokenizer,
        SamplingConfig(max_tokens=config.max_completion_len, stop=rollout.stop, **config.sampling.model_dump()),
        width=1 if config.rollout_mode == "sequential" else rollout.width,
        max_prompt_len=config.max_prompt_len,
        max_turns=config.max_turns,
        max_observation_len=config.max_observation_len,
        max_context=rollout.max_context or report.context_length,
        context=rollout.context,
        echo=config.echo_alpha > 0,
        use_chat_template=config.use_chat_template,
        template_kwargs=dict(config.chat_template_kwargs),
        deterministic=rollout.deterministic,
        env_timeout=rollout.env_timeout or None,
        cache_bytes=rollout.cache_bytes,
        weights="shared" if rollout.weights == "auto" else rollout.weights,  # until the loop has measured both
    )


def _template(engine: Engine) -> str | None:
    """The chat template as text, empty where none is used; None where it is code of the tokenizer's."""
    template = engine.encoder.tokenizer.chat_template
    if not engine.encoder.templated:
        return ""
    return None if template is None else str(template)


def _shaping(config: TrainConfig) -> tuple[NamedReward, ...]:
    return () if config.algorithm.overlong_buffer is None else (NamedReward(OVERLONG, 1.0),)


def _check_bits(config: TrainConfig, report: PolicyReport) -> None:
    if config.quant_bits is None:
        return
    bits = {f"{config.quant_bits}-bit"} if config.quant_bits < 16 else {"none"}
    if not bits & set(report.quantization.split(" and ")):
        raise ConfigError(
            f"quant_bits = {config.quant_bits}, but model_id = {config.model_id!r} has quantization "
            f"{report.quantization}; name another model or leave quant_bits out."
        )


def _pad_token_id(tokenizer: TokenizerWrapper) -> int:
    """An ordinary id to fill rows with; what stands behind a row's end is masked and never read."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
