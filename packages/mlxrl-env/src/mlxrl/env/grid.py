"""Cells of a square grid, as (row, column), and the ways between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

Cell = tuple[int, int]

MOVES = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}
"""The moves by name, each as (rows, columns)."""


def moved(cell: Cell, move: str, steps: int = 1) -> Cell:
    """The cell that lies some steps away; steps below 0 go the other way."""
    rows, columns = MOVES[move]
    return cell[0] + rows * steps, cell[1] + columns * steps


def steps_between(start: Cell, goal: Cell, free: Set[Cell]) -> int | None:
    """The fewest moves from start to goal over free cells; None where there is no way."""
    steps = {start: 0}
    reached = deque([start])
    while reached:
        cell = reached.popleft()
        for move in MOVES:
            near = moved(cell, move)
            if near in free and near not in steps:
                steps[near] = steps[cell] + 1
                reached.append(near)
    return steps.get(goal)
