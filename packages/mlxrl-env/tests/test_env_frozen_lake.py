"""Frozen lake: its map, its holes, its ice."""

from collections import deque
from typing import Any

import pytest

from mlxrl.env import FrozenLakeEnv, Task, make_env

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def say(name):
    return f"<action>{name}</action>"


def lake(observation):
    return observation.splitlines()[:-1]


def place(observation, mark):
    return next((r, row.index(mark)) for r, row in enumerate(lake(observation)) if mark in row)


def way(observation, marks_to_avoid="O", goal="G"):
    """The shortest moves over the shown map, found without looking into the game."""
    rows = lake(observation)
    start = place(observation, "P")
    paths = {start: []}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if rows[cell[0]][cell[1]] == goal:
            return paths[cell]
        for name, (down, right) in MOVES.items():
            near = cell[0] + down, cell[1] + right
            inside = 0 <= near[0] < len(rows) and 0 <= near[1] < len(rows)
            if inside and near not in paths and rows[near[0]][near[1]] not in marks_to_avoid:
                paths[near] = [*paths[cell], name]
                queue.append(near)
    raise AssertionError(f"no way in {rows}")


@pytest.mark.parametrize("options", [{}, {"side": 3, "size": 30, "eval_size": 5}, {"side": 7, "max_turns": 12}])
def test_every_level_is_won_by_walking_the_shortest_way(options):
    suite = make_env("frozen-lake", **options)
    side = options.get("side", 4)
    for task in suite.tasks("train"):
        env: Any = suite.make(task, 0, 0)
        observation = env.reset()
        assert "".join(lake(observation)).count("O") == side  # as many holes as rows
        moves = way(observation)
        assert 2 <= len(moves) <= 2 * (side - 1)
        results = [env.step(say(move)) for move in moves]
        assert [result.reward for result in results] == [0.0] * (len(moves) - 1) + [1.0]
        assert (results[-1].observation, results[-1].terminated) == ("Solved.", True)


def started(marks, **options) -> tuple[Any, Any]:
    """The first level whose map has these marks in this order, row by row; and its observation."""
    for number in range(2000):
        env: Any = FrozenLakeEnv(Task("", {"start": (number,)}, "a"), **options)
        observation = env.reset()
        if marks in "|".join(lake(observation)):
            return env, observation
    raise AssertionError(f"no level shows {marks}")


def test_a_hole_ends_the_episode_without_a_reward():
    env, _ = started("PO")
    result = env.step(say("right"))
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)
    assert "X" in result.observation  # the player, where the hole was
    assert "P" not in "".join(lake(result.observation))
    assert result.info == {"invalid_action": False}
    assert "P" in env.reset().splitlines()[place(result.observation, "X")[0]]  # and back on the ice


def test_the_edge_stops_the_player():
    env, before = started("|P..")
    result = env.step(say("left"))
    assert (result.observation, result.info) == (before, {"invalid_action": False})


def test_going_back_brings_the_same_state_in_another_turn():
    env, first = started("P..")
    there = env.step(say("right"))
    back = env.step(say("left"))
    assert env.state_id(back.observation) == env.state_id(first) != env.state_id(there.observation)


def test_slippery_ice_sends_a_move_ahead_or_aside_one_time_in_three_each():
    # from the middle of an open row: right goes right, up or down; never left
    seen = {(0, 1): 0, (1, 0): 0, (-1, 0): 0}
    number = 0
    while sum(seen.values()) < 600:
        number += 1
        env: Any = FrozenLakeEnv(Task("", {"start": (number,)}, "a"), seed=number, slippery=True, side=5, max_turns=8)
        observation = env.reset()
        row, column = place(observation, "P")
        if not (0 < row < 4 and column < 4) or "G" in "".join(lake(observation))[(row - 1) * 5 + column :: 5][:3]:
            continue
        result = env.step(say("right"))
        if result.observation != "Solved.":
            now = place(result.observation, "X" if "X" in result.observation else "P")
            seen[(now[0] - row, now[1] - column)] += 1  # a KeyError would be a move to the left
    # 600 draws of chance 1/3: 200 expected, standard deviation sqrt(600 * 2/9) = 11.5; five of them is 58
    assert all(abs(count - 200) < 58 for count in seen.values()), seen


def test_slips_follow_from_start_and_seed_and_are_each_instances_own():
    def walk(seed):
        env: Any = FrozenLakeEnv(Task("", {"start": (5,)}, "a"), seed, slippery=True, side=8, max_turns=14)
        env.reset()
        shown = []
        for move in ("right", "down", "left", "up") * 3:
            result = env.step(say(move))
            shown.append(result.observation)
            if result.terminated:
                break
        return shown

    assert walk(1) == walk(1)
    assert len({tuple(walk(seed)) for seed in range(20)}) > 5
