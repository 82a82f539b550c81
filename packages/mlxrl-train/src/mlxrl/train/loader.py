"""The order of tasks: every task once an epoch, shuffled anew each time, from the seed alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """A task to be sampled, and the number of its group: how many groups the run drew before."""

    id: int
    task: Any


class TaskLoader:
    """Draws tasks without end; its state is one number, the position in the endless order.

    Args:
        tasks: the tasks; equal ones are drawn each for itself.
        seed: seed of the order.

    Raises:
        ValueError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Any], seed: int):
        if len(tasks) == 0:
            raise ValueError("there are no tasks to train on; give the environment at least one.")
        self.tasks, self.seed = tasks, seed
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self, count: int) -> list[Group]:
        """The next `count` groups."""
        groups = self.peek(count)
        self.position += count
        return groups

    def peek(self, count: int) -> list[Group]:
        """What `next` would give, which stays to be drawn."""
        return [Group(position, self._at(position)) for position in range(self.position, self.position + count)]

    def _at(self, position: int) -> Any:
        epoch, place = divmod(position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.tasks[self._order[1][place]]
