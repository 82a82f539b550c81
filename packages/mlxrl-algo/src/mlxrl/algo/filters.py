"""Rows that do not train: groups without a signal, and truncated trajectories."""

from collections.abc import Sequence

import mlx.core as mx

from mlxrl.algo._checks import check_length
from mlxrl.algo.advantages import is_constant
from mlxrl.algo.batch import Role
from mlxrl.algo.groups import GroupStructure, group_ids_of, group_members


def informative_rows(rewards: Sequence[float | None], group_structure: GroupStructure) -> list[int]:
    """Return the rows of the groups whose rewards differ, the filter of dynamic sampling.

    A group is kept when max - min > 1e-6 * max(1, max |r|) over the members that have a reward; for success rewards
    that is 0 < successes < G. Source: DAPO, arXiv 2503.14476, equation 11.

    Args:
        rewards: [B], of the task, before any shaping; None for a row that failed or abstained.
        group_structure: the group size, or one group id per row.

    Returns:
        The rows to keep, ascending; a kept group keeps all its rows.

    Raises:
        ValueError: the groups do not fit the rows.
    """
    kept: list[int] = []
    for rows in group_members(group_ids_of(group_structure, len(rewards))).values():
        if not is_constant([reward for row in rows if (reward := rewards[row]) is not None]):
            kept += rows
    return sorted(kept)


def mask_truncated(roles: mx.array, truncated: Sequence[bool]) -> mx.array:
    """Return the roles with every token of a truncated trajectory masked, DAPO's overlong filter.

    The trajectory still counts in the baseline: weights are taken from these roles, advantages from the given ones.
    Source: DAPO, arXiv 2503.14476, section 3.4.

    Args:
        roles: int [B, T], a `Role` per token.
        truncated: [B].

    Returns:
        int [B, T].

    Raises:
        ValueError: the lengths differ.
    """
    check_length("truncated", truncated, roles.shape[0], "roles")
    return mx.where(mx.array(list(truncated), dtype=mx.bool_)[:, None], int(Role.MASKED), roles)
