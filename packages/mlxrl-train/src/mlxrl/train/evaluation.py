"""Held-out evaluation: the policy plays tasks that it is not trained on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlxrl.env import EnvFactory
from mlxrl.rollout import Engine, SamplingConfig, Trajectory, group_requests
from mlxrl.train.metrics import mean, succeeded
from mlxrl.train.reward_calls import NamedReward
from mlxrl.train.rewards import RewardLog, score_rewards


class Evaluation(NamedTuple):
    """The outcome of an evaluation.

    Args:
        reward: mean reward of the trajectories that have one; NaN where none has, and so is accuracy.
        accuracy: share of these on which every part of the reward with a positive weight that did not abstain had its
            full mark: of a reward function 1, of the environment's own reward an episode that the environment itself
            ended with a positive last reward (as the metric success_rate has it). One without such a part has none.
        unscored: trajectories without a reward: failed ones, and those of which all functions abstain.
        mean_length: mean number of sampled tokens.
        trajectories: what was played.
        reward_log: what went wrong with their rewards.
    """

    reward: float
    accuracy: float
    unscored: int
    mean_length: float
    trajectories: tuple[Trajectory, ...]
    reward_log: RewardLog


def evaluate(
    engine: Engine,
    env_factory: EnvFactory,
    tasks: Sequence[Any],
    rewards: Sequence[NamedReward],
    *,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
) -> Evaluation:
    """Play each task once.

    Args:
        engine: plays them.
        env_factory: makes the environments.
        tasks: the tasks.
        rewards: how they are scored.
        seed: seed of environments and sampling.
        sampling: how tokens are drawn, temperature 0 is greedy; None: as the engine draws.
    """
    requests = group_requests(tasks, env_factory, group_size=1, seed=seed, sampling=sampling)
    log = RewardLog()
    trajectories = score_rewards(engine.rollout(requests), rewards, log)
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    earned = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    return Evaluation(
        reward=mean(earned),
        accuracy=mean([float(has_full_marks(trajectory, rewards)) for trajectory in scored]),
        unscored=len(trajectories) - len(earned),
        mean_length=mean([trajectory.num_sampled for trajectory in trajectories]),
        trajectories=tuple(trajectories),
        reward_log=log,
    )


def has_full_marks(trajectory: Trajectory, rewards: Sequence[NamedReward]) -> bool:
    """Whether a scored trajectory counts as accurate; see `Evaluation`."""
    parts = [(reward, trajectory.reward_parts.get(reward.name)) for reward in rewards if reward.weight > 0]
    marks = [
        succeeded(trajectory) if reward.function is None else part >= 1 - 1e-6
        for reward, part in parts
        if part is not None
    ]
    return bool(marks) and all(marks)
