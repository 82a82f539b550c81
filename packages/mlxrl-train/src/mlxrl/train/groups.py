"""The groups of a step: sampled once, or until enough of them have something to teach."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from mlxrl.rollout import RolloutStats, Trajectory, group_requests
from mlxrl.train.batch import trajectory_view
from mlxrl.train.clock import Clock
from mlxrl.train.rewards import RewardLog, charge_overlong, reward_table, score_rewards
from mlxrl.train.session import Session

# Draws of a step under dynamic sampling, where the config does not say.
MAX_DRAWS = 4


class SampledGroups(NamedTuple):
    """What a step sampled.

    Args:
        sampled: every trajectory, its reward shaped.
        kept: those to train on; empty where a filter kept none.
        dropped: groups that the algorithm's filter left out.
        costs: what each draw's rollout cost.
        reward_log: what went wrong with their rewards.
    """

    sampled: list[Trajectory]
    kept: list[Trajectory]
    dropped: int
    costs: list[RolloutStats]
    reward_log: RewardLog


def sample_groups(session: Session, step: int, clock: Clock) -> SampledGroups:
    """Sample and score the groups of a step; where the algorithm filters groups, draw again for those it dropped.

    Groups are judged on the task reward, before any shaping, and never more are drawn than are missing, so that none
    is left over. DAPO's dynamic sampling, arXiv 2503.14476, equation 11.

    Args:
        session: the run's live objects; the loader moves on.
        step: from 0.
        clock: is told the time of rollouts and rewards.
    """
    config = session.config
    sampled: list[Trajectory] = []
    keep: list[bool] = []
    costs: list[RolloutStats] = []
    log = RewardLog()
    for _ in range(config.algorithm.max_draws or MAX_DRAWS):
        missing = config.groups_per_step - _num_groups(list(compress(sampled, keep)))
        if missing == 0:
            break
        drawn = _draw(session, step, missing, clock, log)
        sampled += drawn
        costs.append(session.engine.stats)
        keep += _judge(session, drawn)
    if config.algorithm.overlong_buffer is not None:
        buffer = config.algorithm.overlong_buffer
        sampled = charge_overlong(sampled, max_action=config.max_completion_len, buffer=buffer)
    kept = list(compress(sampled, keep))
    dropped = _num_groups(sampled) - _num_groups(kept)
    return SampledGroups(sampled, kept, dropped=dropped, costs=costs, reward_log=log)


def _draw(session: Session, step: int, count: int, clock: Clock, log: RewardLog) -> list[Trajectory]:
    with clock("rollout"):
        groups = session.loader.next(count)
        requests = group_requests(
            [group.task for group in groups],
            session.curriculum.suite.make,
            group_size=session.config.group_size,
            seed=session.config.seed,
            step=step,
            group_ids=[group.id for group in groups],
        )
        trajectories = session.engine.rollout(requests, policy_version=step)
    with clock("reward"):
        return score_rewards(trajectories, session.curriculum.rewards, log)


def _judge(session: Session, trajectories: list[Trajectory]) -> list[bool]:
    """Per trajectory, whether the algorithm trains on it."""
    rewards = session.curriculum.rewards
    view = trajectory_view(trajectories, reward_table(trajectories, rewards), [reward.weight for reward in rewards])
    rows = session.algorithm.filter_batch(view)
    return [rows is None or row in rows for row in range(len(trajectories))]


def _num_groups(trajectories: Sequence[Trajectory]) -> int:
    return len({trajectory.group_id for trajectory in trajectories})
