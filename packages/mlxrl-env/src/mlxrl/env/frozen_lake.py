"""Frozen lake: over the ice to the goal, around the holes."""

from __future__ import annotations

import random
from functools import lru_cache, partial

from mlxrl.env.game import GameSuite
from mlxrl.env.grid import MOVES, Cell, moved, steps_between
from mlxrl.env.levels import LevelGame, level_suite
from mlxrl.env.options import check_flag, check_whole


class FrozenLakeEnv(LevelGame):
    """Walks over a square of ice to the goal; a hole ends the episode without a reward.

    An observation is the map, a row a line, with P for the player, O for holes and G for the goal, and the moves in
    its last line: <action>up</action>, down, left or right. The edge stops whoever walks against it. On slippery ice
    a move goes where it should one time in three, and else to its left or right, as the start and the seed say.
    There are as many holes as rows, and the goal can be reached in two to 2 * (side - 1) moves.

    See `TextGame` for the other arguments; max_turns is at least 2 * (side - 1).

    Args:
        side: rows and columns, at least 3.
        slippery: whether moves go astray.
    """

    def __init__(
        self,
        task: object = None,
        seed: int = 0,
        max_turns: int = 10,
        invalid_penalty: float = 0.0,
        side: int = 4,
        slippery: bool = False,
    ) -> None:
        self.side = check_whole("side", side, 3)
        self.slippery = check_flag("slippery", slippery)
        self.least_turns = 2 * (side - 1)
        super().__init__(task, seed, max_turns, invalid_penalty)
        self._seed = seed

    def begin(self) -> None:
        """Puts the player where the level says."""
        self.player, self.goal, self.holes = _level(self.start[0], self.side)
        self._slips = random.Random(f"{self.start[0]}|{self._seed}")

    def observe(self) -> str:
        """The map and the moves; a player who fell in shows as X."""
        rows = [[self._mark((row, column)) for column in range(self.side)] for row in range(self.side)]
        lake = "\n".join("".join(row) for row in rows)
        return f"{lake}\nP you, O hole, G goal. <action>NAME</action>: {', '.join(MOVES)}"

    def play(self, action: str) -> bool | None:
        """Walks one cell, if there is one."""
        if action not in MOVES:
            return None
        cell = moved(self.player, self._slip(action) if self.slippery else action)
        if min(cell) >= 0 and max(cell) < self.side:
            self.player = cell
        self.ended = self.player in self.holes
        return self.player == self.goal

    def _slip(self, action: str) -> str:
        aside = ("left", "right") if action in ("up", "down") else ("up", "down")
        return self._slips.choice((action, *aside))

    def _mark(self, cell: Cell) -> str:
        if cell == self.player:
            return "X" if self.ended else "P"
        return "G" if cell == self.goal else "O" if cell in self.holes else "."


@lru_cache(maxsize=4096)
def _level(number: int, side: int) -> tuple[Cell, Cell, frozenset[Cell]]:
    """Player, goal and holes, drawn until there is a way that is neither too short nor too long."""
    rng = random.Random(f"frozen-lake|{number}")
    cells = [(row, column) for row in range(side) for column in range(side)]
    while True:
        player, goal, *holes = rng.sample(cells, side + 2)
        steps = steps_between(player, goal, frozenset(cells) - set(holes))
        if steps is not None and 2 <= steps <= 2 * (side - 1):
            return player, goal, frozenset(holes)


def frozen_lake_suite(
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int = 10,
    invalid_penalty: float = 0.0,
    side: int = 4,
    slippery: bool = False,
) -> GameSuite:
    """Walk over the ice to the goal, around the holes."""
    game = partial(FrozenLakeEnv, max_turns=max_turns, invalid_penalty=invalid_penalty, side=side, slippery=slippery)
    return level_suite("frozen-lake", game, size, eval_size, seed)
