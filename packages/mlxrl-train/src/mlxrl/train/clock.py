"""How long the parts of a step take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent in named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of what runs within the context."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start
