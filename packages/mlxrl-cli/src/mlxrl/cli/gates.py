"""The gates: short programs that pass or fail, each on the real thing."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_unflatten
from rich.console import Console
from rich.markup import escape

from mlxrl.algo import make_algorithm
from mlxrl.cli.configs import check_temperature, read_config
from mlxrl.cli.views import make_view
from mlxrl.env import StepResult, Task
from mlxrl.policy import (
    LoRAConfig,
    PolicyReport,
    adapter_parameters,
    find_model,
    load_policy_with_lora,
    save_adapter,
    score,
)
from mlxrl.policy.testing import ARCHITECTURES, make_tiny_model
from mlxrl.rollout import (
    Engine,
    Role,
    SamplingConfig,
    Trajectory,
    generate_groups,
    group_requests,
    naive_rollout,
    single_turn_environment,
)
from mlxrl.train import ConfigError, batch_from_rollouts, load_config, optimizer_step, train

PROMPTS = ["What is 2+3?", "What is 7+5+8+3? Think first.", "Hello!", "Name a colour and say why you like it."]
# Largest difference of a log-prob between two ways of computing it: float32 on the CPU, and 16-bit or a GPU.
EXACT, ROUNDED = 1e-4, 0.1

Check = tuple[str, bool, str]


def smoke(model: str | None, architecture: str | None) -> None:
    """Load, report the shapes, sample, step, save, and reload in stock mlx-lm."""
    with tempfile.TemporaryDirectory() as folder:
        finish(_smoke(_model_id(model, architecture, folder), Path(folder)))


def toy_gate(seed: int, steps: int) -> None:
    """Train the embedded default and compare the mean reward of the first and the last five steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(None, {"seed": seed, "steps": steps, "output": f"{folder}/run"}, ())
        with make_view(Console(emoji=False), config) as view:
            result = train(config, observer=view)
    rewards = [metrics["reward"] for metrics in result.metrics]
    rise = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
    finish([("the mean reward rises by at least 0.3", rise >= 0.3, f"{rise:+.3f}")])


def equivalence(model: str | None, architecture: str | None, seed: int, temperature: float, max_tokens: int) -> None:
    """Hold the engine against a loop of one row without cache, at the same keys, in one turn and in several."""
    check_temperature(temperature)
    with tempfile.TemporaryDirectory() as folder:
        policy, tokenizer, _ = load_policy_with_lora(
            _model_id(model, architecture, folder), LoRAConfig(rank=4, seed=seed)
        )
        _move_adapters(policy, seed)
        engine = Engine(policy, tokenizer, SamplingConfig(temperature=temperature, max_tokens=max_tokens))
        requests = [
            *group_requests([Task(p) for p in PROMPTS], single_turn_environment, group_size=3, seed=seed),
            *group_requests(PROMPTS[:2], _Asking, group_size=2, seed=seed, step=1),
        ]
        batched = engine.rollout(requests)
        alone = naive_rollout(policy, tokenizer, requests, engine.limits)
    same = sum(a.completion_ids == b.completion_ids for a, b in zip(batched, alone, strict=True))
    # np.max is NaN if one is, which max may pass over
    difference = float(np.max([_engine_difference(a, b) for a, b in zip(batched, alone, strict=True)]))
    checks: list[Check] = [
        ("log-probs agree where the tokens do", difference < _bound(), f"largest difference {difference:.2e}"),
    ]
    if mx.default_device().type == mx.cpu:  # elsewhere rounding may decide a near-tie
        checks.append(("rows are equal token for token", same == len(batched), f"{same} of {len(batched)}"))
    finish(checks)


def gsm8k(model: str | None, data: Path | None, steps: int, tasks: int, max_tokens: int, output: str | None) -> None:
    """Train on GSM8K's format; without a file, on a few problems of our own, which only proves the wiring."""
    sample = Path(__file__).parent / "examples" / "word_problems.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "model_id": model or "embedded",
            "env_name": "jsonl",
            "data.path": str(data or sample),
            "data.prompt_column": "question",
            "data.eval_fraction": 0.25,
            "rewards": [{"name": "numeric_match"}],
            "steps": steps,
            "group_size": 4,
            "groups_per_step": 4,
            "max_completion_len": max_tokens,
            "eval.tasks": tasks,
            "output": output or f"{folder}/run",
        }
        config = load_config(None, values)
        with make_view(Console(emoji=False), config) as view:
            result = train(config, observer=view)
        accuracies = [evaluation.accuracy for _, evaluation in result.evaluations]
        saved = (result.folder / "adapters" / "adapters.safetensors").is_file()
    finish(
        [
            ("every step ran", len(result.metrics) == steps, f"{len(result.metrics)} of {steps}"),
            ("held-out questions were scored before and after", len(accuracies) == 2, f"accuracy {accuracies}"),
            ("the adapter was saved", saved, str(result.folder)),
        ]
    )


