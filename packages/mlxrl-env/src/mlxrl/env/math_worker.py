"""The process in which math-verify compares answers: it reads pairs and writes whether they are equal."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

MATH_VERIFY: Any = importlib.import_module("math_verify")  # whose types are not known


def main() -> None:
    """Answer every line [expected, [found, ...]] with whether one of what was found is right, or with null.

    The answer is null where what is expected cannot be read.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    answers.write("true\n")
    answers.flush()
    for line in sys.stdin:
        expected, found = json.loads(line)
        # without its own timeouts, whose alarms answer wrongly where they cannot ring
        gold = MATH_VERIFY.parse(expected, parsing_timeout=None)
        guesses = (MATH_VERIFY.parse(text, parsing_timeout=None) for text in found)
        right = any(MATH_VERIFY.verify(gold, guess, timeout_seconds=None) for guess in guesses) if gold else None
        answers.write(json.dumps(right) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
