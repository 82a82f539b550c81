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
from mlxrl.env.protocol import StopReason

TRUNCATED = (StopReason.length, StopReason.context)


def exact_match(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1 where the completion is the answer, but for white space around it."""
    expected = [_text(value) for value in _answers("exact_match", answer, completions, columns)]
    return [
        None if right is None else float(completion.strip() == right)
        for completion, right in zip(completions, expected, strict=True)
    ]


def numeric_match(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1 where the completion's number equals the answer's, as exact fractions; see `answer_number` for which it is.

    A trajectory that was truncated (stop reason length or context) gets 0: its last number is where it was cut.
    """
    expected = [_number(value) for value in _answers("numeric_match", answer, completions, columns)]
    whole = (
        [True] * len(completions) if trajectories is None else [t.stop_reason not in TRUNCATED for t in trajectories]
    )
    return [
        None if right is None else float(ended and answer_number(completion) == right)
        for completion, right, ended in zip(completions, expected, whole, strict=True)
    ]


def answer_tag(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """1 where the completion has exactly one <answer>N</answer>, ends with it, and N equals the answer."""
    expected = [_number(value) for value in _answers("answer_tag", answer, completions, columns)]
    return [
        None if right is None else float(_tagged(completion) == right)
        for completion, right in zip(completions, expected, strict=True)
    ]


def _tagged(completion: str) -> Fraction | None:
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    found = re.search(r"<answer>(-?[0-9]{1,100}(?:\.[0-9]{1,100})?)</answer>\s*\Z", completion)
    return None if found is None else Fraction(found[1])


def _answers(name: str, answer: Sequence[Any] | None, completions: Sequence[str], columns: Any) -> Sequence[Any]:
    if answer is None:
        raise ValueError(
            f"{name} needs the column 'answer' (columns: {', '.join(sorted(columns)) or 'none'}); "
            "name the dataset's with answer_column"
        )
    if len(answer) != len(completions):
        raise ValueError(f"{name} needs one answer for each completion, got {len(answer)} and {len(completions)}")
    return answer


def _text(value: object) -> str | None:
    return None if value is None else str(value).strip() or None


def _number(value: object) -> Fraction | None:
    return None if value is None else answer_number(str(value))
