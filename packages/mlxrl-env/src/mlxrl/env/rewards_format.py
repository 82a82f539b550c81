"""A reward for the shape of a completion, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrl.env.options import check_pattern

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One <think>...</think>, then one <answer>...</answer>, and nothing else."""


def format_reward(pattern: str = THINK_ANSWER) -> Callable[..., list[float | None]]:
    """Builds a reward that is 1 where the whole completion matches a pattern, and 0 elsewhere.

    Args:
        pattern: a regular expression, in which "." also matches line ends.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    compiled = check_pattern("pattern", pattern, re.DOTALL)

    def format_match(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """1 where the whole completion has the asked-for shape."""
        return [float(compiled.fullmatch(completion) is not None) for completion in completions]

    return format_match
