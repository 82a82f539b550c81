"""What the rewards that read the column `answer` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxrl.env.protocol import StopReason


def answer_column(
    name: str, answer: Sequence[Any] | None, completions: Sequence[str], columns: Mapping[str, Any]
) -> Sequence[Any]:
    """The answers of a batch.

    Raises:
        ValueError: there are none, or not one for each completion.
    """
    if answer is None:
        raise ValueError(
            f"{name} needs the column 'answer' (columns: {', '.join(sorted(columns)) or 'none'}); "
            "name the dataset's with answer_column"
        )
    if len(answer) != len(completions):
        raise ValueError(f"{name} needs one answer for each completion, got {len(answer)} and {len(completions)}")
    return answer


def equal_rows(
    found: Iterable[object], expected: Iterable[object], trajectories: Sequence[Any] | None
) -> list[float | None]:
    """1 where what was found equals what was expected and the trajectory was not truncated; None where nothing was."""
    rows = list(zip(found, expected, strict=True))
    whole = [True] * len(rows) if trajectories is None else [_is_whole(trajectory) for trajectory in trajectories]
    return [
        None if right is None else float(ended and value == right)
        for (value, right), ended in zip(rows, whole, strict=True)
    ]


def _is_whole(trajectory: Any) -> bool:
    return trajectory.stop_reason not in (StopReason.length, StopReason.context)
