"""Checks shared by the suites' options."""

from __future__ import annotations

import math


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
