"""Rewards for texts and patterns that a completion holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrl.env.options import check_pattern, check_texts


def regex_reward(pattern: str, ignore_case: bool = False) -> Callable[..., list[float | None]]:
    """Builds a reward that is 1 where a pattern is found anywhere in the completion, and 0 elsewhere.

    Args:
        pattern: a regular expression. One that can match in many ways, such as (a+)+, may take for ever on some text,
            and no timeout ends it.
        ignore_case: whether small and capital letters are the same.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    compiled = check_pattern("pattern", pattern, re.IGNORECASE if ignore_case else 0)

    def regex(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """1 where the pattern is found."""
        return [float(compiled.search(completion) is not None) for completion in completions]

    return regex


def contains_reward(texts: Sequence[str] | str = (), ignore_case: bool = False) -> Callable[..., list[float | None]]:
    """Builds a reward that is 1 where the completion holds every one of some texts, and 0 elsewhere.

    Args:
        texts: what it must hold, a text or several; by default the row's `answer`, and a row without one is not
            scored.
        ignore_case: whether small and capital letters are the same.

    Raises:
        ValueError: one of the texts is empty or no text.
    """
    wanted = [_folded(text, ignore_case) for text in check_texts("texts", texts)]

    def contains(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """1 where every text is held."""
        held = [_folded(completion, ignore_case) for completion in completions]
        return [float(all(text in completion for text in wanted)) for completion in held]

    def contains_answer(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        *,
        answer: Sequence[Any],
        **columns: Any,
    ) -> list[float | None]:
        """1 where the answer is held."""
        rows = zip(completions, answer, strict=True)
        given = [(text, "" if value is None else str(value).strip()) for text, value in rows]
        return [
            float(_folded(value, ignore_case) in _folded(text, ignore_case)) if value else None for text, value in given
        ]

    return contains if wanted else contains_answer


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text
