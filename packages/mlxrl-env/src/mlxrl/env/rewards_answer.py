"""Rewards that compare a completion with the column `answer`: 1 where it is right, 0 where it is not.

A row whose answer is None or blank is not scored (None), and neither is one whose answer holds no number where a
number is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlxrl.env.numbers import answer_number
from mlxrl.env.rewards_rows import equal_rows


def exact_match(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """1 where the completion is the answer, but for white space around it."""
    expected = [_text(value) for value in answer]
    return equal_rows([completion.strip() for completion in completions], expected, None)


def numeric_match(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """1 where the completion's number equals the answer's, as exact fractions; see `answer_number` for which it is.

    A trajectory that was truncated (stop reason length or context) gets 0: its last number is where it was cut.
    """
    expected = [_number(value) for value in answer]
    return equal_rows([answer_number(completion) for completion in completions], expected, trajectories)


def answer_tag(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """1 where the completion has exactly one <answer>N</answer>, ends with it, and N equals the answer."""
    expected = [_number(value) for value in answer]
    return equal_rows([_tagged(completion) for completion in completions], expected, None)


def _tagged(completion: str) -> Fraction | None:
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    found = re.search(r"<answer>(-?[0-9]{1,100}(?:\.[0-9]{1,100})?)</answer>\s*\Z", completion)
    return None if found is None else Fraction(found[1])


def _text(value: object) -> str | None:
    return None if value is None else str(value).strip() or None


def _number(value: object) -> Fraction | None:
    return None if value is None else answer_number(str(value))
