"""The training loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrl.rollout import Trajectory
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import load_config
from mlxrl.train.errors import RunFolderError
from mlxrl.train.evaluation import Evaluation, evaluate
from mlxrl.train.faults import broken_end, count_faults, ending_fault, failure_events, fault_events, watch_groups
from mlxrl.train.files import read_lines
from mlxrl.train.inputs import data_digests, with_absolute_paths
from mlxrl.train.memory_watch import plan_to_watch, planned_memory, watch_memory
from mlxrl.train.metrics import Metrics
from mlxrl.train.records import save_batch, trajectory_record
from mlxrl.train.rollout_weights import choose_weights, watch_mismatch
from mlxrl.train.run_folder import CHOICE, RunFolder, RunState, open_run, output_paths
from mlxrl.train.session import Session, open_session
from mlxrl.train.step import train_step
from mlxrl.train.tasks import Curriculum


class Observer:
    """Is told what a run does; every method does nothing until it is overridden."""

    def on_start(self, session: Session, folder: Path, first_step: int) -> None:
        """The model is loaded and the first step is about to run."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The held-out tasks were played after `step` steps."""

    def on_warning(self, reason: str) -> None:
        """Something is not as planned."""

    def on_step(self, metrics: Metrics, trajectories: Sequence[Trajectory]) -> None:
        """A step was taken."""

    def on_end(self, result: "TrainResult") -> None:
        """The run is over."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Args:
        folder: the run folder.
        metrics: one dict a step, those of this call only.
        evaluations: step and outcome of each evaluation of this call.
    """

    folder: Path
    metrics: tuple[Metrics, ...]
    evaluations: tuple[tuple[int, Evaluation], ...]


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    observer: Observer | None = None,
    available_bytes: int | None = None,
    curriculum: Curriculum | None = None,
) -> TrainResult:
    """Train a policy as the config says.

    Args:
        config: the run.
        resume: go on from the newest checkpoint of `config.output`: bit for bit, while the config is as it was.
        force: replace a run that is there.
        observer: is told what happens.
        available_bytes: memory that rollout.weights = "auto" may count on, and at whose end a run is warned; by default
            what this machine has.
        curriculum: what `make_curriculum` made of the config, where that has been done.

    Raises:
        ConfigError: the config cannot be run.
        RunError: the run folder cannot be used, or too many steps in a row came to nothing: DynamicSamplingError where
            no group had anything to teach, RewardError where a reward function failed on every row. A checkpoint is
            saved, except of a policy that is not finite.
    """
    observer = observer or Observer()
    config = located_config(config, resume=resume)  # an environment may change the working directory
    folder = open_run(config, resume=resume, force=force)
    try:
        return _train(config, folder, resume, observer, available_bytes, curriculum)
    finally:
        folder.release()


