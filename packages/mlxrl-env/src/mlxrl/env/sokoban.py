"""Sokoban: push the boxes onto the goals."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from mlxrl.env.game import GameSuite
from mlxrl.env.grid import MOVES, Cell, moved
from mlxrl.env.levels import LevelGame, level_suite
from mlxrl.env.options import check_whole

MOST_MOVES = 10  # of the shortest solution of a level
FEWEST_MOVES = 2

_State = tuple[Cell, frozenset[Cell]]  # the player and the boxes


class SokobanLevel(NamedTuple):
    """A level at its start."""

    floor: frozenset[Cell]
    goals: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]


class SokobanEnv(LevelGame):
    """Pushes one or two boxes onto as many goals; a box can be pushed and not pulled.

    An observation is the map in Sokoban's usual signs (# wall, - floor, @ player, $ box, . goal, * box on a goal,
    + player on a goal), and the moves in its last line: <action>up</action>, down, left or right. A move into a wall
    or against a box that cannot go on is invalid. Levels are made by playing backward from the solved state, so each
    has a solution, of 2 to 10 moves.

    See `TextGame` for the other arguments; max_turns is at least 10, or not every level could be solved.

    Args:
        side: rows and columns with the walls around, at least 5.
        boxes: number of boxes, 1 or 2.
    """

    least_turns = MOST_MOVES

    def __init__(
        self,
        task: object = None,
        seed: int = 0,
        max_turns: int = 15,
        invalid_penalty: float = 0.0,
        side: int = 6,
        boxes: int = 1,
    ) -> None:
        self.side = check_whole("side", side, 5)
        if check_whole("boxes", boxes, 1) > 2:
            raise ValueError(f"boxes must be 1 or 2, got {boxes!r}")
        self.num_boxes = boxes
        super().__init__(task, seed, max_turns, invalid_penalty)

    def begin(self) -> None:
        """Puts player and boxes where the level says."""
        self.floor, self.goals, self.player, self.boxes = make_level(self.start[0], self.side, self.num_boxes)

    def observe(self) -> str:
        """The map and the moves."""
        rows = [[self._mark((row, column)) for column in range(self.side)] for row in range(self.side)]
        grid = "\n".join("".join(row) for row in rows)
        return f"{grid}\n@ pushes $ onto . to make *. <action>NAME</action>: {', '.join(MOVES)}"

    def play(self, action: str) -> bool | None:
        """Walks one cell, and pushes the box that stands there."""
        if action not in MOVES:
            return None
        cell, beyond = moved(self.player, action), moved(self.player, action, 2)
        if cell not in self.floor:
            return None
        if cell in self.boxes:
            if beyond not in self.floor or beyond in self.boxes:
                return None
            self.boxes = self.boxes - {cell} | {beyond}
        self.player = cell
        return self.boxes == self.goals

    def _mark(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        if cell == self.player:
            return "+" if cell in self.goals else "@"
        if cell in self.boxes:
            return "*" if cell in self.goals else "$"
        return "." if cell in self.goals else "-"


@lru_cache(maxsize=4096)
def make_level(number: int, side: int, boxes: int) -> SokobanLevel:
    """The level of a number: walls and goals are drawn, and a state from which they are solved."""
    rng = random.Random(f"sokoban|{number}")
    room = [(row, column) for row in range(1, side - 1) for column in range(1, side - 1)]
    while True:
        floor = frozenset(rng.sample(room, len(room) - rng.randrange(side - 3)))
        goals = frozenset(rng.sample(sorted(floor), boxes))
        states = [
            state
            for state, moves in _moves_to_solve(floor, goals).items()
            if moves >= FEWEST_MOVES and not state[1] & goals
        ]
        if states:
            player, places = rng.choice(states)
            return SokobanLevel(floor, goals, player, places)


def _moves_to_solve(floor: frozenset[Cell], goals: frozenset[Cell]) -> dict[_State, int]:
    """The states that can be solved in a few moves, with the fewest, by playing backward from the solved ones."""
    solved = [(moved(goal, move), goals) for goal in sorted(goals) for move in MOVES]  # the last move is a push
    moves = {state: 0 for state in solved if state[0] in floor - goals}
    reached = deque(moves)
    while reached:
        state = reached.popleft()
        if moves[state] == MOST_MOVES:
            break
        for before in _states_before(state, floor):
            if before not in moves:
                moves[before] = moves[state] + 1
                reached.append(before)
    return moves


def _states_before(state: _State, floor: frozenset[Cell]) -> Iterator[_State]:
    """Every state from which one move leads here: the player steps back, and may have pushed the box ahead."""
    player, boxes = state
    for move in MOVES:
        back, ahead = moved(player, move, -1), moved(player, move)
        if back in floor and back not in boxes:
            yield back, boxes
            if ahead in boxes:
                yield back, boxes - {ahead} | {player}


def sokoban_suite(
    seed: int = 0,
    size: int = 200,
    eval_size: int = 50,
    max_turns: int = 15,
    invalid_penalty: float = 0.0,
    side: int = 6,
    boxes: int = 1,
) -> GameSuite:
    """Push one or two boxes onto their goals."""
    game = partial(SokobanEnv, max_turns=max_turns, invalid_penalty=invalid_penalty, side=side, boxes=boxes)
    return level_suite("sokoban", game, size, eval_size, seed)
