"""The training loop."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlxrl.algo import TrajectoryAlgorithm
from mlxrl.rollout import Trajectory, derive_seed, group_requests
from mlxrl.train.algorithms import kl_in_reward
from mlxrl.train.batch import TrainBatch, make_batch
from mlxrl.train.clock import Clock
from mlxrl.train.config import TrainConfig
from mlxrl.train.config_file import load_config
from mlxrl.train.errors import RunError
from mlxrl.train.evaluation import Evaluation, evaluate
from mlxrl.train.files import read_lines
from mlxrl.train.metrics import Metrics, mean_metrics, rollout_metrics
from mlxrl.train.optimizers import learning_rate
from mlxrl.train.records import save_batch, trajectory_record
from mlxrl.train.rewards import score_rewards
from mlxrl.train.run_folder import RunFolder, RunState, open_run
from mlxrl.train.session import Session, open_session
from mlxrl.train.update import optimizer_step

# Consecutive steps with numbers that are not finite, after which a run stops: the policy is beyond repair by then.
MAX_NONFINITE_STEPS = 5


class Observer:
    """Is told what a run does; every method does nothing until it is overridden."""

    def on_start(self, session: Session, folder: Path, first_step: int) -> None:
        """The model is loaded and the first step is about to run."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The held-out tasks were played after `step` steps."""

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
    config: TrainConfig, *, resume: bool = False, force: bool = False, observer: Observer | None = None
) -> TrainResult:
    """Train a policy as the config says.

    Args:
        config: the run.
        resume: go on from the newest checkpoint of `config.output`.
        force: replace a run that is there.
        observer: is told what happens.

    Raises:
        ConfigError: the config cannot be run.
        RunError: the run folder cannot be used, or the policy broke.
        RewardError: a reward function broke its contract.
    """
    observer = observer or Observer()
    folder = open_run(config, resume=resume, force=force)
    session = open_session(config)
    state = RunState()
    if resume:
        state = folder.restore(config, session.model, session.optimizer)
        session.loader.position, session.loader.passed_over = state.position, state.passed_over
    else:
        folder.start(config)
    if state.step == 0:
        folder.log(folder.events, *({"step": 0, "event": "inactive", "reason": why} for why in session.inactive))
    observer.on_start(session, folder.path, state.step)

    metrics: list[Metrics] = []
    evaluations: list[tuple[int, Evaluation]] = []

    def evaluate_if_due() -> None:
        every = config.eval.every
        if session.curriculum.held_out and (state.step in (0, config.steps) or (every and state.step % every == 0)):
            evaluations.append((state.step, _evaluate(session, folder, state.step)))
            observer.on_evaluation(*evaluations[-1])

    if state.step not in {row["step"] for row in read_lines(folder.evaluations)}:  # a run may break off before it
        evaluate_if_due()
    while state.step < config.steps:
        step_metrics, trajectories, batch = train_step(session, state.step)
        state.step += 1
        state.position, state.passed_over = session.loader.position, session.loader.passed_over
        folder.log(folder.rollouts, *(trajectory_record(state.step, trajectory) for trajectory in trajectories))
        folder.log(folder.events, *_faults(state.step, trajectories, step_metrics))
        folder.log(folder.metrics, step_metrics)
        metrics.append(step_metrics)
        observer.on_step(step_metrics, trajectories)
        _count_faults(state, step_metrics, trajectories)
        last = state.step == config.steps
        if last and folder.batch_file is not None:
            save_batch(folder.batch_file, batch)
        if last or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
            folder.save(state, config, session.model, session.optimizer, session.report, session.lora)
        evaluate_if_due()
    result = TrainResult(folder.path, tuple(metrics), tuple(evaluations))
    observer.on_end(result)
    return result


