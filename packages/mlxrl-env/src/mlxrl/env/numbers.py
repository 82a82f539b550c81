"""Finding the number that a text answers with, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 100  # characters of a number, and the greatest power of ten: what is longer is no answer

# Rewritten before the search, in this order.
_REWRITES = (
    (re.compile("[\N{MINUS SIGN}\N{EN DASH}]"), "-"),
    (re.compile(r"\\[,!;:]"), ""),  # LaTeX thin spaces: 1\,000
    (re.compile(r"\{,\}"), ","),  # 1{,}000
    (re.compile(r"\\(?=[$%])"), ""),  # \$ and \%
    (re.compile(r"(?<=\d)(?=\\[dt]?frac)"), " "),  # 1\frac{1}{2} is 1 1/2
    (re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (
        re.compile(r"(?<=\d)\s*(?:[x*\N{MULTIPLICATION SIGN}]|\\times|\\cdot)\s*10\s*\^\s*\{?([-+]?\d+)\}?"),
        r"e\1",
    ),  # 3 x 10^5
    (re.compile(r"\^\s*(?:\{[^{}]*\}|[-+]?\w+)"), "^"),  # powers: cm^2 is a unit, and 2^5 is not the number 2
)

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?+|(?<!\w)\.\d++)"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}%])[-+])?[$€£¥₹]?"
    rf"(?<![A-Za-z_\d])(?:(?:(?P<whole>\d++)[ \t]++)?(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})"
    rf"|(?P<plain>{_DECIMAL}(?:[eE][-+]?\d++)?+)(?!\s*\^))"
)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def answer_number(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer.

    It is the last number inside the last <answer>...</answer>; or else inside the last \boxed{...}; or else on the
    line after the last ####; or else of the whole text. Commas in thousands, decimals, fractions (also 1 1/2 and
    \frac{1}{2}), scientific notation, currency signs, percent signs and units are read; a percent sign counts as a
    unit. A minus is a sign only where nothing stands before it to subtract from.

    Args:
        text: any text.

    Returns:
        The exact number, or None where there is none, it is divided by zero, or it is absurdly long.
    """
    numbers = [_value(match) for match in _NUMBER.finditer(marked_answer(_rewritten(text)))]
    return numbers[-1] if numbers else None


def whole_number(text: str) -> Fraction | None:
    """The number that a whole text is, spelled as `answer_number` reads it; None where it is more or less than that."""
    match = _NUMBER.fullmatch(_rewritten(text).strip())
    return None if match is None else _value(match)


def _rewritten(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def marked_answer(text: str) -> str:
    """The part of a text that is marked as its answer, or the whole text where nothing is; see `answer_number`."""
    if answers := _ANSWER.findall(text):
        return answers[-1]
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return text


def _boxed(text: str) -> str | None:
    r"""The inside of the last \boxed{...} that closes."""
    inside = None
    starts: list[int | None] = []  # for each open brace, where the inside of its box starts, or None
    for brace in re.finditer(r"\\boxed\{|[{}]", text):
        if brace[0] != "}":
            starts.append(None if brace[0] == "{" else brace.end())
        elif starts and (start := starts.pop()) is not None:
            inside = text[start : brace.start()]
    return inside


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    if match["plain"] is not None:
        number = _decimal(match["plain"])
        return None if number is None else sign * number
    whole, over, under = (_decimal(match[part] or "0") for part in ("whole", "over", "under"))
    if whole is None or over is None or not under:
        return None
    return sign * (whole + over / under)


def _decimal(text: str) -> Fraction | None:
    mantissa, _, power = text.lower().replace(",", "").partition("e")
    if len(mantissa) > LONGEST or len(power) > LONGEST or abs(int(power or "0")) > LONGEST:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(power or "0")
