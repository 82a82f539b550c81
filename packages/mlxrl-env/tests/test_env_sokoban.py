"""Sokoban: its pushes, and that every level has a solution."""

from collections import deque
from typing import Any

import pytest

from mlxrl.env import SokobanEnv, Task, make_env

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def say(name):
    return f"<action>{name}</action>"


def read(observation):
    """Walls, goals, boxes and player of a shown map."""
    cells = {
        (row, column): mark
        for row, line in enumerate(observation.splitlines()[:-1])
        for column, mark in enumerate(line)
    }
    walls, goals, boxes = ({cell for cell, mark in cells.items() if mark in marks} for marks in ("#", ".*+", "$*"))
    player = next(cell for cell, mark in cells.items() if mark in "@+")
    return walls, goals, frozenset(boxes), player


def pushed(walls, boxes, player, move):
    """The state after a move by the rules, or None where it cannot be done; written apart from the game."""
    there = player[0] + move[0], player[1] + move[1]
    beyond = there[0] + move[0], there[1] + move[1]
    if there in walls:
        return None
    if there not in boxes:
        return boxes, there
    return None if beyond in walls or beyond in boxes else ((boxes - {there}) | {beyond}, there)


def solution(observation):
    """The shortest solution of a shown map, by playing forward."""
    walls, goals, boxes, player = read(observation)
    paths: dict[Any, tuple[str, ...]] = {(boxes, player): ()}
    queue = deque(paths)
    while queue:
        state = queue.popleft()
        if state[0] == goals:
            return paths[state]
        for name, move in MOVES.items():
            after = pushed(walls, state[0], state[1], move)
            if after is not None and after not in paths:
                paths[after] = (*paths[state], name)
                queue.append(after)
    raise AssertionError(f"no solution of\n{observation}")


@pytest.mark.parametrize(("boxes", "side"), [(1, 6), (2, 6), (1, 5), (2, 7)])
def test_every_level_is_solved_in_two_to_ten_moves(boxes, side):
    suite = make_env("sokoban", boxes=boxes, side=side, size=40, eval_size=10)
    for task in (*suite.tasks("train"), *suite.tasks("eval")):
        env: Any = suite.make(task, 0, 0)
        observation = env.reset()
        _, goals, placed, _ = read(observation)
        assert (len(goals), len(placed), len(goals & placed)) == (boxes, boxes, 0)
        moves = solution(observation)
        assert 2 <= len(moves) <= 10
        results = [env.step(say(move)) for move in moves]
        assert [result.reward for result in results] == [0.0] * (len(moves) - 1) + [1.0]
        assert (results[-1].observation, results[-1].terminated) == ("Solved.", True)


def test_moves_follow_the_rules_of_the_shown_map():
    for number in range(60):
        env: Any = SokobanEnv(Task("", {"start": (number,)}, "a"), boxes=2)
        for name, move in MOVES.items():
            walls, goals, boxes, player = read(env.reset())
            after = pushed(walls, boxes, player, move)
            result = env.step(say(name))
            assert result.info["invalid_action"] == (after is None)
            if not result.terminated:
                assert read(result.observation) == (walls, goals, *(after or (boxes, player)))


def test_walking_back_brings_the_same_state_and_a_push_does_not():
    env: Any = SokobanEnv(Task("", {"start": (3,)}, "a"))
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    compared = 0
    for name in MOVES:
        first = env.reset()
        there = env.step(say(name))
        if there.info["invalid_action"] or there.terminated:
            continue
        again = env.step(say(back[name]))
        moved_a_box = read(there.observation)[2] != read(first)[2]
        if not again.info["invalid_action"]:
            assert (env.state_id(again.observation) == env.state_id(first)) == (not moved_a_box)
            compared += 1
    assert compared
