"""What the rewards that read the column `answer` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlxrl.env.protocol import StopReason


def equal_rows(
    found: Iterable[object], expected: Iterable[object], trajectories: Sequence[Any] | None
) -> list[float | None]:
    """1 where what was found equals what was expected and the trajectory was not truncated; None where nothing was."""
    rows = list(zip(found, expected, strict=True))
    whole = [True] * len(rows) if trajectories is None else [is_whole(trajectory) for trajectory in trajectories]
    return [
        None if right is None else float(ended and value == right)
        for (value, right), ended in zip(rows, whole, strict=True)
    ]


def is_whole(trajectory: Any) -> bool:
    """Whether no token limit ended a trajectory."""
    return trajectory.stop_reason not in (StopReason.length, StopReason.context)
