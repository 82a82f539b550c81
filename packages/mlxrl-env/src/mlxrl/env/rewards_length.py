"""A reward for how long a completion is, in sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxrl.env.options import check_whole


def length_reward(
    target: int | None = None, least: int | None = None, most: int | None = None
) -> Callable[..., list[float | None]]:
    """Builds a reward for the number of sampled tokens n, end-of-sequence tokens included.

    Args:
        target: 1 at this length, falling in equal steps to 0 at none and at twice as many: max(0, 1 - |n - t| / t).
        least: instead, 1 from so many tokens on and 0 below.
        most: 1 up to so many tokens and 0 above; with `least`, 1 between the two.

    Raises:
        ValueError: none is given, or a target together with a limit, or a number is out of range.
    """
    if (target is None) == (least is None and most is None):
        raise ValueError(f"set target, or least and most, got target {target}, least {least}, most {most}")
    for name, value in (("target", target), ("most", most)):
        if value is not None:
            check_whole(name, value, 1)
    fewest = 0 if least is None else check_whole("least", least, 0)
    if most is not None and fewest > most:
        raise ValueError(f"least must not exceed most, got {fewest} and {most}")

    def length(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        trajectories: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """How well each completion keeps to the length."""
        counts = [len(ids) for ids in completion_ids]
        if target is not None:
            return [max(0.0, 1 - abs(count - target) / target) for count in counts]
        return [float(fewest <= count and (most is None or count <= most)) for count in counts]

    return length
