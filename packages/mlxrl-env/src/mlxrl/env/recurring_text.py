"""A walk along a few rooms whose states recur."""

from __future__ import annotations

from functools import partial
from itertools import permutations

from mlxrl.env.game import GameSuite, TextGame, held_out_quarter

ROOMS = 4
MOVES = {"left": -1, "right": 1}


class RecurringStateTextEnv(TextGame):
    """Walks along four rooms in a row, from one to another.

    An observation is "Room 3 goal 1", below a line with the form of an action and the moves: it tells the whole state.
    Going back and forth, or an invalid action, brings a state again, in one episode as in others of its group. A start
    is (room, goal), each 1 to 4 and not the same. At most three turns are needed.

    See `TextGame` for the arguments.
    """

    starts = tuple(permutations(range(1, ROOMS + 1), 2))
    won = "Arrived."

    def __init__(self, task: object = None, seed: int = 0, max_turns: int = 3, invalid_penalty: float = 0.0) -> None:
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Puts the player in the first room."""
        self.room, self.goal = self.start

    def observe(self) -> str:
        """The form of an action, the moves, the room and the goal."""
        return f"<action>NAME</action>: {', '.join(MOVES)}\nRoom {self.room} goal {self.goal}"

    def play(self, action: str) -> bool | None:
        """Walks, unless there is a wall."""
        if action not in MOVES or not 1 <= self.room + MOVES[action] <= ROOMS:
            return None
        self.room += MOVES[action]
        return self.room == self.goal


def recurring_text_suite(seed: int = 0, max_turns: int = 3, invalid_penalty: float = 0.0) -> GameSuite:
    """Walk from one room to another, in four rooms in a row.

    There are 12 walks, 9 to train on and 3, drawn by the seed, to evaluate on.
    """
    game = partial(RecurringStateTextEnv, max_turns=max_turns, invalid_penalty=invalid_penalty)
    return GameSuite("recurring-text", game, *held_out_quarter(RecurringStateTextEnv.starts, seed))
