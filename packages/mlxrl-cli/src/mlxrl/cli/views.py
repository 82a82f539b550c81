"""What a run shows: a live view on a terminal, plain lines elsewhere."""

import math
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlxrl.rollout import Trajectory
from mlxrl.train import Evaluation, Observer, Session, TrainConfig, TrainResult

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


class PlainView(Observer):
    """A line a step."""

    def __init__(self, console: Console, config: TrainConfig):
        self.console, self.config = console, config
        self.started = time.perf_counter()
        self.folder: Path | None = None
        self.rewards: list[float] = []
        self.accuracies: list[tuple[int, float]] = []
        self.told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is KeyboardInterrupt and self.folder is not None:
            self.say(f"\nstopped; to go on: mlxrl-cli train --resume --output {shlex.quote(str(self.folder))}")

    def on_start(self, session: Session, folder: Path, first_step: int) -> None:
        self.folder = folder
        for line in describe_session(session, folder, first_step):
            self.say(line)

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.accuracies.append((step, evaluation.accuracy))
        self.say(evaluation_line(self.config, step, evaluation))
        self.tell_failure(evaluation.trajectories)

    def on_step(self, metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
        self.rewards.append(metrics["reward"])
        self.say(step_line(self.config, metrics, self.seconds_left(metrics)))
        self.tell_failure(trajectories)

    def on_warning(self, reason: str) -> None:
        self.say(f"warning: {reason}")

    def on_end(self, result: TrainResult) -> None:
        self.say(f"\n{summary(self, result)}")

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def tell_failure(self, trajectories: Sequence[Trajectory]) -> None:
        """Print each reason for which some failed that has not been printed yet."""
        reasons = [" ".join(trajectory.error.split()) for trajectory in trajectories if trajectory.error is not None]
        for reason, count in Counter(reasons).items():
            if reason not in self.told:
                self.told.add(reason)
                self.say(f"  {count} failed: {reason}; see events.jsonl")

    def seconds_left(self, metrics: dict[str, float]) -> float:
        """Time left at the pace so far."""
        pace = (time.perf_counter() - self.started) / max(1, len(self.rewards))
        return pace * (self.config.steps - metrics["step"])


class LiveView(PlainView):
    """A progress bar, the reward curve, the latest numbers and a sample, redrawn in place."""

    def __init__(self, console: Console, config: TrainConfig):
        super().__init__(console, config)
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn(), console=console
        )
        self.bar = self.progress.add_task("steps", total=config.steps)
        self.latest: dict[str, float] = {}
        self.sample = ""
        self.live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.live.stop()
        super().__exit__(kind, *_)

    def __rich__(self) -> Group:
        return Group(
            self.progress,
            *(
                [self._numbers(), Text(self.sample, style="dim", overflow="ellipsis", no_wrap=True)]
                if self.latest
                else []
            ),
        )

    def on_start(self, session: Session, folder: Path, first_step: int) -> None:
        super().on_start(session, folder, first_step)
        self.progress.update(self.bar, completed=first_step)

    def on_step(self, metrics: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
        self.rewards.append(metrics["reward"])
        self.latest = metrics
        best = max(trajectories, key=lambda trajectory: trajectory.reward or 0.0)
        self.sample = " ".join(f"{best.turns[-1].observation} → {best.completion}".split()) if best.turns else ""
        self.progress.update(self.bar, completed=metrics["step"])
        self.tell_failure(trajectories)

    def on_end(self, result: TrainResult) -> None:
        self.live.stop()
        super().on_end(result)

    def _numbers(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2))
        latest = self.latest
        table.add_row("reward", measured(latest["reward"]), curve(self.rewards))
        table.add_row(
            "length", f"{latest['completions/mean_length']:.1f}", f"{latest['completions/clipped_ratio']:.0%} cut off"
        )
        table.add_row("speed", f"{latest['tokens_per_second']:.0f}", "tokens/s in rollouts")
        table.add_row("entropy", measured(latest["entropy"]), f"gradient norm {latest['grad_norm']:.3f}")
        if latest["failed"]:
            table.add_row("failed", f"{latest['failed']:.0f}", "trajectories; see events.jsonl")
        return table


