"""Score trajectories: the environment's own rewards and the configured functions, weighted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mlxrl.algo import soft_overlong_penalties
from mlxrl.rollout import Trajectory
from mlxrl.train.reward_calls import Failure, NamedReward, ask

ENVIRONMENT, OVERLONG = "environment", "overlong"


class RewardFault(NamedTuple):
    """What went wrong in one way with a reward function.

    Args:
        reward: the function's name.
        reason: what it did; of an error its words only if they were the same for every row.
        rows: group and sample of the trajectories that failed by it; none where asking again helped.
        example: what the reason leaves out, as it was for the first of them: the error's words, or the value that is no
            reward. Empty where it leaves nothing out.
    """

    reward: str
    reason: str
    rows: tuple[tuple[int, int], ...]
    example: str = ""

    def __str__(self) -> str:
        """Reason and example."""
        return f"{self.reason}, for example {self.example}" if self.example else self.reason


@dataclass
class RewardLog:
    """What went wrong with the rewards of a step.

    Args:
        asked: trajectories that the functions were asked for.
        faults: what went wrong.
    """

    asked: int = 0
    faults: list[RewardFault] = field(default_factory=list)

    def failed(self, name: str) -> int:
        """How many rows a function failed on."""
        return sum(len(fault.rows) for fault in self.faults if fault.reward == name)


def score_rewards(
    trajectories: Sequence[Trajectory], rewards: Sequence[NamedReward], log: RewardLog | None = None
) -> list[Trajectory]:
    """Give every trajectory its reward and its parts.

    Each function is called once, with all trajectories that did not fail; where that raises or takes too long, once
    more for each row alone. A function that returns None for a row leaves that row's weighted sum; a row for which all
    do has no reward and stays out of baseline and loss. A row on which a function fails is a failed trajectory: its
    `error` names the function and says why. It fails where the function raises, takes too long, or gives an exception
    or what is no finite number for it; where the function returns no list of one value a row, every row does.

    Args:
        trajectories: the trajectories of a step.
        rewards: the functions and their weights.
        log: is told what went wrong.

    Returns:
        The trajectories with `reward` and `reward_parts` set, or with `error` where a function failed.
    """
    log = RewardLog() if log is None else log
    sound = [trajectory for trajectory in trajectories if not trajectory.failed]
    log.asked += len(sound)
    parts: list[dict[str, float | None]] = [{} for _ in sound]
    errors: list[list[str]] = [[] for _ in sound]
    for reward in rewards if sound else ():
        answers = ask(reward, sound)
        for row, value in enumerate(answers.values):
            parts[row][reward.name] = value
        if answers.retried is not None:
            log.faults.append(RewardFault(reward.name, answers.retried, ()))
        for rows in _by_kind(answers.failures):
            first, texts = answers.failures[rows[0]], {answers.failures[row].text for row in rows}
            reason = first.text if len(texts) == 1 else first.kind  # words that differ would make each row a fault
            example = "" if first.example in reason else first.example
            failed = tuple((sound[row].group_id, sound[row].sample_index) for row in rows)
            log.faults.append(RewardFault(reward.name, reason, failed, example))
            for row in rows:
                errors[row].append(f"reward {reward.name!r} {reason}")
    weights = {reward.name: reward.weight for reward in rewards}
    scored = {
        id(t): replace(t, error="; ".join(broken), reward=None, reward_parts={})
        if broken
        else replace(t, reward=_total(given, weights), reward_parts=given)
        for t, given, broken in zip(sound, parts, errors, strict=True)
    }
    return [scored.get(id(trajectory), trajectory) for trajectory in trajectories]


def reward_table(trajectories: Sequence[Trajectory], rewards: Sequence[NamedReward]) -> list[list[float | None]]:
    """`[B][K]`, the parts of each trajectory's reward in the order of the functions; None where one abstains."""
    return [[trajectory.reward_parts.get(reward.name) for reward in rewards] for trajectory in trajectories]


def charge_overlong(trajectories: Sequence[Trajectory], *, max_action: int, buffer: int) -> list[Trajectory]:
    """Charge trajectories for the last tokens before the limit: DAPO's soft overlong punishment, as a part of its own.

    Args:
        trajectories: scored trajectories.
        max_action: most tokens of an action; a trajectory may sample its `max_turns` times as many.
        buffer: tokens before that over which the penalty grows from 0 to 1; all of them, where they are fewer.
    """

    def charged(t: Trajectory) -> Trajectory:
        if t.reward is None:
            return t
        limit = t.max_turns * max_action
        (penalty,) = soft_overlong_penalties([t.num_sampled], max_length=limit, buffer=min(buffer, limit))
        return replace(t, reward=t.reward + penalty, reward_parts={**t.reward_parts, OVERLONG: penalty})

    return [charged(trajectory) for trajectory in trajectories]


def _by_kind(failures: Mapping[int, Failure]) -> list[list[int]]:
    """The rows that failed, those of one kind together."""
    rows: dict[str, list[int]] = {}
    for row, failure in failures.items():
        rows.setdefault(failure.kind, []).append(row)
    return list(rows.values())


def _total(parts: dict[str, float | None], weights: dict[str, float]) -> float | None:
    given = [weights[name] * value for name, value in parts.items() if value is not None]
    return math.fsum(given) if given else None
