"""`bench memory`: what `mlxrl.memory` predicts of a rollout and of the training step on it, and what MLX measures."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from rich.console import Console
from rich.table import Table

from mlxrl.algo import make_algorithm
from mlxrl.cli.bench.commands import check
from mlxrl.cli.bench.models import BenchPolicy, load_bench_policy
from mlxrl.cli.bench.ours import AnsweringEnv, make_engine
from mlxrl.cli.bench.report import surroundings
from mlxrl.cli.bench.work import MultiturnWork, declare_ends, make_texts
from mlxrl.env import Task
from mlxrl.memory import ModelShape, RunShape, estimate
from mlxrl.policy import read_config
from mlxrl.rollout import Trajectory, group_requests, single_turn_environment
from mlxrl.train import ConfigError, batch_from_rollouts, memory_backend, optimizer_step

PHASES = ("rollout", "update")
WIDTH = 64  # rows decoded at once, as a run has it by default


@dataclass(frozen=True)
class Shape:
    """A model and a run: `prompts` tasks of `prompt_len` tokens, `samples` episodes each, of `turns` actions."""

    model: str
    bits: int
    prompts: int
    samples: int
    prompt_len: int
    max_tokens: int
    turns: int = 1
    micro_batch_tokens: int | None = None
    checkpointing: bool = False
    merged: bool = False

    @property
    def name(self) -> str:
        """The shape in a few words, by which `--shapes` finds it."""
        actions = f"{self.turns}x{self.max_tokens}" if self.turns > 1 else f"{self.max_tokens}"
        words = [self.model, f"{self.bits}-bit", f"{self.prompts}x{self.samples}", f"{self.prompt_len}+{actions}"]
        words += [f"micro-{self.micro_batch_tokens}"] if self.micro_batch_tokens else []
        return " ".join([*words, *["checkpointed"] * self.checkpointing, *["merged"] * self.merged])


CPU_SHAPES = (
    Shape("small", 32, 2, 8, 16, 64),
    Shape("small", 32, 2, 8, 160, 16),
    Shape("small", 32, 4, 4, 160, 16, checkpointing=True),
    Shape("small", 32, 2, 4, 16, 128, checkpointing=True),
    Shape("small", 32, 4, 8, 96, 32, micro_batch_tokens=700),
    Shape("small", 32, 2, 4, 160, 24, turns=3),
    Shape("small", 4, 2, 8, 16, 64),
    Shape("small", 4, 2, 8, 160, 16, checkpointing=True),
    Shape("small", 4, 4, 4, 96, 32, merged=True),
    Shape("small-hybrid", 32, 2, 8, 16, 64),
    Shape("small-hybrid", 32, 2, 8, 160, 16),
    Shape("small-hybrid", 32, 2, 4, 16, 128, checkpointing=True),
    Shape("small-hybrid", 4, 2, 8, 16, 64),
    Shape("small-hybrid", 4, 2, 8, 160, 16, checkpointing=True),
)
GPU_SHAPES = (
    Shape("qwen3-0.6b", 4, 4, 8, 512, 97),
    Shape("qwen3-0.6b", 4, 4, 8, 512, 97, checkpointing=True),
    Shape("qwen3-0.6b", 4, 4, 8, 97, 512, checkpointing=True),
    Shape("qwen3-0.6b", 4, 4, 8, 97, 512, micro_batch_tokens=4300),
    Shape("qwen3-0.6b", 4, 8, 8, 64, 256),
    Shape("qwen3-0.6b", 4, 8, 8, 64, 256, micro_batch_tokens=4200, checkpointing=True),
    Shape("qwen3-0.6b", 16, 4, 8, 512, 97),
    Shape("qwen3-0.6b", 16, 4, 8, 97, 512, micro_batch_tokens=4300),
    Shape("qwen3-0.6b", 16, 8, 8, 64, 256, checkpointing=True),
    Shape("qwen3-0.6b", 16, 8, 8, 64, 256, micro_batch_tokens=4200, merged=True),
    Shape("hybrid-0.8b", 4, 4, 8, 512, 97),
    Shape("hybrid-0.8b", 4, 4, 8, 512, 97, checkpointing=True),
    Shape("hybrid-0.8b", 4, 4, 8, 97, 512, micro_batch_tokens=4300),
    Shape("hybrid-0.8b", 4, 8, 8, 64, 256, checkpointing=True),
    Shape("hybrid-0.8b", 16, 4, 8, 512, 97),
    Shape("hybrid-0.8b", 16, 8, 8, 64, 256, checkpointing=True),
)


def run_memory(settings: dict[str, Any]) -> None:
    """Measure the shapes of this device; `settings` are the command's options by name."""
    check(settings)
    shapes = chosen_shapes(settings["shapes"])
    report: dict[str, Any] = {**surroundings(), "backend": memory_backend(), "rank": settings["rank"], "shapes": []}
    file = settings["json"]
    console = Console(stderr=True)
    for (model, bits), same in groupby(shapes, key=lambda shape: (shape.model, shape.bits)):
        with tempfile.TemporaryDirectory() as folder:
            policy = load_bench_policy(None, model, bits, settings["rank"], Path(folder))
            declare_ends(policy.tokenizer, [])
            for shape in same:
                with console.status(shape.name):
                    row = compare(policy, shape, settings["rank"])
                report["shapes"].append(row)
                console.print(f"{row['name']}: {row['ratio']['peak']:.2f}", highlight=False)
                if file not in (None, "-"):  # after each shape: what was measured stays if the next one breaks
                    Path(file).write_text(json.dumps(report, indent=2) + "\n")
    if file == "-":
        print(json.dumps(report, indent=2))
    show(Console(stderr=file == "-"), report)