def make_view(console: Console, config: TrainConfig) -> PlainView:
    """The view for where the output goes."""
    return LiveView(console, config) if console.is_terminal else PlainView(console, config)


def describe_session(session: Session, folder: Path, first_step: int) -> list[str]:
    """What is about to be trained, in a few lines."""
    report, config, curriculum = session.report, session.config, session.curriculum
    base_parameters = report.total_parameters - report.trainable_parameters
    rewards = ", ".join(reward.name for reward in curriculum.rewards)
    groups = f"{config.groups_per_step} x {config.group_size} samples"
    lines = [
        f"model    {config.model_id}: {report.model_type}, {base_parameters:,} parameters, {report.dtype}, "
        f"quantization {report.quantization}",
        f"adapter  rank {config.rank} on {report.adapted_layers} layers, {report.trainable_parameters:,} parameters",
        f"task     {config.env_name}: {len(curriculum.train)} tasks, rewarded by {rewards}",
        f"run      {config.algorithm.name}, {config.steps} steps of {groups}, seed {config.seed}, into {folder}",
    ]
    if config.rollout.weights != "shared":
        lines.append(f"sampler  {session.engine.weights} weights (rollout.weights = {config.rollout.weights!r})")
    if first_step:
        lines.append(f"         resumed from step {first_step}")
    return lines + [f"note     {reason}" for reason in (*session.inactive, *session.left_out)]


def evaluation_line(config: TrainConfig, step: int, evaluation: Evaluation) -> str:
    """The outcome of an evaluation."""
    how = "greedy" if config.eval.temperature == 0 else f"temperature {config.eval.temperature:g}"
    when = "before training" if step == 0 else f"after step {step}"
    return (
        f"held-out accuracy {when}: {measured(evaluation.accuracy)}  (reward {measured(evaluation.reward)}, "
        f"{evaluation.mean_length:.1f} tokens, {tasks_played(evaluation)}, {how})"
    )


def tasks_played(evaluation: Evaluation) -> str:
    """How many tasks an evaluation played, and of how many it does not tell."""
    without = f", {evaluation.unscored} of them without a reward and left out" if evaluation.unscored else ""
    return f"{len(evaluation.trajectories)} tasks{without}"


def step_line(config: TrainConfig, metrics: dict[str, float], seconds_left: float) -> str:
    """The numbers of a step."""
    failed = f"  failed {metrics['failed']:.0f}" if metrics["failed"] else ""
    return (
        f"step {metrics['step']:>4.0f}/{config.steps}  reward {measured(metrics['reward']):>6}  "
        f"length {metrics['completions/mean_length']:6.1f}  entropy {measured(metrics['entropy']):>5}  "
        f"kl {metrics['kl']:.4f}  grad {metrics['grad_norm']:.3f}  {metrics['tokens_per_second']:6.0f} tok/s  "
        f"{metrics['time/step']:5.2f} s  left {clock(seconds_left)}{failed}"
    )


def measured(value: float) -> str:
    """A mean, which is no number where there was nothing to measure."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def summary(view: PlainView, result: TrainResult) -> str:
    """What the run came to."""
    rewards = [reward for reward in view.rewards if not math.isnan(reward)]
    lines = [f"reward   {curve(rewards)}"] if rewards else []
    if len(rewards) >= 10:
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        lines.append(f"reward, mean of 5 steps: {first:.3f} at the start, {last:.3f} at the end")
    if len(view.accuracies) >= 2:
        before, after = (measured(view.accuracies[place][1]) for place in (0, -1))
        lines.append(f"held-out accuracy: {before} before, {after} after")
    lines.append(f"{clock(time.perf_counter() - view.started)} in all; adapter in {result.folder / 'adapters'}")
    return "\n".join(lines)


def curve(values: Sequence[float]) -> str:
    """Numbers as a line of bars, newest on the right; what is no number is left out."""
    values = [value for value in values if not math.isnan(value)]
    per_bar = max(1, -(-len(values) // CURVE_WIDTH))
    means = [sum(part) / len(part) for i in range(0, len(values), per_bar) if (part := values[i : i + per_bar])]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def clock(seconds: float) -> str:
    """Seconds as minutes:seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
