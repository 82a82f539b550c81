"""What the games with levels share: a level is made from a number, and a suite holds levels that all differ."""

from __future__ import annotations

import random
from collections.abc import Callable

from mlxrl.env.game import GameSuite, Start, TextGame
from mlxrl.env.options import check_whole
from mlxrl.env.task import Task

MOST_LEVELS = 100_000  # of a suite; each is made to see that it differs, which takes its time
FRUITLESS_DRAWS = 2_000  # in a row, before levels count as used up


class LevelGame(TextGame):
    """A text game whose start is (number,), any whole number from 0: what the level is follows from it.

    See `TextGame` for the arguments.
    """

    def draw_start(self, rng: random.Random) -> Start:
        """The number of a level."""
        return (rng.randrange(2**32),)

    def check_start(self, name: str, start: Start) -> None:
        """Refuses what is not one whole number from 0.

        Raises:
            ValueError: start is anything else; name says what holds it.
        """
        if len(start) != 1:
            raise ValueError(f"{name} must be one number, as in (7,), got {start}")
        check_whole(name, start[0], 0)


def level_suite(name: str, game: Callable[[Task, int], LevelGame], size: int, eval_size: int, seed: int) -> GameSuite:
    """A suite of levels with openings that all differ, those to evaluate on from those to train on too.

    Args:
        name: what the suite goes by.
        game: game(task, seed) -> environment.
        size: number of training tasks; with those to evaluate on `MOST_LEVELS` at most.
        eval_size: number of evaluation tasks; they are the same whatever `size` is.
        seed: draws the levels.

    Raises:
        ValueError: an option is out of range, or there are not so many levels.
    """
    rng = random.Random(check_whole("seed", seed, 0))
    held_out = check_whole("eval_size", eval_size, 0)
    wanted = check_whole("size", size, 1) + held_out
    if wanted > MOST_LEVELS:
        raise ValueError(f"size + eval_size must be {MOST_LEVELS} at most, got {wanted}; lower them")
    levels: dict[object, Start] = {}  # by opening, in the order of drawing
    fruitless = 0
    while len(levels) < wanted:
        start = (rng.randrange(2**32),)
        opening = game(Task("", {"start": start}, name), 0).reset()
        fruitless = fruitless + 1 if opening in levels else 0
        levels.setdefault(opening, start)
        if fruitless == FRUITLESS_DRAWS:
            raise ValueError(
                f"size + eval_size must not exceed the levels that differ, got {wanted} but found {len(levels)}; "
                "lower them or make the levels larger"
            )
    starts = tuple(levels.values())
    return GameSuite(name, game, starts[held_out:], starts[:held_out])
