"""What the libraries' games share: tasks that are numbers, and chance of each game's own."""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxrl.env.options import check_whole
from mlxrl.env.protocol import Environment, RewardWeights, Split, check_split
from mlxrl.env.task import Task

_SWAPPED = threading.Lock()


class NumberedSuite:
    """A suite whose tasks are numbers, of which a library makes the starts of its games; it rewards by itself.

    Args:
        name: what the suite goes by.
        make: make(number, seed) -> environment; the number alone decides the start.
        size: number of training tasks.
        eval_size: number of evaluation tasks; they are the same whatever `size` is.
        seed: draws the numbers, which all differ.

    Raises:
        ValueError: an option is out of range.
    """

    rewards: RewardWeights = ()

    def __init__(self, name: str, make: Callable[[int, int], Environment], size: int, eval_size: int, seed: int):
        self.name = name
        self._make = make
        held_out = check_whole("eval_size", eval_size, 0)
        count = check_whole("size", size, 1) + held_out
        numbers = random.Random(check_whole("seed", seed, 0)).sample(range(2**31), count)
        self._tasks = {
            split: tuple(
                Task(str(number), {"number": number}, f"{split}-{index}") for index, number in enumerate(drawn)
            )
            for split, drawn in (("train", numbers[held_out:]), ("eval", numbers[:held_out]))
        }

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, each with its number in the column "number"."""
        check_split(split)
        return self._tasks[split]

    def make(self, task: Task, seed: int, group_index: int) -> Environment:
        """The game that the task's number starts; the seed draws what is left to chance later."""
        number: Any = task.columns["number"]
        return self._make(number, seed)


class OwnChance:
    """Chance of one game, where its library draws from the generators that all of the process shares.

    Within `drawing()` the generators of `random`, and of numpy where it is loaded, are in this game's state, and
    afterwards as they were before. Games take turns at it; their threads may call at the same time.

    Args:
        *parts: what the chance follows from.
    """

    def __init__(self, *parts: int) -> None:
        self._seed = number_of(*parts)
        self._python: Any = random.Random(self._seed).getstate()
        self._numpy: Any = None

    @contextmanager
    def drawing(self) -> Generator[None]:
        """A context in which the shared generators are this game's."""
        numpy: Any = sys.modules.get("numpy")
        with _SWAPPED:
            python, random_numpy = random.getstate(), numpy and numpy.random.get_state()
            random.setstate(self._python)
            if numpy:
                numpy.random.set_state(self._numpy or numpy.random.RandomState(self._seed).get_state())
            try:
                yield
            finally:
                self._python = random.getstate()
                random.setstate(python)
                if numpy:
                    self._numpy = numpy.random.get_state()
                    numpy.random.set_state(random_numpy)


def number_of(*parts: int) -> int:
    """A number below 2^32 that follows from whole numbers of any size."""
    return zlib.crc32("|".join(map(str, parts)).encode())
