"""Contestants in turn, round by round, and what is made of their times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import mlx.core as mx


class ContestantError(Exception):
    """A contestant that cannot take part; the message says why."""


@dataclass(frozen=True)
class Result:
    """One contestant's round.

    Args:
        tokens: sampled tokens that are kept, end tokens included.
        seconds: wall time.
        forwards: forward passes of the model; None where they are not counted.
        peak_bytes: peak of MLX's device memory in the contestant's process, weights included; what mlxrl keeps between
            rounds counts for all contestants of its process.
    """

    tokens: int
    seconds: float
    forwards: int | None
    peak_bytes: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Contestant(Protocol):
    """Whoever does the work."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    def run(self) -> Result:
        """Do all of the work once.

        Raises:
            ContestantError: the contestant broke.
        """
        ...


@dataclass(frozen=True)
class InProcess:
    """A contestant of this process; `play` does the work and returns its tokens and forward passes."""

    name: str
    play: Callable[[], tuple[int, int | None]]

    def run(self) -> Result:
        """Time `play`."""
        mx.reset_peak_memory()
        started = time.perf_counter()
        tokens, forwards = self.play()
        mx.synchronize()
        seconds = time.perf_counter() - started
        return Result(tokens, seconds, forwards, mx.get_peak_memory())


@dataclass(frozen=True)
class Outcome:
    """What a race came to.

    Args:
        results: per contestant its counted rounds; those that failed are not among them.
        failures: per contestant that failed, why.
    """

    results: Mapping[str, Sequence[Result]]
    failures: Mapping[str, str]


def race(
    contestants: Sequence[Contestant], rounds: int, tell: Callable[[str], None], *, expected_tokens: int | None = None
) -> Outcome:
    """Let every contestant do the work once a round, in turn; the first of `rounds + 1` rounds is not counted.

    Args:
        contestants: by different names.
        rounds: counted rounds.
        tell: is told what runs now.
        expected_tokens: tokens that each must draw, where that is known; whoever draws others has failed.
    """
    results: dict[str, list[Result]] = {contestant.name: [] for contestant in contestants}
    failures: dict[str, str] = {}
    for number in range(rounds + 1):
        for contestant in contestants:
            if contestant.name in failures:
                continue
            tell(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {contestant.name}")
            try:
                result = contestant.run()
                if expected_tokens not in (None, result.tokens):
                    raise ContestantError(f"drew {result.tokens} tokens, the work is {expected_tokens}")
            except Exception as error:  # each breaks in its own way
                known = isinstance(error, ContestantError)
                failures[contestant.name] = str(error) if known else f"{type(error).__name__}: {error}"
                del results[contestant.name]
                continue
            if number:
                results[contestant.name].append(result)
    return Outcome(results, failures)


def median_ratio(ours: Sequence[Result], other: Sequence[Result]) -> float:
    """How many times as fast we are: the median over rounds of our tokens a second by the other's."""
    return median(mine.rate / theirs.rate for mine, theirs in zip(ours, other, strict=True))
