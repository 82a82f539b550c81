"""A calculator for texts: exact, and it can do nothing but sums."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 100  # characters of an expression, so that neither its nesting nor its numbers grow beyond measure
DIGITS = 12  # after the point, of a result that is no whole number

_TOKENS = re.compile(r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<sign>[-+*/()]))")


def calculate(expression: str) -> Fraction:
    """The exact value of numbers, + - * /, signs and parentheses.

    Args:
        expression: for example "(12 + 3.5) * -4"; commas in thousands are read over.

    Raises:
        ValueError: it is too long, or no such expression; the message says where.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST} are allowed")
    return _Reader(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", expression)).whole()


def shown(value: Fraction) -> str:
    """A value as a whole number where it is one, and else as a decimal."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = f"{abs(round(value * 10**DIGITS)):0{DIGITS + 1}}"
    return f"{'-' if value < 0 else ''}{digits[:-DIGITS]}.{digits[-DIGITS:]}".rstrip("0").rstrip(".")


class _Reader:
    """Reads an expression from left to right: a sum is of products, a product of factors."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.token = ""
        self._next()

    def whole(self) -> Fraction:
        value = self._sum()
        if self.token:
            raise ValueError(f"{self.token!r} cannot stand there")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while self.token in ("+", "-"):
            value = value + self._product() if self._next() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.token in ("*", "/"):
            value = value * self._factor() if self._next() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        token = self._next()
        if token in ("+", "-"):
            return self._factor() if token == "+" else -self._factor()
        if token == "(":
            value = self._sum()
            if self._next() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token or token in "*/)":
            raise ValueError(f"a number is missing before {token!r}" if token else "a number is missing at the end")
        return Fraction(token)

    def _next(self) -> str:
        """Goes on to the next token; returns the one before, empty at the end."""
        before = self.token
        if not self.text[self.place :].strip():
            self.token = ""
        elif match := _TOKENS.match(self.text, self.place):
            self.token, self.place = match[0].strip(), match.end()
        else:
            raise ValueError(f"{self.text[self.place :].strip()[0]!r} is no number and none of + - * / ( )")
        return before