def train_step(session: Session, step: int) -> tuple[Metrics, list[Trajectory], TrainBatch]:
    """One step: sample groups, score them, take their advantages, follow the gradient.

    Args:
        session: the run's live objects; model, optimizer and loader move on.
        step: from 0.

    Returns:
        The step's metrics, its trajectories and its batch.
    """
    config, algorithm, clock = session.config, session.algorithm, Clock()
    mx.random.seed(derive_seed(config.seed, step))  # dropout; sampling has keys of its own
    mx.reset_peak_memory()

    with clock("rollout"):
        groups = session.loader.next(config.groups_per_step)
        requests = group_requests(
            [group.task for group in groups],
            session.curriculum.suite.make,
            group_size=config.group_size,
            seed=config.seed,
            step=step,
            group_ids=[group.id for group in groups],
        )
        trajectories = session.engine.rollout(requests, policy_version=step)
    with clock("reward"):
        trajectories = score_rewards(trajectories, session.curriculum.rewards)
    updates = config.update.updates_per_batch * config.update.minibatches
    limits: dict[str, Any] = {
        "pad_token_id": session.pad_token_id,
        "max_tokens": config.update.max_tokens_per_micro_batch,
    }
    with clock("score"):
        batch = make_batch(
            session.model,
            trajectories,
            algorithm,
            rewards=[[t.reward_parts.get(r.name) for r in session.curriculum.rewards] for t in trajectories],
            reward_weights=[reward.weight for reward in session.curriculum.rewards],
            temperature=config.sampling.temperature,
            reference=config.kl_beta > 0,
            old=updates > 1,
            mask_truncated_rows=config.algorithm.mask_truncated,
            max_rows=config.micro_batch_size,
            **limits,
        )
    session.optimizer.learning_rate = learning_rate(config.optimizer, step, config.steps)
    with clock("update"):
        taken = [
            optimizer_step(
                model=session.model,
                optimizer=session.optimizer,
                batch=batch if updates == 1 else batch.optimizer_batch(rows, algorithm),
                algorithm=algorithm,
                beta=0.0 if kl_in_reward(config) else config.kl_beta,
                kl_estimator=config.algorithm.kl_estimator,
                echo_alpha=session.echo(step),
                max_grad_norm=config.update.max_grad_norm or None,
                micro_batch_size=config.micro_batch_size,
                **limits,
            )
            for rows in _minibatches(config, step, batch.size)
        ]
    mx.clear_cache()  # the next rollout has other shapes; what this step freed would only pile up

    metrics = {"step": step + 1, **rollout_metrics(trajectories, session.curriculum.rewards), **mean_metrics(taken)}
    if isinstance(algorithm, TrajectoryAlgorithm):
        metrics |= algorithm.step_metrics(batch.view)
    metrics["lr"] = learning_rate(config.optimizer, step, config.steps)
    metrics["passed_over"] = session.loader.passed_over
    metrics["tokens_per_second"] = metrics["num_tokens"] / clock.seconds["rollout"]
    metrics["peak_memory_gb"] = mx.get_peak_memory() / 2**30
    metrics |= {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
    metrics["time/step"] = clock.elapsed()
    return metrics, trajectories, batch


def resume(folder: str | Path, *, steps: int | None = None, observer: Observer | None = None) -> TrainResult:
    """Go on with a run from its newest checkpoint.

    Args:
        folder: the run folder.
        steps: train up to this step instead of the config's.
        observer: is told what happens.

    Raises:
        RunError: the folder holds no run, or its newest checkpoint cannot be used.
    """
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder} holds no run to resume: there is no config.toml.")
    batch_ending = ".npz" if (load_config(folder / "config.toml").output or "").endswith(".npz") else ""
    overrides: dict[str, Any] = {"output": f"{folder}{batch_ending}"} | ({} if steps is None else {"steps": steps})
    return train(load_config(folder / "config.toml", overrides), resume=True, observer=observer)


def _evaluate(session: Session, folder: RunFolder, step: int) -> Evaluation:
    curriculum = session.curriculum
    evaluation = evaluate(
        session.eval_engine, curriculum.suite.make, curriculum.held_out, curriculum.rewards, seed=session.config.seed
    )
    row = {"step": step, "tasks": len(curriculum.held_out), "temperature": session.config.eval.temperature}
    outcome = {"reward": evaluation.reward, "accuracy": evaluation.accuracy, "mean_length": evaluation.mean_length}
    folder.log(folder.evaluations, row | outcome)
    return evaluation


def _minibatches(config: TrainConfig, step: int, size: int) -> Iterator[list[int]]:
    """The rows of each optimizer step on a batch: every pass splits the trajectories anew."""
    for update in range(config.update.updates_per_batch):
        rows = list(range(size))
        random.Random(derive_seed(config.seed, step, update)).shuffle(rows)
        for part in range(config.update.minibatches):
            yield sorted(rows[part :: config.update.minibatches])


def _count_faults(state: RunState, metrics: Metrics, trajectories: Sequence[Trajectory]) -> None:
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    # a policy that is no number draws one token for ever: its rewards are constant, and it has no gradient at all
    finite = finite and all(np.isfinite(part.sampler_logprobs).all() for t in trajectories for part in t.segments)
    state.nonfinite_in_a_row = 0 if finite else state.nonfinite_in_a_row + 1
    if state.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
        raise RunError(
            f"the policy or its gradient was not finite in {state.nonfinite_in_a_row} steps in a row; start a new run "
            "with a lower optimizer.learning_rate."
        )


def _faults(step: int, trajectories: Sequence[Trajectory], metrics: Metrics) -> list[dict[str, Any]]:
    failed = [
        {"step": step, "event": "failed", "group": t.group_id, "sample": t.sample_index, "reason": t.error}
        for t in trajectories
        if t.failed
    ]
    if metrics["skipped"]:
        failed.append(
            {"step": step, "event": "skipped", "updates": metrics["skipped"], "grad_norm": metrics["grad_norm"]}
        )
    return failed
