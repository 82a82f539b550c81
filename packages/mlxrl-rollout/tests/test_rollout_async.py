"""Environments that are async: one event loop an episode, there from reset to the end, and closed whatever ends it."""

import _thread
import asyncio
import re
import signal
import threading
import time

import pytest

from mlxrl.env import StopReason, ToolMathEnv
from mlxrl.rollout import SamplingConfig, group_requests
from mlxrl.rollout.play import Play
from mlxrl.rollout.stage import Stage

from .comparing import assert_same, engine_of
from .environments import Chatter

SAMPLING = SamplingConfig(max_tokens=4)
ROWS = 20  # more than there are threads


class Clerk:
    """A chatter whose answers come from a task of its own, made in reset, by a queue; it notes where it runs."""

    def __init__(self, max_turns=3):
        self.chatter, self.max_turns = Chatter(max_turns), max_turns
        self.loops, self.threads, self.cancelled = [], set(), threading.Event()

    async def reset(self):
        self._note()
        self.lock, self.asked, self.answers = asyncio.Lock(), asyncio.Queue(), asyncio.Queue()
        self.work = asyncio.create_task(self._work())
        await asyncio.sleep(0.001)
        return self.chatter.reset(), {"seed": 1}

    async def step(self, action):
        self._note()
        async with self.lock:
            await self.asked.put(action)
            return await self.answers.get()

    def state_id(self, observation):
        return self.chatter.state_id(observation)

    def _note(self):
        self.loops.append(asyncio.get_running_loop())
        self.threads.add(threading.get_ident())

    async def _work(self):
        try:
            while True:
                action = await self.asked.get()
                await asyncio.sleep(0.001)
                await self.answers.put(self.chatter.step(action))
        finally:
            self.cancelled.set()


def play(lend, clerks, **options):
    engine = engine_of(lend("qwen3"), SAMPLING, width=6, **options)
    return engine.rollout(group_requests(range(len(clerks)), lambda row, seed, place: clerks[row], group_size=1))


def assert_closed(clerk):
    assert clerk.cancelled.wait(10)
    assert len(set(clerk.loops)) == len(clerk.threads) == 1
    deadline = time.monotonic() + 10
    while not clerk.loops[0].is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clerk.loops[0].is_closed()


@pytest.mark.parametrize("options", [{}, {"deterministic": False}, {"env_timeout": None}])
def test_an_async_environment_plays_as_the_plain_one_does_on_one_loop_that_ends_with_it(lend, options):
    clerks = [Clerk() for _ in range(ROWS)]
    plain = play(lend, [Chatter(3) for _ in range(ROWS)])
    trajectories = play(lend, clerks, **{"env_timeout": 60.0, **options})
    assert_same(trajectories, plain)
    for trajectory, clerk in zip(trajectories, clerks, strict=True):
        assert trajectory.stop_reason == StopReason.env_done
        assert len(trajectory.turns) == 3
        assert_closed(clerk)
    assert len({id(clerk.loops[0]) for clerk in clerks}) == ROWS


class RaisesInStep(Clerk):
    async def step(self, action):
        self._note()
        await asyncio.sleep(0)
        raise KeyError("boom")


class NamesNoState(Clerk):
    async def state_id(self, observation) -> str:
        await asyncio.sleep(0)
        raise KeyError("boom")


class Sleeps(Clerk):
    async def step(self, action):
        self._note()
        await asyncio.sleep(1.0)
        return await super().step(action)


@pytest.mark.parametrize(
    ("kind", "words"), [(RaisesInStep, "step of the environment"), (NamesNoState, "state_id of the environment")]
)
def test_an_async_environment_that_raises_fails_its_row_alone_and_its_loop_is_closed(lend, kind, words):
    clerks = [kind(), Clerk()]
    failed, good = play(lend, clerks)
    assert (failed.stop_reason, good.stop_reason) == (StopReason.env_error, StopReason.env_done)
    assert str(failed.error).startswith(f"{words} raised KeyError: 'boom' (test_rollout_async.py, line")
    for clerk in clerks:
        assert_closed(clerk)


def test_an_async_environment_that_is_too_slow_fails_its_row_and_closes_its_loop_when_it_wakes(lend):
    clerks = [Sleeps(), Clerk()]
    late, good = play(lend, clerks, env_timeout=0.3)
    assert (late.stop_reason, good.stop_reason) == (StopReason.timeout, StopReason.env_done)
    for clerk in clerks:
        assert_closed(clerk)


def test_an_episode_that_the_context_ends_closes_its_loop_too(lend):
    closed_in = []

    class Closes(Clerk):
        def close(self):
            closed_in.append(threading.get_ident())

    clerk = Closes()
    (trajectory,) = play(lend, [clerk], max_context=24)
    assert trajectory.stop_reason == StopReason.context
    assert not trajectory.failed
    assert_closed(clerk)
    assert closed_in == [*clerk.threads]


