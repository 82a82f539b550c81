"""One step of training: sample, score, take advantages, follow the gradient."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from mlxrl.algo import TrajectoryAlgorithm
from mlxrl.policy import on_cuda
from mlxrl.rollout import Trajectory, derive_seed
from mlxrl.train.algorithms import kl_in_reward
from mlxrl.train.batch import TrainBatch, make_batch
from mlxrl.train.clock import Clock
from mlxrl.train.config import TrainConfig
from mlxrl.train.groups import SampledGroups, sample_groups
from mlxrl.train.metrics import Metrics, cost_metrics, failure_metrics, mean_metrics, rollout_metrics
from mlxrl.train.optimizers import learning_rate
from mlxrl.train.rewards import reward_table
from mlxrl.train.session import Session
from mlxrl.train.update import optimizer_step, skipped_step


class Step(NamedTuple):
    """What a step came to: its metrics, the groups it sampled, and the batch it trained on, if a group was kept."""

    metrics: Metrics
    groups: SampledGroups
    batch: TrainBatch | None


def train_step(session: Session, step: int) -> Step:
    """Sample groups, score them, take their advantages, follow the gradient.

    Args:
        session: the run's live objects; model, optimizer and loader move on.
        step: from 0.
    """
    config, clock = session.config, Clock()
    mx.reset_peak_memory()
    session.optimizer.learning_rate = learning_rate(config.optimizer, step, config.steps)

    groups = sample_groups(session, step, clock)
    mx.random.seed(derive_seed(config.seed, step))  # for dropout; environments and rewards may have set another
    with clock("score"):
        batch = _make_batch(session, groups.kept, step) if groups.kept else None
    with clock("update"):
        taken = [_update(session, part, step) for part in _optimizer_batches(session, batch, step)] or [skipped_step()]
    if not on_cuda():  # there it takes half a second, and the memory limit bounds the cache; see `planned_memory`
        mx.clear_cache()  # the next rollout has other shapes; what this step freed would only pile up

    metrics = {
        "step": step + 1,
        **rollout_metrics(groups.sampled, session.rewards),
        **failure_metrics(groups.reward_log, session.curriculum.rewards),
        "groups_dropped": float(groups.dropped),
        **mean_metrics(taken),
        "forwards/old": float(batch.forwards["old"] if batch else 0),
        "forwards/reference": float(batch.forwards["reference"] if batch else 0),
        "lr": learning_rate(config.optimizer, step, config.steps),
        **cost_metrics(groups.costs),
        "rollout/merged": float(session.engine.weights == "merged"),
        "rollout/mismatch": _first_scored(taken)["sampling_logp_difference/mean"],
        "peak_memory_gb": mx.get_peak_memory() / 2**30,
        **{f"time/{name}": seconds for name, seconds in clock.seconds.items()},
        "time/step": clock.elapsed(),
    }
    if batch is not None and isinstance(session.algorithm, TrajectoryAlgorithm):
        metrics |= session.algorithm.step_metrics(batch.view)
    metrics["tokens_per_second"] = metrics["num_tokens"] / metrics["time/rollout"]
    return Step(metrics, groups, batch)


def _make_batch(session: Session, trajectories: list[Trajectory], step: int) -> TrainBatch:
    config = session.config
    every = config.logging.full_score_every
    return make_batch(
        session.model,
        trajectories,
        session.algorithm,
        rewards=reward_table(trajectories, session.rewards),
        reward_weights=[reward.weight for reward in session.rewards],
        temperature=config.sampling.temperature,
        reference=config.kl_beta > 0,
        reference_adapter=session.reference_adapter,
        old=_num_updates(config) > 1,
        full_score=every > 0 and step % every == 0,
        echo=session.echo(step) > 0,
        mask_truncated_rows=config.algorithm.mask_truncated,
        max_rows=config.micro_batch_size,
        **_limits(session),
    )


def _update(session: Session, batch: TrainBatch, step: int) -> Metrics:
    config = session.config
    return optimizer_step(
        model=session.model,
        optimizer=session.optimizer,
        batch=batch,
        algorithm=session.algorithm,
        beta=0.0 if kl_in_reward(config) else config.kl_beta,
        kl_estimator=config.algorithm.kl_estimator,
        echo_alpha=session.echo(step),
        correction=session.correction,
        max_grad_norm=config.update.max_grad_norm or None,
        micro_batch_size=config.micro_batch_size,
        **_limits(session),
    )


def _optimizer_batches(session: Session, batch: TrainBatch | None, step: int) -> Iterator[TrainBatch]:
    """The batch itself, or for several updates its shares: every pass splits the trajectories anew."""
    config = session.config
    if batch is None:
        return
    if _num_updates(config) == 1:
        yield batch
        return
    for update in range(config.update.updates_per_batch):
        rows = list(range(batch.size))
        random.Random(derive_seed(config.seed, step, update)).shuffle(rows)
        for part in range(min(config.update.minibatches, batch.size)):  # a filter may have kept fewer than there are
            yield batch.optimizer_batch(sorted(rows[part :: config.update.minibatches]), session.algorithm)


def _first_scored(taken: list[Metrics]) -> Metrics:
    """The first update that scored a row, if one did: later ones move on from what was sampled."""
    return next((update for update in taken if update["scored_rows"]), taken[0])


def _num_updates(config: TrainConfig) -> int:
    return config.update.updates_per_batch * config.update.minibatches


def _limits(session: Session) -> dict[str, Any]:
    return {"pad_token_id": session.pad_token_id, "max_tokens": session.config.update.max_tokens_per_micro_batch}
