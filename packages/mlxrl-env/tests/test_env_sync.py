"""Environments that are async, or speak as gymnasium does, played as plain ones."""

import asyncio
import threading
import warnings
from typing import Any

import pytest

from mlxrl.env import Environment, KeyDoorEnv, StepResult, SyncEnv, as_observation


class Clerk:
    """Takes each action from a queue in a task of its own, which lives from reset on."""

    max_turns = 3

    def __init__(self):
        self.loops, self.closed = [], False

    async def reset(self):
        self.loops.append(asyncio.get_running_loop())
        self.lock, self.asked, self.answers = asyncio.Lock(), asyncio.Queue(), asyncio.Queue()
        self.work = asyncio.create_task(self._work())
        await asyncio.sleep(0)
        return "begin"

    async def step(self, action):
        self.loops.append(asyncio.get_running_loop())
        async with self.lock:
            await self.asked.put(action)
            return await self.answers.get()

    async def state_id(self, observation):
        await asyncio.sleep(0)
        return observation.lower()

    async def _work(self):
        try:
            for turn in range(1, self.max_turns + 1):
                action = await self.asked.get()
                await asyncio.sleep(0.001)
                await self.answers.put((f"{turn}: {action}", float(turn), turn == self.max_turns, False, {}))
            await asyncio.sleep(3600)
        finally:
            self.closed = True


def test_what_an_async_environment_makes_in_reset_is_there_in_step():
    clerk = Clerk()
    assert isinstance(clerk, Environment)
    env = SyncEnv(clerk)
    assert (env.max_turns, env.reset(), env.state_id("Begin")) == (3, "begin", "begin")
    assert [env.step(action) for action in "abc"] == [
        StepResult("1: a", 1.0, False),
        StepResult("2: b", 2.0, False),
        StepResult("3: c", 3.0, True),
    ]
    assert len(set(clerk.loops)) == 1
    assert not clerk.closed
    env.close()
    assert clerk.closed  # its task, cancelled where it slept
    assert clerk.loops[0].is_closed()
    env.close()


def test_two_environments_have_two_loops():
    clerks = Clerk(), Clerk()
    envs = [SyncEnv(clerk) for clerk in clerks]
    for env in envs:
        env.reset()
    assert [env.step(action).observation for env, action in zip(envs, "ab", strict=True)] == ["1: a", "1: b"]
    envs[0].close()
    assert envs[1].step("c").observation == "2: c"
    envs[1].close()
    assert clerks[0].loops[0] is not clerks[1].loops[0]


def test_a_loop_lives_in_the_thread_that_calls():
    seen = []

    def play():
        env = SyncEnv(Clerk())
        env.reset()
        seen.append(env.step("a").observation)
        env.close()

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["1: a"] * 4


def test_an_error_of_an_async_environment_passes_and_its_loop_can_be_closed():
    class Broken(Clerk):
        async def step(self, action):
            await asyncio.sleep(0)
            raise KeyError(action)

    env = SyncEnv(Broken())
    env.reset()
    with pytest.raises(KeyError, match="a"):
        env.step("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.close()


def test_a_plain_environment_passes_and_needs_no_loop():
    env = SyncEnv(KeyDoorEnv("a"))
    assert env.reset() == KeyDoorEnv("a").reset()
    assert env.step("nonsense").info == {"invalid_action": True}
    assert env._runner is None
    env.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_the_close_of_an_environment_is_called_once_on_its_loop_and_the_loop_ends_whatever_it_does(breaks):
    told = []

    class Room(Clerk):
        async def close(self):
            told.append(asyncio.get_running_loop())
            await asyncio.sleep(0)
            if breaks:
                raise OSError("stuck")

    env = SyncEnv(room := Room())
    env.reset()
    if breaks:
        with pytest.raises(OSError, match="stuck"):
            env.close()
    env.close()
    assert told == room.loops
    assert room.closed
    assert room.loops[0].is_closed()


class Gymnasium:
    max_turns = 1

    def reset(self):
        return "begin", {"seed": 3}

    def step(self, action):
        return "end", 1, True, False, {}

    def state_id(self, observation) -> Any:
        return [observation]


@pytest.mark.parametrize(("most", "turns"), [(None, 3), (2, 2)])
def test_the_observation_of_the_last_turn_may_be_none_and_no_other(most, turns):
    class Silent:
        max_turns = 3

        def reset(self):
            self.turn = 0
            return "begin"

        def step(self, action):
            self.turn += 1
            return (None if self.turn == turns or action == "too early" else "go on", 0.0, False, {})

        def state_id(self, observation):
            return observation

    env = SyncEnv(Silent(), most)
    assert env.max_turns == turns
    for _ in range(2):  # each episode has its turns
        env.reset()
        assert [env.step("a").observation for _ in range(turns)] == ["go on"] * (turns - 1) + [""]
    env.reset()
    with pytest.raises(TypeError, match=r"observation of step: expected text or .* got NoneType"):
        env.step("too early")


def test_gymnasiums_reset_and_step_become_an_observation_and_a_result():
    env = SyncEnv(Gymnasium())
    assert (env.reset(), env.step("a")) == ("begin", StepResult("end", 1.0, True))
    with pytest.raises(TypeError, match="unhashable"):
        env.state_id("begin")


A, B = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        ("", ""),
        (("text", {}), "text"),
        ((A, B), (A, B)),  # two messages, not a message and its info
        ([A, B], (A, B)),
        (([A, B], {"seed": 1}), (A, B)),
        (((A, B), {}), (A, B)),
        (([A], B), (A,)),
    ],
)
def test_what_reset_may_return(value, expected):
    assert as_observation(value) == expected


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, TypeError, "observation of reset: expected text or a list of chat messages, got NoneType"),
        ((None, {}), TypeError, "observation of reset: .* got NoneType"),
        (("text", None), TypeError, "observation of reset: a chat message must be .* got str 'text'"),
        ([], ValueError, "observation of reset: .* empty list"),
        ((1.0, {}), TypeError, "observation of reset: .* got float 1.0"),
    ],
)
def test_a_wrong_observation_of_reset_is_refused_by_what_came(value, error, words):
    with pytest.raises(error, match=words):
        as_observation(value)
