"""Group-relative advantages of whole trajectories, on the host in float64.

Every function maps the rewards of B rows to B advantages. A reward of None abstains: the row leaves its group's
statistics and gets 0. A group whose rewards are constant, or that has fewer than two members left, gives exactly 0.
"""

import math
from collections.abc import Callable, Sequence

from mlxrl.algo._checks import check_finite, check_length
from mlxrl.algo.groups import GroupStructure, group_ids_of, group_members

CONSTANT_TOLERANCE = 1e-6
"""Rewards whose spread is below this share of max(1, their largest magnitude) count as equal."""


def is_constant(values: Sequence[float]) -> bool:
    """Say whether values are equal up to rounding: max - min <= 1e-6 * max(1, max |r|).

    Args:
        values: rewards of one group.

    Returns:
        True for equal rewards and for fewer than two of them; False where one is NaN.
    """
    if len(values) < 2:
        return True
    least, tolerance = min(values), CONSTANT_TOLERANCE * max(1.0, *map(abs, values))
    return all(value - least <= tolerance for value in values)  # each by itself: max and min may pass over a NaN


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number, summed without rounding error."""
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float], ddof: int = 0) -> float:
    """Return sqrt(sum (x - mean)^2 / (n - ddof)); `ddof` 0 is the population's, 1 the sample's."""
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - ddof))


def centred_advantages(rewards: Sequence[float | None], group_structure: GroupStructure) -> list[float]:
    """Return the reward minus the group's mean.

    A_i = r_i - mean_j r_j. Source: Dr. GRPO, arXiv 2503.20783, section 3.2.

    Args:
        rewards: [B]; None abstains.
        group_structure: the group size, or one group id per row.

    Returns:
        [B] advantages.

    Raises:
        ValueError: a reward is NaN or infinite, or the groups do not fit the rows.
    """
    return _relative(rewards, group_structure, _centre)


def standardised_advantages(
    rewards: Sequence[float | None], group_structure: GroupStructure, *, eps: float = 1e-6, ddof: int = 0
) -> list[float]:
    """Return the reward in standard deviations from the group's mean.

    A_i = (r_i - mean_j r_j) / (std_j r_j + eps). Source: GRPO, arXiv 2402.03300, section 4.1.2.

    Args:
        rewards: [B]; None abstains.
        group_structure: the group size, or one group id per row.
        eps: added to the standard deviation.
        ddof: 0 for the population's standard deviation, 1 for the sample's.

    Returns:
        [B] advantages.

    Raises:
        ValueError: a reward is NaN or infinite, or the groups do not fit the rows.
    """

    def standardise(values: list[float]) -> list[float]:
        scale = standard_deviation(values, ddof) + eps
        return [deviation / scale for deviation in _centre(values)]

    return _relative(rewards, group_structure, standardise)


def leave_one_out_advantages(rewards: Sequence[float | None], group_structure: GroupStructure) -> list[float]:
    """Return the reward minus the mean of the group's other rewards.

    A_i = r_i - mean_{j != i} r_j = G / (G - 1) (r_i - mean_j r_j). Source: RLOO, arXiv 2402.14740.

    Args:
        rewards: [B]; None abstains.
        group_structure: the group size, or one group id per row.

    Returns:
        [B] advantages.

    Raises:
        ValueError: the group size is 1, a reward is NaN or infinite, or the groups do not fit the rows.
    """
    if group_structure == 1:
        raise ValueError("group_structure must be at least 2 for a leave-one-out baseline, got 1")

    def leave_one_out(values: list[float]) -> list[float]:
        size = len(values)
        return [deviation * size / (size - 1) for deviation in _centre(values)]

    return _relative(rewards, group_structure, leave_one_out)


def maxrl_advantages(rewards: Sequence[float | None], group_structure: GroupStructure) -> list[float]:
    """Return the reward relative to the group's mean, which approaches maximum likelihood as groups grow.

    A_i = (r_i - mean_j r_j) / mean_j r_j, 0 if the mean is not positive. Source: MaxRL, arXiv 2602.02710.

    Args:
        rewards: [B], meant for success rewards in [0, 1]; None abstains.
        group_structure: the group size, or one group id per row.

    Returns:
        [B] advantages.

    Raises:
        ValueError: a reward is NaN or infinite, or the groups do not fit the rows.
    """

    def relative_to_mean(values: list[float]) -> list[float]:
        centre = mean(values)
        return [deviation / centre if centre > 0 else 0.0 for deviation in _centre(values)]

    return _relative(rewards, group_structure, relative_to_mean)


def gdpo_advantages(
    rewards: Sequence[Sequence[float | None]],
    reward_weights: Sequence[float],
    group_structure: GroupStructure,
    *,
    eps: float = 1e-6,
    ddof: int = 0,
) -> list[float]:
    """Return the weighted sum of separately standardised rewards, whitened over the batch.

    S_i = sum_k w_k A_ik with A_k the standardised advantage of reward k; A_i = S_i / (std_batch S + eps). The batch
    mean of S is 0 by construction (every group's standardised advantages sum to 0), so only the scale is divided
    out and a group without signal stays exactly 0. Source: GDPO, arXiv 2601.05242.

    Args:
        rewards: [B][K]; None abstains in that reward function only.
        reward_weights: [K].
        group_structure: the group size, or one group id per row.
        eps: added to each standard deviation.
        ddof: 0 for the population's standard deviation within a group, 1 for the sample's.

    Returns:
        [B] advantages.

    Raises:
        ValueError: a reward is NaN or infinite, or the groups do not fit the rows.
    """
    columns = [
        standardised_advantages([row[k] for row in rewards], group_structure, eps=eps, ddof=ddof)
        for k in range(len(reward_weights))
    ]
    sums = [
        math.fsum(weight * column[i] for weight, column in zip(reward_weights, columns, strict=True))
        for i in range(len(rewards))
    ]
    counted = [value for value, row in zip(sums, rewards, strict=True) if any(reward is not None for reward in row)]
    if is_constant(counted):
        return [0.0] * len(sums)
    scale = standard_deviation(counted) + eps
    return [value / scale for value in sums]


def weighted_rewards(rewards: Sequence[Sequence[float | None]], reward_weights: Sequence[float]) -> list[float | None]:
    """Return each row's weighted sum over the reward functions that did not abstain.

    Args:
        rewards: [B][K]; None abstains.
        reward_weights: [K].

    Returns:
        [B]; None where every function abstained.

    Raises:
        ValueError: a row does not have K rewards, or a reward is NaN or infinite.
    """
    totals: list[float | None] = []
    for i, row in enumerate(rewards):
        if len(row) != len(reward_weights):
            raise ValueError(
                f"rewards must have one entry per reward weight, {len(reward_weights)}, got {len(row)} in row {i}"
            )
        parts = [weight * reward for weight, reward in zip(reward_weights, row, strict=True) if reward is not None]
        totals.append(math.fsum(parts) if parts else None)
        if parts:
            check_finite("rewards", math.fsum(parts), i)
    return totals


def _centre(values: list[float]) -> list[float]:
    centre = mean(values)
    return [value - centre for value in values]


def _relative(
    rewards: Sequence[float | None], group_structure: GroupStructure, relative: Callable[[list[float]], list[float]]
) -> list[float]:
    """Apply `relative` to the rewards of each group that has a signal; every other row gets 0."""
    group_ids = group_ids_of(group_structure, len(rewards))
    check_length("group_structure", group_ids, len(rewards), "rewards")
    for i, reward in enumerate(rewards):
        if reward is not None:
            check_finite("rewards", reward, i)
    advantages = [0.0] * len(rewards)
    for rows in group_members(group_ids).values():
        present = [(row, reward) for row in rows if (reward := rewards[row]) is not None]
        values = [reward for _, reward in present]
        if not is_constant(values):
            for (row, _), advantage in zip(present, relative(values), strict=True):
                advantages[row] = advantage
    return advantages
