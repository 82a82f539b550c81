"""Key and door: four rooms in a row; fetch the key, then open the door."""

from __future__ import annotations

from functools import partial
from itertools import product

from mlxrl.env.game import GameSuite, TextGame, held_out_quarter
from mlxrl.env.options import check_flag

ROOMS = 4
ACTIONS = ("left", "right", "take", "open")


class KeyDoorEnv(TextGame):
    """Walks along four rooms, takes the key and opens the door with it.

    An observation is "Room 3 key 1 door 4", or "Room 3 key held door 4" once the key is taken, below a line with the
    form of an action and the actions. A start is (room, key, door), each 1 to 4. At most eight turns are needed. Each
    observation tells the whole state, so it does without the turns before (`context = "turn"`).

    See `TextGame` for the other arguments.

    Args:
        show_actions: whether that line is shown; a model that knows the game does without.

    Raises:
        ValueError: an option is out of range.
    """

    starts = tuple(product(range(1, ROOMS + 1), repeat=3))

    def __init__(
        self,
        task: object = None,
        seed: int = 0,
        max_turns: int = 10,
        invalid_penalty: float = 0.0,
        show_actions: bool = True,
    ) -> None:
        self._form = (
            f"<action>NAME</action>: {', '.join(ACTIONS)}\n" if check_flag("show_actions", show_actions) else ""
        )
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Puts player, key and door where the start says."""
        self.room, self.key, self.door = self.start
        self.held = False

    def observe(self) -> str:
        """The form of an action, the actions, and where the player, the key and the door are."""
        return f"{self._form}Room {self.room} key {'held' if self.held else self.key} door {self.door}"

    def play(self, action: str) -> bool | None:
        """Walks, takes or opens."""
        match action:
            case "left" if self.room > 1:
                self.room -= 1
            case "right" if self.room < ROOMS:
                self.room += 1
            case "take" if self.room == self.key and not self.held:
                self.held = True
            case "open" if self.room == self.door and self.held:
                return True
            case _:
                return None
        return False


def key_door_suite(
    seed: int = 0, max_turns: int = 10, invalid_penalty: float = 0.0, show_actions: bool = True
) -> GameSuite:
    """Fetch the key and open the door, in four rooms in a row.

    There are 64 starts, 48 to train on and 16, drawn by the seed, to evaluate on.
    """
    game = partial(KeyDoorEnv, max_turns=max_turns, invalid_penalty=invalid_penalty, show_actions=show_actions)
    return GameSuite("key-door", game, *held_out_quarter(KeyDoorEnv.starts, seed))