def _smoke(model_id: str, folder: Path) -> list[Check]:
    lora = LoRAConfig(rank=4)
    model, tokenizer, report = load_policy_with_lora(model_id, lora)
    _show_shapes(report)
    sampling = SamplingConfig(max_tokens=8)
    trajectories = generate_groups(
        model=model, tokenizer=tokenizer, prompts=PROMPTS[:2], group_size=2, sampling=sampling
    )
    mismatch = float(np.max([_sampler_difference(model, trajectory) for trajectory in trajectories]))

    algorithm, pad = make_algorithm("grpo"), tokenizer.pad_token_id or 0
    batch = batch_from_rollouts(
        model=model, completions=trajectories, rewards=[0, 1, 0, 1], group_size=2, pad_token_id=pad, algorithm=algorithm
    )
    optimizer = optim.Adam(1e-3, bias_correction=True)
    before = adapter_parameters(model)
    metrics = optimizer_step(model=model, optimizer=optimizer, batch=batch, algorithm=algorithm, pad_token_id=pad)
    moved = [name for name, value in adapter_parameters(model).items() if not mx.array_equal(value, before[name])]

    save_adapter(model, folder / "adapter", lora, report.target_keys)
    stock, *_ = mlx_lm.load(str(find_model(model_id)), adapter_path=str(folder / "adapter"))
    if mx.default_device().type == mx.cpu:
        stock.set_dtype(mx.float32)  # as load_policy_with_lora does there
    prompt = mx.array(trajectories[0].segments[0].token_ids[None])
    difference = float(np.abs(np.array(stock(prompt) - model(prompt))).max())
    return [
        ("only LoRA factors are trainable", set(report.trainable_leaves) == {"lora_a", "lora_b"}, ""),
        ("every block carries adapters", min(report.adapted_per_layer) > 0, f"{report.adapted_layers} layers"),
        ("scorer agrees with sampler", mismatch < _bound(), f"log-probs differ by {mismatch:.1e}"),
        ("a step moves the adapter", bool(moved), f"gradient norm {metrics['grad_norm']:.3g}"),
        ("stock mlx-lm loads the adapter and agrees", difference < 10 * _bound(), f"logits differ by {difference:.1e}"),
    ]


def _show_shapes(report: PolicyReport) -> None:
    rows = {
        "model type": f"{report.model_type}, {report.num_layers} layers, {report.dtype}",
        "quantization": report.quantization,
        "LoRA targets": ", ".join(report.target_keys),
        "per layer": ", ".join(map(str, report.adapted_per_layer)),
        "trainable": f"{report.trainable_parameters:,} of {report.total_parameters:,} parameters, "
        f"in {' and '.join(report.trainable_leaves)}",
    }
    for name, value in rows.items():
        Console(emoji=False).print(f"{name:12}  {value}", highlight=False, soft_wrap=True)


def _model_id(model: str | None, architecture: str | None, folder: str) -> str:
    if architecture is None:
        return model or "embedded"
    if model is not None:
        raise ConfigError(f"--model {model} and --architecture {architecture} exclude each other; give one.")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"--architecture must be one of {known}, got {architecture!r}.")
    return str(make_tiny_model(Path(folder) / architecture, architecture))


def _sampler_difference(model: nn.Module, trajectory: Trajectory) -> float:
    """Largest difference between the log-probs that the sampler recorded and the scorer's."""
    segment = trajectory.segments[0]
    mask = segment.roles == Role.ACTION
    scores = score(model, segment.token_ids[None], mask[None])
    return float(np.abs(np.array(scores.logprobs[0]) - segment.sampler_logprobs)[mask].max())


def _engine_difference(a: Trajectory, b: Trajectory) -> float:
    """Largest difference of the recorded log-probs over the tokens that two rollouts share."""
    first, second = a.completion_ids, b.completion_ids
    shared = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    ours, theirs = (
        np.concatenate([s.sampler_logprobs[s.roles == Role.ACTION] for s in t.segments])[:shared] for t in (a, b)
    )
    return float(np.abs(ours - theirs).max(initial=0.0))


def _move_adapters(policy: nn.Module, seed: int) -> None:
    """Away from 0, where they begin and would not be noticed."""
    values = adapter_parameters(policy)
    keys = mx.random.split(mx.random.key(seed), len(values))
    moved = [
        (name, value + 0.02 * mx.random.normal(value.shape, key=key))
        for (name, value), key in zip(values.items(), keys, strict=True)
    ]
    policy.update(tree_unflatten(moved))


class _Asking:
    """Asks three times, whatever is answered."""

    max_turns = 3

    def __init__(self, task: str, seed: int, group_index: int):
        self.task, self.num_answers = task, 0

    def reset(self) -> str:
        return self.task

    def step(self, action: str) -> StepResult:
        self.num_answers += 1
        return StepResult(f"That is answer {self.num_answers}. Go on.", reward=0.0, terminated=False)

    def state_id(self, observation: object) -> str:
        return self.task


def _bound() -> float:
    return EXACT if mx.default_device().type == mx.cpu else ROUNDED


def finish(checks: Sequence[Check]) -> None:
    """Print each check with its outcome, and exit with 1 if one failed."""
    console = Console(emoji=False)
    for name, passed, detail in checks:
        mark = "[green]pass[/green]" if passed else "[red]FAIL[/red]"
        console.print(f"{mark}  {name}  [dim]{escape(detail)}[/dim]", highlight=False)
    if not all(passed for _, passed, _ in checks):
        sys.exit(1)
