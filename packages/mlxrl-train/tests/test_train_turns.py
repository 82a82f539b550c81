"""The most turns of an episode, which some things must know before a run: asked of the environments of some tasks."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import time
from collections import Counter

import pytest

from mlxrl.train import ConfigError, make_config, make_curriculum, open_session, train, train_step

GROWING = """
import time
from pathlib import Path

from mlxrl.env import StepResult


class Growing:
    def __init__(self, task):
        self.max_turns = 1 + int(task) % 7
        self.note("made ")

    def reset(self):
        return "say"

    def step(self, action):
        return StepResult("more", 1.0, False)

    def state_id(self, observation):
        return observation

    def close(self):
        self.note("closed ")
        raise OSError("stuck")

    def note(self, what):
        with Path(__file__).with_name("noted").open("a") as file:
            file.write(what)


def growing(task, seed, index):
    if int(task) == 51:
        raise KeyError("lamp")
    return Growing(task)


def hanging(task, seed, index):
    if int(task) == 3:
        time.sleep(3600)
    return Clinging(task)


class Clinging(Growing):
    def close(self):
        time.sleep(3600)


def never(task, seed, index):
    time.sleep(3600)
"""


def test_turns_that_depend_on_the_task_are_those_of_the_longest_and_what_is_asked_is_closed(rooms, tmp_path):
    (tmp_path / "growing.py").write_text(GROWING)
    fields = rooms(env_name=f"{tmp_path / 'growing.py'}:growing", algorithm={"name": "dr-grpo", "overlong_buffer": 20})
    session = open_session(make_config(fields))
    # tasks 0 to 3, and of the other 96 every 24th from the last: 99, 75, 51, which breaks, and 27, which has most
    assert Counter((tmp_path / "noted").read_text().split()) == {"made": 7, "closed": 7}
    assert session.curriculum.max_turns == 7
    assert session.algorithm.reduction.max_tokens == 7 * 4
    for turns in (5, 9):  # what is set counts, for other tasks may have more than those asked
        session = open_session(make_config(fields | {"max_turns": turns}))
        assert session.curriculum.max_turns == turns
        told = [
            reason for reason in session.inactive if reason.startswith("max_turns is above the 7 of the environments")
        ]
        assert len(told) == (turns > 7)
        assert session.algorithm.reduction.max_tokens == turns * 4
    session = open_session(make_config(fields))
    # an episode is charged by its own limit: the first task's has one turn of 4 tokens, where 20 do not fit
    step = train_step(session, 0)
    played = [t for t in step.groups.sampled if not t.failed]
    assert len({t.max_turns for t in played}) > 1
    for t in played:
        limit = 4 * t.max_turns
        buffer = min(20, limit)
        expected = -max(0, t.num_sampled - (limit - buffer)) / buffer
        assert t.reward_parts["overlong"] == pytest.approx(expected)


def test_an_environment_that_hangs_while_turns_are_asked_costs_a_timeout_and_itself(rooms, tmp_path):
    (tmp_path / "growing.py").write_text(GROWING)
    fields = rooms(env_name=f"{tmp_path / 'growing.py'}:hanging", rollout={"env_timeout": 0.5})
    begin = time.monotonic()
    assert make_curriculum(make_config(fields)).max_turns == 7
    # 0.5 s for task 3, and 2 for those that cannot be closed; they are made at the same time
    assert time.monotonic() - begin < 10
    with pytest.raises(ConfigError, match=r"took longer than rollout\.env_timeout = 0\.5 s; mend it, or raise"):
        make_curriculum(make_config(fields | {"env_name": f"{tmp_path / 'growing.py'}:never"}))


@pytest.mark.parametrize(("tasks", "asked"), [(1, [0]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 4, 5])])
def test_of_few_tasks_all_are_asked_for_their_turns(rooms, tmp_path, tasks, asked):
    (tmp_path / "growing.py").write_text(GROWING)
    config = rooms(env_name=f"{tmp_path / 'growing.py'}:growing", environment={"tasks": tasks})
    assert make_curriculum(make_config(config)).max_turns == 1 + asked[-1]
    assert Counter((tmp_path / "noted").read_text().split())["made"] == len(asked)


def test_turns_that_were_asked_for_a_plan_are_not_asked_for_the_run_again(rooms, tmp_path):
    (tmp_path / "growing.py").write_text(GROWING)
    config = make_config(rooms(env_name=f"{tmp_path / 'growing.py'}:growing", steps=1))
    train(config, curriculum=make_curriculum(config))
    # 7 for their turns, see above, and 2 groups of 3 to be played
    assert (tmp_path / "noted").read_text().split().count("made") == 7 + 6
