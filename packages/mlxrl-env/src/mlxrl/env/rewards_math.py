r"""A reward for answers in LaTeX: numbers by their value, everything else by its normalised spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mlxrl.env.numbers import marked_answer, whole_number
from mlxrl.env.rewards_rows import equal_rows

# Rewritten one after the other; what is left is compared letter by letter.
_REWRITES = (
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,!;: ]|\$"), ""),  # sizes of brackets, spaces, math mode
    (re.compile(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|\N{DEGREE SIGN}|\\?%"), ""),  # degrees and percent
    (re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\Z"), ""),  # a unit after a number
    (re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\A\s*[a-zA-Z]\s*=(?!.*=)"), ""),  # x = 5 is 5
    (re.compile(r"\s+|\.\s*\Z"), ""),
)


def math_answer(text: str) -> Fraction | str | None:
    r"""The answer of a text, in the form in which two answers are compared.

    It is taken from the last <answer>...</answer>, or else the last \boxed{...}, or else the line after the last
    ####, or else is the whole text. Differences of spelling are taken out: white space, math mode, bracket sizes,
    \dfrac and \frac12, \text{...} and units after a number, degrees, percent, a leading "x =", a full stop.

    Returns:
        The exact number, where the answer is one; its normalised spelling otherwise; None where there is none.
    """
    answer = marked_answer(text)
    number = whole_number(answer)
    if number is not None:
        return number
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    number = whole_number(answer)
    return (answer or None) if number is None else number


def math_match(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Any = None,
    trajectories: Any = None,
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """1 where the completion's answer equals the column `answer`; see `math_answer` for what is compared.

    The two are compared as written: 2x + 2 and 2(x + 1) differ. A trajectory that was truncated gets 0; a row whose
    answer is None or blank is not scored (None).
    """
    expected = [None if value is None else math_answer(str(value)) for value in answer]
    return equal_rows([math_answer(completion) for completion in completions], expected, trajectories)
