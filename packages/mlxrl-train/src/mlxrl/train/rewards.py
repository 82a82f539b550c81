"""Score trajectories: the environment's own rewards and the configured functions, weighted."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from mlxrl.algo import soft_overlong_penalties
from mlxrl.env import Task
from mlxrl.rollout import Trajectory

ENVIRONMENT, OVERLONG = "environment", "overlong"
# Beyond it, squares of rewards leave the range in which group statistics are exact.
LARGEST_REWARD = 1e9


@dataclass(frozen=True)
class NamedReward:
    """A reward function of a run; `function` None stands for the environment's own return."""

    name: str
    weight: float
    function: Callable[..., list[float | None]] | None = None


class RewardError(RuntimeError):
    """A reward function that broke its contract; the message names the function and the row."""


def score_rewards(trajectories: Sequence[Trajectory], rewards: Sequence[NamedReward]) -> list[Trajectory]:
    """Give every trajectory its reward and its parts.

    Each function is called once, with all trajectories that did not fail. A function that returns None for a row
    leaves that row's weighted sum; a row for which all do has no reward and stays out of baseline and loss.

    Args:
        trajectories: the trajectories of a step.
        rewards: the functions and their weights.

    Returns:
        The trajectories with `reward` and `reward_parts` set.

    Raises:
        RewardError: a function raised, returned another number of rewards than rows, or something else than a finite
            number or None.
    """
    sound = [trajectory for trajectory in trajectories if not trajectory.failed]
    parts: dict[int, dict[str, float | None]] = {id(trajectory): {} for trajectory in sound}
    for reward in rewards:
        values = _call(reward, sound) if sound else []
        for trajectory, value in zip(sound, values, strict=True):
            parts[id(trajectory)][reward.name] = value
    weights = {reward.name: reward.weight for reward in rewards}
    return [
        replace(t, reward=_total(parts[id(t)], weights), reward_parts=parts[id(t)]) if id(t) in parts else t
        for t in trajectories
    ]


def reward_table(trajectories: Sequence[Trajectory], rewards: Sequence[NamedReward]) -> list[list[float | None]]:
    """`[B][K]`, the parts of each trajectory's reward in the order of the functions; None where one abstains."""
    return [[trajectory.reward_parts.get(reward.name) for reward in rewards] for trajectory in trajectories]


def charge_overlong(trajectories: Sequence[Trajectory], *, max_length: int, buffer: int) -> list[Trajectory]:
    """Charge trajectories for the last tokens before the limit: DAPO's soft overlong punishment, as a part of its own.

    Args:
        trajectories: scored trajectories.
        max_length: most tokens that a trajectory may sample.
        buffer: tokens before that over which the penalty grows from 0 to 1.
    """
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    penalties = soft_overlong_penalties(lengths, max_length=max_length, buffer=buffer)
    return [
        t if t.reward is None else replace(t, reward=t.reward + p, reward_parts={**t.reward_parts, OVERLONG: p})
        for t, p in zip(trajectories, penalties, strict=True)
    ]


def _call(reward: NamedReward, trajectories: Sequence[Trajectory]) -> list[float | None]:
    if reward.function is None:
        returns = [trajectory.environment_return for trajectory in trajectories]
        return [_checked(reward.name, row, value) for row, value in enumerate(returns)]
    tasks = [trajectory.task for trajectory in trajectories]
    names = dict.fromkeys(name for task in tasks if isinstance(task, Task) for name in task.columns)
    columns = {name: [task.columns.get(name) if isinstance(task, Task) else None for task in tasks] for name in names}
    arguments = {
        "prompts": [task.prompt if isinstance(task, Task) else task for task in tasks],
        "completions": [trajectory.completion for trajectory in trajectories],
        "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
        "trajectories": list(trajectories),
        **columns,
    }
    try:
        values: Any = reward.function(**_accepted(reward.function, arguments))
    except Exception as error:
        raise RewardError(f"reward {reward.name!r} raised {type(error).__name__}: {error}") from error
    if hasattr(values, "tolist"):  # an array
        values = values.tolist()
    if not isinstance(values, Sequence) or len(values) != len(trajectories):
        count = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise RewardError(f"reward {reward.name!r} must return a list of {len(trajectories)} rewards, got {count}.")
    return [_checked(reward.name, row, value) for row, value in enumerate(values)]


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes by name: all of them where it has **columns."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _checked(name: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    number: Any = value
    if not isinstance(value, Real) or not -LARGEST_REWARD <= number <= LARGEST_REWARD:
        raise RewardError(
            f"reward {name!r} must return numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g} or None, "
            f"got {value!r} in row {row}."
        )
    return float(number)


def _total(parts: dict[str, float | None], weights: dict[str, float]) -> float | None:
    given = [weights[name] * value for name, value in parts.items() if value is not None]
    return math.fsum(given) if given else None