def chosen_shapes(words: Sequence[str]) -> tuple[Shape, ...]:
    """The shapes for this device whose name has one of `words`; all of them without any.

    Raises:
        ConfigError: no name has one of them.
    """
    every = CPU_SHAPES if memory_backend() == "cpu" else GPU_SHAPES
    chosen = tuple(shape for shape in every if not words or any(word in shape.name for word in words))
    if not chosen:
        names = "; ".join(shape.name for shape in every)
        raise ConfigError(f"--shapes must be part of the name of a shape, got {', '.join(words)}; there are: {names}.")
    return chosen


def compare(policy: BenchPolicy, shape: Shape, rank: int) -> dict[str, Any]:
    """Bytes by phase, predicted and measured, and the ratio of the two."""
    work = MultiturnWork(
        make_texts(policy.tokenizer, shape.prompts, shape.prompt_len, seed=0),
        shape.samples,
        shape.turns,
        shape.max_tokens,
        temperature=1.0,
    )
    config, run = read_config(policy.folder), asdict(run_shape(policy, shape, work, rank))
    predicted = predicted_peaks(config, run)
    measured = measure(policy, shape, work, limit=predicted["update"] // 2)
    measured["peak"] = max(measured.values())
    return {
        "name": shape.name,
        "config": config,
        "run": run,
        "measured": measured,
        "predicted": predicted,
        "ratio": {phase: predicted[phase] / measured[phase] for phase in predicted},
    }


def predicted_peaks(config: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by phase, as `mx.get_peak_memory` would have them.

    Args:
        config: config.json of the model.
        run: the fields of a `RunShape`.
    """
    expected = estimate(ModelShape.from_config(config).on(run["backend"]), RunShape(**run))
    rollout, update = expected.held + expected.rollout, expected.held + expected.update
    return {"rollout": rollout, "update": update, "peak": expected.mlx_peak}


def run_shape(policy: BenchPolicy, shape: Shape, work: MultiturnWork, rank: int) -> RunShape:
    """What the memory model asks of a run."""

    def length(text: str) -> int:
        return len(policy.tokenizer.encode(text))

    return RunShape(
        max_prompt_len=max(length(text) for text in openings(work)),
        max_completion_len=shape.max_tokens,
        group_size=shape.samples,
        groups_per_step=shape.prompts,
        max_turns=shape.turns,
        max_observation_len=length(work.answer) if shape.turns > 1 else 0,
        rollout_width=WIDTH,
        has_merged_copy=shape.merged,
        max_tokens_per_micro_batch=shape.micro_batch_tokens,
        gradient_checkpointing=shape.checkpointing,
        lora_rank=rank,
        backend=memory_backend(),
    )


def openings(work: MultiturnWork) -> Sequence[str]:
    """What the model reads before its first action."""
    return work.tasks if work.turns == 1 else [work.opening(task) for task in work.tasks]


def measure(policy: BenchPolicy, shape: Shape, work: MultiturnWork, limit: int) -> dict[str, int]:
    """Peaks in bytes, as MLX counts them: of a rollout, and of the training step on it; `held` is there before both.

    On a GPU the training step runs under a memory limit that it must exceed: beyond that MLX waits for the device
    rather than launch ahead, so that what is measured is what the step needs.
    """
    engine = make_engine(policy, work, {"weights": "merged" if shape.merged else "shared", "width": WIDTH})
    optimizer = optim.Adam(learning_rate=0.0)  # the next shape finds the same policy
    optimizer.init(policy.model.trainable_parameters())
    mx.eval(optimizer.state)  # as a run has it when it starts
    trajectories: list[Trajectory] = []

    def play() -> None:
        trajectories[:] = engine.rollout(requests_of(work))

    def train() -> None:
        algorithm = make_algorithm("grpo")
        batch = batch_from_rollouts(
            model=policy.model,
            completions=trajectories,
            rewards=[float(row % 2) for row in range(len(trajectories))],  # no group's rewards are all alike
            group_size=work.samples,
            pad_token_id=0,
            algorithm=algorithm,
        )
        optimizer_step(
            model=policy.model,
            optimizer=optimizer,
            batch=batch,
            algorithm=algorithm,
            use_checkpoint=shape.checkpointing,
            max_tokens=shape.micro_batch_tokens,
        )

    mx.clear_cache()
    peaks = {"held": mx.get_active_memory()}
    for phase, run in zip(PHASES, (play, train), strict=True):
        mx.clear_cache()
        mx.reset_peak_memory()
        launches_ahead = phase == "update" and mx.default_device().type == mx.gpu
        free = mx.set_memory_limit(limit) if launches_ahead else None
        run()
        mx.synchronize()
        peaks[phase] = mx.get_peak_memory()
        if free is not None:
            mx.set_memory_limit(free)
    return peaks


def requests_of(work: MultiturnWork) -> list[Any]:
    """The episodes: plain prompts, or an environment that answers each action."""
    if work.turns == 1:
        tasks = [Task(text) for text in work.tasks]
        return group_requests(tasks, single_turn_environment, group_size=work.samples)
    return group_requests(work.tasks, lambda task, *_: AnsweringEnv(work, task), group_size=work.samples)


def show(console: Console, report: dict[str, Any]) -> None:
    """A line a shape: predicted and measured MiB, and their ratio."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("predicted / measured MiB")
    for phase in (*PHASES, "peak"):
        table.add_column(phase, justify="right")
        table.add_column("", justify="right", no_wrap=True)
    for row in report["shapes"]:
        cells = []
        for phase in (*PHASES, "peak"):
            cells.append(f"{row['predicted'][phase] / 2**20:,.0f} / {row['measured'][phase] / 2**20:,.0f}")
            cells.append(f"{row['ratio'][phase]:.2f}")
        table.add_row(row["name"], *cells)
    console.print(table, highlight=False, soft_wrap=True)
