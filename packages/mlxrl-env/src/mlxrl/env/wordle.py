"""Wordle: a word of five letters, found by what each guess has in common with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import cast

from mlxrl.env.game import GameSuite, TextGame, held_out_quarter
from mlxrl.env.task import Message

_WORDS = """
actor alarm angle apple apron arrow badge beach berry birth blade blank block board boost brain brave bread brick
bride broom brown brush cabin cable camel candy canoe chain chair chalk charm cheek chess chest chief child clean
cliff clock cloud coach coral couch cover crane cream crowd crown curve dance depth diary dough draft dream dress
drift eagle earth elbow empty equal event fable faith fence field flame flour flute focus forge forty fresh frost
fruit ghost giant glass globe glove grain grape grass green habit heart honey hotel house human image inlet ivory
jelly jewel joint judge juice knife label lemon level light linen lunch magic maple march medal metal model money
month motor mouse mouth music night noble noise north novel nurse ocean olive onion opera orbit organ paint panel
paper party peach pearl phone piano pilot plain plant plate point pound power press price pride prize quiet radio
ranch rapid ridge river robot round royal salad scale scarf scene shade sheep shelf shell shirt shore sight skill
sleep smile snake solid sound space spice spoon sport squad stage stair stamp steam stone storm story sugar sweet
table teeth thumb tiger toast torch tower track trade train truck uncle unity value vapor video visit voice wagon
watch water whale wheat wheel white whole world yacht youth zebra
"""
WORDS = tuple(_WORDS.split())


class WordleEnv(TextGame):
    """Guesses a secret word of five letters.

    Each guess gets a letter for each of its own: G where the secret has the same letter in the same place, Y where it
    has it elsewhere, X where it does not, or not so often. An observation tells the form of an action,
    <action>crane</action>, and all guesses with their marks, so it does without the turns before. Any five letters
    may be guessed. A start is the place of the secret in WORDS, and a state is what the guesses have told, in
    whatever order.

    See `TextGame` for the arguments.
    """

    starts = tuple((place,) for place in range(len(WORDS)))
    won = "Correct."

    def __init__(self, task: object = None, seed: int = 0, max_turns: int = 6, invalid_penalty: float = 0.0) -> None:
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Hides the secret."""
        self.secret = WORDS[self.start[0]]
        self.guesses: list[str] = []

    def observe(self) -> str:
        """The form of an action, and a line for each guess so far."""
        rule = "Guess a 5-letter word: <action>WORD</action>. G right, Y elsewhere, X absent."
        return "\n".join([rule, *(f"{guess} {marks(guess, self.secret)}" for guess in self.guesses)])

    def play(self, action: str) -> bool | None:
        """Marks a guess of five letters."""
        if not re.fullmatch("[a-z]{5}", action):
            return None
        self.guesses.append(action)
        return action == self.secret

    def state_id(self, observation: str | Sequence[Message]) -> Hashable:
        """The guesses with their marks, each once, sorted."""
        return "\n".join(sorted(set(cast(str, observation).splitlines()[1:])))


def marks(guess: str, secret: str) -> str:
    """The letters G, Y or X for the letters of a guess; a letter is marked G or Y as often as the secret has it."""
    left = Counter(there for here, there in zip(guess, secret, strict=True) if here != there)
    shown = ""
    for here, there in zip(guess, secret, strict=True):
        shown += "G" if here == there else "Y" if left[here] > 0 else "X"
        left[here] -= here != there
    return shown


def wordle_suite(seed: int = 0, max_turns: int = 6, invalid_penalty: float = 0.0) -> GameSuite:
    """Find a word of five letters by what each guess has in common with it."""
    game = partial(WordleEnv, max_turns=max_turns, invalid_penalty=invalid_penalty)
    return GameSuite("wordle", game, *held_out_quarter(WordleEnv.starts, seed))
