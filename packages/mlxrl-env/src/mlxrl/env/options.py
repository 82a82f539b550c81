"""Checks shared by the suites' options."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import cast


def check_whole(name: str, value: object, least: int) -> int:
    """Returns a whole number that is at least `least`.

    Raises:
        ValueError: value is anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def check_real(name: str, value: object, least: float, below: float = math.inf) -> float:
    """Returns a number with least <= number < below.

    Raises:
        ValueError: value is anything else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} must be a finite number of at least {least:g}{limit}, got {value!r}")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """Returns True or False.

    Raises:
        ValueError: value is anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_text(name: str, value: object) -> str:
    """Returns a text that is not empty.

    Raises:
        ValueError: value is anything else.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text, and not empty, got {value!r}")
    return value


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Returns the texts of a list, none of them empty; a text by itself is a list of one.

    Raises:
        ValueError: value is anything else.
    """
    if isinstance(value, str):
        return (check_text(name, value),)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a text or a list of texts, got {value!r}")
    return tuple(check_text(f"{name}[{place}]", text) for place, text in enumerate(cast(Sequence[object], value)))


def check_pattern(name: str, value: object, flags: int = 0) -> re.Pattern[str]:
    """Returns a regular expression, compiled.

    Raises:
        ValueError: value is anything else.
    """
    pattern = check_text(name, value)
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} must be a regular expression, got {pattern!r}: {error}") from None
