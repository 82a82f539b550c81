"""The order of tasks: every task once an epoch, shuffled anew each time, from the seed alone."""

import random
from collections.abc import Callable, Sequence
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
        tasks: the tasks.
        seed: seed of the order.
        fits: whether a task can be used, asked when it is drawn; one that cannot is passed over and counted.

    Raises:
        ValueError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Any], seed: int, fits: Callable[[Any], bool] | None = None):
        if len(tasks) == 0:
            raise ValueError("there are no tasks to train on; give the environment at least one.")
        self.tasks, self.seed, self.fits = tasks, seed, fits
        self.position = 0
        self.passed_over = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self, count: int) -> list[Group]:
        """The next `count` groups.

        Raises:
            ValueError: a whole epoch held no task that fits.
        """
        groups: list[Group] = []
        unfit = 0
        while len(groups) < count:
            group = Group(self.position, self._at(self.position))
            self.position += 1
            if self.fits is None or self.fits(group.task):
                groups.append(group)
                unfit = 0
                continue
            unfit += 1
            self.passed_over += 1
            if unfit == 2 * len(self.tasks) - 1:  # so many in a row hold a whole epoch, wherever they begin
                raise ValueError("every prompt is longer than max_prompt_len; raise it or shorten the prompts.")
        return groups

    def peek(self, count: int) -> list[Group]:
        """What `next` would give, which stays to be drawn."""
        before = self.position, self.passed_over
        groups = self.next(count)
        self.position, self.passed_over = before
        return groups

    def _at(self, position: int) -> Any:
        epoch, place = divmod(position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.tasks[self._order[1][place]]
