"""A reward for multiple choice: the letter that a completion settles on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrl.env.numbers import marked_answer
from mlxrl.env.options import check_text
from mlxrl.env.rewards_rows import equal_rows


def choice_reward(letters: str = "ABCDEFGHIJ") -> Callable[..., list[float | None]]:
    r"""Builds a reward that is 1 where the completion chose the letter of the column `answer`, and 0 elsewhere.

    The letter of a text is what its marked answer (the last <answer>...</answer>, or else the last \boxed{...}, or
    else the line after the last ####) or the whole text is, or begins with before a bracket, a full stop, a colon or a
    comma: "B", "(B)", "B. Paris"; failing that, the letter after the last "answer is" or "answer:". A text that
    settles on none gets 0; a row whose answer has no letter is not scored, and a truncated trajectory gets 0.

    Args:
        letters: the letters there are to choose from; small and capital letters are the same where they stand alone.

    Raises:
        ValueError: the letters are none, or not each another letter.
    """
    capitals = check_text("letters", letters).upper()
    if not capitals.isalpha() or len(set(capitals)) < len(capitals):
        raise ValueError(f"letters must be letters, each another, got {letters!r}")
    alone = re.compile(rf"[\W_]*(?:\\text\s*\{{)?[\W_]*([{capitals}])\W*\Z", re.IGNORECASE)
    first = re.compile(rf"[\W_]*([{capitals}])[).:,\]}}*]")
    told = re.compile(rf"(?i:answer(?:\s+is)?)\s*:?[\s*(\[{{$\"']*([{capitals}])(?![\w'])")

    def letter(text: str) -> str | None:
        marked = marked_answer(text).strip()
        if (match := alone.match(marked) or first.match(marked)) is not None:
            return match[1].upper()
        said = told.findall(text)
        return said[-1] if said else None

    def choice(
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Any = None,
        trajectories: Any = None,
        *,
        answer: Sequence[Any],
        **columns: Any,
    ) -> list[float | None]:
        """1 where the completion chose the answer's letter."""
        expected = [None if value is None else letter(str(value)) for value in answer]
        return equal_rows([letter(completion) for completion in completions], expected, trajectories)

    return choice
