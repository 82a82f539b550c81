"""Alphabet sort: names to put in order, and more names to merge in, turn after turn."""

from __future__ import annotations

import random
import re
from functools import partial

from mlxrl.env.game import ACTION_TAG, GameSuite, read_action
from mlxrl.env.levels import LevelGame, level_suite
from mlxrl.env.options import check_whole

_NAMES = """
Ada Agnes Albert Alma Anton Astrid Bella Boris Bruno Carla Cecil Clara Conrad Dalia Dario Dora Edgar Elena Elias
Emil Esther Felix Fiona Flora Frida Gina Gregor Greta Hanna Hector Hugo Ida Igor Irene Ivan Jonas Judith Julia
Karl Katya Klara Lara Leo Linus Lydia Magda Marta Max Milo Mina Nadia Nora Oscar Otto Paula Petra Quentin Ralph
Rosa Ruth Samuel Selma Sofia Stella Tara Theo Tilda Ursula Vera Viktor Wanda Willem Xenia Yara Yusuf Zelda Zoe
"""
NAMES = tuple(_NAMES.split())
_KNOWN = {name.lower() for name in NAMES}


class AlphabetSortEnv(LevelGame):
    """Sorts names, and merges further names into the sorted list in each later turn.

    The first observation is "Sort by letter: Max, Ada. <action>NAME, NAME</action>", later ones "Merge in: Leo, Zoe.
    <action>all names so far</action>". A turn is worth the share of places that hold the right name, divided by the
    number of turns, so that an episode without a mistake has the return 1. A turn without a list, or with none of the
    names in it, is lost: the same names are asked for again. Later observations do not repeat the names of earlier
    ones, so the model needs the whole transcript. A state is the names that are asked for.

    See `TextGame` for the other arguments; max_turns is also the number of lists.

    Args:
        names: number of new names in each turn, at least 2.
    """

    won = "Done."

    def __init__(
        self, task: object = None, seed: int = 0, max_turns: int = 3, invalid_penalty: float = 0.0, names: int = 3
    ) -> None:
        self.count = check_whole("names", names, 2)
        if self.count * check_whole("max_turns", max_turns, 1) > len(NAMES):
            raise ValueError(f"names * max_turns must be {len(NAMES)} at most, got {names} * {max_turns}")
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Draws the names of all turns."""
        rng = random.Random(f"alphabet-sort|{self.start[0]}")
        self.names = rng.sample(NAMES, self.count * self.max_turns)
        self.given = self.count

    def observe(self) -> str:
        """The names to sort, or to merge in."""
        if self.ended:
            return self.won
        new = ", ".join(self.names[self.given - self.count : self.given])
        if self.given == self.count:
            return f"Sort by letter: {new}. <action>NAME, NAME</action>"
        return f"Merge in: {new}. <action>all names so far</action>"

    def read(self, text: str) -> str:
        """The list in the model's text; without a tag, only where there is nothing but names."""
        said = read_action(text)
        return said if ACTION_TAG.search(text) or _KNOWN.issuperset(_words(said)) else ""

    def play(self, action: str) -> float | None:
        """Compares a list with the right one, place by place, and gives out the next names."""
        listed = _words(action)
        right = sorted(name.lower() for name in self.names[: self.given])
        if set(right).isdisjoint(listed):
            return None
        hits = sum(name == there for name, there in zip(listed, right, strict=False))
        self.ended = self.given == len(self.names)
        self.given += self.count
        return hits / max(len(listed), len(right)) / self.max_turns


def _words(text: str) -> list[str]:
    return [name for name in re.split(r"[,;\s\"'`*]+", text) if name]


def alphabet_sort_suite(
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int = 3,
    invalid_penalty: float = 0.0,
    names: int = 3,
) -> GameSuite:
    """Sort names by letter, and merge further names in, turn after turn."""
    game = partial(AlphabetSortEnv, max_turns=max_turns, invalid_penalty=invalid_penalty, names=names)
    return level_suite("alphabet-sort", game, size, eval_size, seed)
