"""Number guessing: higher or lower, from 1 to 15."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import partial
from typing import cast

from mlxrl.env.game import GameSuite, TextGame
from mlxrl.env.options import check_flag
from mlxrl.env.task import Message

GREATEST = 15


class GuessNumberEnv(TextGame):
    """Guesses a secret number from 1 to 15; halving the range finds each within four guesses.

    The first observation is "Start: 1-15", below a line with the form of an action and the numbers; the next tell the
    hint and the range that is left, as in "Higher: 9-15". A guess outside 1 to 15 is invalid ("Invalid: 9-15"); one
    outside the range that is left is only wasted. A start is (secret,), and a state is the range that is left.

    See `TextGame` for the other arguments.

    Args:
        show_actions: whether that line is shown; a model that knows the game does without.

    Raises:
        ValueError: an option is out of range.
    """

    starts = tuple((secret,) for secret in range(1, GREATEST + 1))
    won = "Correct."

    def __init__(
        self,
        task: object = None,
        seed: int = 0,
        max_turns: int = 4,
        invalid_penalty: float = 0.0,
        show_actions: bool = True,
    ) -> None:
        shown = check_flag("show_actions", show_actions)
        numbers = ", ".join(str(number) for (number,) in self.starts)
        self._form = f"<action>NUMBER</action>: {numbers}\n" if shown else ""
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Hides the secret in the whole range."""
        (self.secret,) = self.start
        self.hint, self.least, self.greatest = "Start", 1, GREATEST

    def observe(self) -> str:
        """The form of an action, the numbers, the last hint and the range that is left."""
        return f"{self._form}{self.hint}: {self.least}-{self.greatest}"

    def play(self, action: str) -> bool | None:
        """Compares the guess with the secret and narrows the range."""
        if not re.fullmatch("[0-9]{1,2}", action) or not 1 <= int(action) <= GREATEST:
            self.hint = "Invalid"
            return None
        guess = int(action)
        if guess < self.secret:
            self.hint, self.least = "Higher", max(self.least, guess + 1)
        elif guess > self.secret:
            self.hint, self.greatest = "Lower", min(self.greatest, guess - 1)
        return guess == self.secret

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The range that is left, whatever the hint: "9-15"."""
        return cast(str, observation).rpartition(": ")[2]


def guess_number_suite(max_turns: int = 4, invalid_penalty: float = 0.0, show_actions: bool = True) -> GameSuite:
    """Find a number from 1 to 15 by guesses that are too low or too high.

    Each secret is once in both splits: a hidden secret that never occurs would be unfair to ask.
    """
    game = partial(GuessNumberEnv, max_turns=max_turns, invalid_penalty=invalid_penalty, show_actions=show_actions)
    return GameSuite("guess-number", game, GuessNumberEnv.starts, GuessNumberEnv.starts)