def test_an_answer_that_comes_after_its_deadline_but_before_it_is_missed_closes_its_loop_too(lend):
    # the first row overruns while the second keeps the host from asking after it: the host patrols and finds that the
    # time is over, the late answer comes, and only then the episode ends
    woken = threading.Event()

    class Oversleeps(Clerk):
        async def step(self, action):
            self._note()
            await asyncio.to_thread(woken.wait, 20)
            return await super().step(action)

    clerks = [Oversleeps(), Clerk()]
    engine = engine_of(lend("qwen3"), SAMPLING, width=6, env_timeout=0.2, deterministic=False)
    patrol = Stage.patrol

    def patrols(stage):
        before = len(stage._given_up)
        patrol(stage)
        if len(stage._given_up) > before:
            woken.set()
            assert clerks[0].cancelled.wait(10)  # closed, though its episode is not over yet

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "patrol", patrols)
        late, good = engine.rollout(group_requests([0, 1], lambda row, *_: clerks[row], group_size=1))
    assert (late.stop_reason, good.stop_reason) == (StopReason.timeout, StopReason.env_done)
    for clerk in clerks:
        assert_closed(clerk)


@pytest.mark.parametrize("options", [{}, {"deterministic": False}, {"env_timeout": None}])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_rollout_that_breaks_off_closes_every_environment(lend, monkeypatch, error, options):
    clerks = [Clerk() for _ in range(ROWS)]

    def breaks(self, *_):
        raise error

    monkeypatch.setattr(Play, "_read_on", breaks)  # before the second turn, in the main thread
    with pytest.raises(error):
        play(lend, clerks, **{"env_timeout": 60.0, **options})
    begun = [clerk for clerk in clerks if clerk.loops]  # where rows do not wait for one another, some were never asked
    assert begun
    for clerk in begun:
        assert_closed(clerk)


@pytest.fixture
def ctrl_c():
    """What Python does of itself, but not where the tests were started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_an_environment_hangs_closes_the_others_and_that_one_when_it_wakes(lend, ctrl_c):
    woken = threading.Event()

    class Hangs(Clerk):
        async def step(self, action):
            self._note()
            _thread.interrupt_main()  # as Ctrl-C does
            woken.wait(20)
            return "x", 0.0, False, False, {}

    clerks = [Clerk(), Hangs(), Clerk()]
    with pytest.raises(KeyboardInterrupt):
        play(lend, clerks, env_timeout=60.0)
    assert_closed(clerks[0])
    assert_closed(clerks[2])
    assert not clerks[1].cancelled.is_set()
    woken.set()
    assert_closed(clerks[1])


def test_an_environment_that_cannot_close_is_told_and_its_episode_stands(lend):
    class Sticks(Clerk):
        def close(self):
            raise OSError("the door is stuck")

    class Hangs(Clerk):
        def close(self):
            threading.Event().wait()

    class Breaks(Sticks):
        async def step(self, action):
            self._note()
            raise KeyError("boom")

    clerks = [Sticks(), Breaks(), Clerk(), Hangs(), Hangs(max_turns=1)]
    stuck, broken, good, *hung = play(lend, clerks, env_timeout=0.5)
    sticks = r"close of the environment raised OSError: the door is stuck \(test_rollout_async.py, line \d+\)"
    assert re.fullmatch(sticks, str(stuck.close_error))
    assert re.fullmatch(sticks, str(broken.close_error))
    assert str(broken.error).startswith("step of the environment raised KeyError: 'boom'")
    assert (good.close_error, good.error) == (None, None)
    assert [t.close_error for t in hung] == ["close of the environment took longer than 0.5 s"] * 2
    assert [t.stop_reason for t in (stuck, good, hung[0])] == [StopReason.env_done] * 3
    assert [t.error for t in (stuck, *hung)] == [None] * 3
    for clerk in clerks[:3]:
        assert_closed(clerk)


def test_an_environment_that_overruns_its_last_turn_is_not_closed_while_it_runs(lend):
    woken, closed = threading.Event(), threading.Event()

    class Oversleeps(Clerk):
        async def step(self, action):
            self._note()
            assert not woken.wait(1)
            woken.set()
            return "x", 0.0, True, False, {}

        def close(self):
            assert woken.is_set()
            closed.set()

    (late,) = play(lend, [Oversleeps(max_turns=1)], env_timeout=0.2)
    assert (late.stop_reason, late.close_error) == (StopReason.timeout, None)
    assert closed.wait(10)


class Calls(ToolMathEnv):
    """Asks the calculator whatever the model says."""

    def step(self, action):
        return super().step("<tool>12 * 3</tool>")


def test_what_a_tool_replies_is_read_in_the_tools_name(lend):
    engine = engine_of(lend("qwen3"), SAMPLING)
    (trajectory,) = engine.rollout(group_requests(["a"], lambda task, seed, place: Calls(task), group_size=1))
    assert trajectory.stop_reason == StopReason.max_turns
    assert [turn.observation for turn in trajectory.turns[1:]] == [({"role": "tool", "content": "36"},)] * 3
    assert [turn.state_id for turn in trajectory.turns] == ["", "36", "36", "36"]
    text = lend("qwen3")[1].decode(list(trajectory.segments[0].token_ids))
    assert text.count("<|tool|>36") == 3
