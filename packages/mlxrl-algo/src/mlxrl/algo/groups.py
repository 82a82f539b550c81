"""Which rows belong to one task: an int group size or one id per row."""

from collections.abc import Hashable, Sequence

from mlxrl.algo._checks import check_length

GroupStructure = int | Sequence[Hashable]
"""An int G (rows 0..G-1 are the first group, and so on) or a sequence with the group id of every row."""


def group_ids_of(group_structure: GroupStructure, rows: int) -> list[Hashable]:
    """Return the group id of each row.

    Args:
        group_structure: the group size, or one id per row.
        rows: B, the number of rows.

    Returns:
        B ids; contiguous groups are numbered 0, 1, ...

    Raises:
        ValueError: the group size is below 1 or does not divide the rows, or the ids do not number B.
    """
    if isinstance(group_structure, int):
        if group_structure < 1 or rows % group_structure:
            raise ValueError(
                f"group_structure must be a group size that divides the {rows} rows, got {group_structure}; "
                "give one group id per row for groups of unequal size"
            )
        return [row // group_structure for row in range(rows)]
    check_length("group_structure", group_structure, rows, "rewards")
    return list(group_structure)


def group_members(group_ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of each group, in order of appearance.

    Args:
        group_ids: [B].

    Returns:
        A dict from group id to its rows.
    """
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        members.setdefault(group, []).append(row)
    return members