def _train(
    config: TrainConfig,
    folder: RunFolder,
    resume: bool,
    observer: Observer,
    available_bytes: int | None,
    curriculum: Curriculum | None,
) -> TrainResult:
    """`train` in a folder that can be used; arguments as there."""
    adapter = folder.started_from(config) if resume else None
    session = open_session(config, adapter=adapter, curriculum=curriculum)
    if resume:
        state = folder.restore(config, session.model, session.optimizer)
        session.loader.position = state.position
    else:
        state = RunState(data=data_digests(config))
        folder.start(config, session.model, session.report, session.lora)
    if config.rollout.weights == "auto":
        if state.rollout_weights is None:
            choice = choose_weights(session, available_bytes=available_bytes)
            state.rollout_weights = choice.weights
            folder.log(folder.events, {"step": state.step, "event": CHOICE, **choice._asdict()})
        session.engine.weights = state.rollout_weights
    if state.step == 0:
        folder.log(folder.events, *({"step": 0, "event": "inactive", "reason": why} for why in session.inactive))
        folder.log(folder.events, *({"step": 0, "event": "overlong", **out._asdict()} for out in session.left_out))
        told = [(reward.name, getattr(reward.function, "scored_by", None)) for reward in session.rewards]
        scored_by = [{"step": 0, "event": "scored_by", "reward": name, "reason": how} for name, how in told if how]
        folder.log(folder.events, *scored_by)
    observer.on_start(session, folder.path, state.step)
    plan = plan_to_watch(config, max_turns=session.curriculum.max_turns, available_bytes=available_bytes)

    metrics: list[Metrics] = []
    due = False  # whether a checkpoint is
    evaluations: list[tuple[int, Evaluation]] = []

    def warn(events: Sequence[dict[str, Any]]) -> None:
        folder.log(folder.events, *events)
        for event in events:
            observer.on_warning(event["reason"])

    def evaluate_if_due() -> None:
        every = config.eval.every
        if session.curriculum.held_out and (state.step in (0, config.steps) or (every and state.step % every == 0)):
            mx.reset_peak_memory()
            with planned_memory(plan):
                evaluations.append((state.step, _evaluate(session, folder, state.step)))
            warn(watch_memory(state, f"the evaluation at step {state.step}", mx.get_peak_memory(), plan))
            observer.on_evaluation(*evaluations[-1])

    if state.step not in {row["step"] for row in read_lines(folder.evaluations)}:  # a run may break off before it
        evaluate_if_due()
    while state.step < config.steps:
        with planned_memory(plan):
            step = train_step(session, state.step)
        state.step += 1
        state.position = session.loader.position
        count_faults(state, step)
        mismatch = watch_mismatch(session, state, step.metrics)
        folder.log(folder.rollouts, *(trajectory_record(state.step, trajectory) for trajectory in step.groups.sampled))
        folder.log(folder.events, *fault_events(step), *mismatch)
        folder.log(folder.metrics, step.metrics)
        metrics.append(step.metrics)
        peak = int(step.metrics["peak_memory_gb"] * 2**30)
        warn([*watch_groups(state, step.groups.sampled), *watch_memory(state, f"step {state.step}", peak, plan)])
        warn(broken_end(state, config, folder))
        observer.on_step(step.metrics, step.groups.sampled)
        fault = ending_fault(state, step, config, folder)
        # a fault of the tasks, not of the policy, which is as good as before
        last = state.step == config.steps or (fault is not None and not state.nonfinite_in_a_row)
        due = due or (config.checkpoint.every > 0 and state.step % config.checkpoint.every == 0)
        if last or (due and not state.nonfinite_in_a_row):  # one of a broken policy waits for a finite step
            folder.save(state, config, session.model, session.optimizer, session.report, session.lora)
            due = False
        if last and folder.batch_file is not None and step.batch is not None:
            save_batch(folder.batch_file, step.batch)
        if fault is not None:
            raise fault
        evaluate_if_due()
    result = TrainResult(folder.path, tuple(metrics), tuple(evaluations))
    observer.on_end(result)
    return result


def resume(
    folder: str | Path, overrides: Mapping[str, Any] | None = None, *, observer: Observer | None = None
) -> TrainResult:
    """Go on with a run from its newest checkpoint.

    Args:
        folder: the run folder.
        overrides: fields that may change on the way, for example {"steps": 200}, by their dotted names. With the
            config as it was, the run goes on bit for bit; fields that bound memory, such as gradient_checkpointing,
            leave its numbers the same within rounding.
        observer: is told what happens.

    Raises:
        RunFolderError: the folder holds no run, or its newest checkpoint cannot be used.
    """
    return train(resumed_config(folder, overrides), resume=True, observer=observer)


def resumed_config(folder: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config of a run to go on with: that of its folder, whatever it is called now; arguments as for `resume`."""
    folder = Path(folder)
    folder = folder.with_suffix("") if folder.suffix == ".npz" else folder
    if not (folder / "config.toml").is_file():
        raise RunFolderError(
            f"{folder} holds no run to resume: there is no config.toml; name the folder of one, or leave out --resume."
        )
    ending = ".npz" if (load_config(folder / "config.toml").output or "").endswith(".npz") else ""
    return load_config(folder / "config.toml", {**(overrides or {}), "output": f"{folder}{ending}"})


def located_config(config: TrainConfig, *, resume: bool = False) -> TrainConfig:
    """The config with its paths seen from the root; what a run does first, and what a plan of it may do before.

    Args:
        config: the run.
        resume: whether it goes on with the run of `config.output`, which then tells a `code_folder` that is left out.
    """
    saved = output_paths(config)[0] / "config.toml"
    if resume and config.code_folder is None and saved.is_file():
        config = config.model_copy(update={"code_folder": load_config(saved).code_folder})
    return with_absolute_paths(config)


def _evaluate(session: Session, folder: RunFolder, step: int) -> Evaluation:
    curriculum = session.curriculum
    evaluation = evaluate(
        session.engine,
        curriculum.suite.make,
        curriculum.held_out,
        curriculum.rewards,
        seed=session.config.seed,
        sampling=session.eval_sampling,
    )
    row = {"step": step, "tasks": len(curriculum.held_out), "temperature": session.config.eval.temperature}
    outcome = {"reward": evaluation.reward, "accuracy": evaluation.accuracy, "mean_length": evaluation.mean_length}
    failed = sum(trajectory.failed for trajectory in evaluation.trajectories)
    folder.log(folder.evaluations, row | outcome | {"failed": failed, "unscored": evaluation.unscored})
    failures = failure_events(step, evaluation.trajectories, evaluation.reward_log)
    folder.log(folder.events, *(event | {"evaluation": True} for event in failures))
    return evaluation
