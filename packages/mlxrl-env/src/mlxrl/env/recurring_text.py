"""A walk through a small map whose states recur."""

from __future__ import annotations

from functools import partial

from mlxrl.env.game import GameSuite, TextGame, held_out_quarter

ROOMS = ("hall", "attic", "yard", "barn", "cave", "den")  # a ring: each leads to the one before and the one after


class RecurringStateTextEnv(TextGame):
    """Walks from one room of a ring of six to another, two doors away.

    An observation is "At hall, goal yard. <action>NAME</action>: attic, den": where the player is, where to go, how
    to act, and the names to choose from. The map is always the same, so it can be learned. Going back and forth, or
    an invalid action, brings a state again, in one episode as in others of its group. A start is (room, goal), as
    places on the ring.

    See `TextGame` for the arguments; max_turns is at least 2, or no goal could be reached.
    """

    starts = tuple((room, (room + way * 2) % len(ROOMS)) for room in range(len(ROOMS)) for way in (1, -1))
    least_turns = 2
    won = "Arrived."

    def __init__(self, task: object = None, seed: int = 0, max_turns: int = 3, invalid_penalty: float = 0.0) -> None:
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Puts the player in the first room."""
        self.room, self.goal = self.start

    def observe(self) -> str:
        """The room, the goal, the form of an action and the moves."""
        moves = ", ".join(sorted(self._moves()))
        return f"At {ROOMS[self.room]}, goal {ROOMS[self.goal]}. <action>NAME</action>: {moves}"

    def play(self, action: str) -> bool | None:
        """Goes to the named room, if it is next door."""
        if action not in self._moves():
            return None
        self.room = self._moves()[action]
        return self.room == self.goal

    def _moves(self) -> dict[str, int]:
        neighbours = ((self.room + way) % len(ROOMS) for way in (-1, 1))
        return {ROOMS[room]: room for room in neighbours}


def recurring_text_suite(seed: int = 0, max_turns: int = 3, invalid_penalty: float = 0.0) -> GameSuite:
    """Walk to a room two doors away.

    There are 12 walks, 9 to train on and 3, drawn by the seed, to evaluate on.
    """
    game = partial(RecurringStateTextEnv, max_turns=max_turns, invalid_penalty=invalid_penalty)
    return GameSuite("recurring-text", game, *held_out_quarter(RecurringStateTextEnv.starts, seed))
