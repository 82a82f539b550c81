"""Environments that hang, are slow or say too much: what they cost, in whose threads, and what they cannot change."""

import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from mlxrl.env import StopReason
from mlxrl.policy.testing import make_tiny_model
from mlxrl.rollout import Engine, SamplingConfig, group_requests
from mlxrl.rollout.stage import NUM_THREADS, OverrunError, Stage, Ticket

from .comparing import assert_same, engine_of
from .environments import Conversation

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=3)
SECONDS = 0.3
LINES = ("begin", "on", "and on")


class Meddled(Conversation):
    """A conversation in which something else happens first, whenever it is asked anything."""

    def __init__(self, meddle):
        super().__init__(*LINES)
        self.meddle = meddle

    def reset(self):
        self.meddle("reset", len(self.answers))
        return super().reset()

    def step(self, action):
        self.meddle("step", len(self.answers))
        return super().step(action)

    def state_id(self, observation):
        self.meddle("state_id", len(self.answers))
        return super().state_id(observation)


def hang():
    threading.Event().wait()


def at(where, turn, action):
    """Does something when the environment is asked one thing in one turn."""

    def meddle(method, now):
        if (method, now) == (where, turn):
            action()

    return meddle


def play(lend, make, num_rows=4, *, width=64, **options):
    """Rows of which make(row) says what is odd about their environment: a function, or None."""
    engine = engine_of(lend("qwen3"), SAMPLING, width=width, **{"env_timeout": SECONDS, **options})

    def factory(row, seed, member):
        return Meddled(make(row) or (lambda method, turn: None))

    return engine, engine.rollout(group_requests(range(num_rows), factory, group_size=1))


@pytest.fixture(scope="module")
def undisturbed(lend):
    """More rows than there are threads, so that some wait behind the first."""
    return play(lend, lambda row: None, NUM_THREADS + 4, env_timeout=None)[1]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("where", "turn", "num_turns"),
    [("make", 0, 0), ("reset", 0, 0), ("state_id", 0, 0), ("step", 0, 1), ("state_id", 1, 1), ("step", 2, 3)],
)
def test_an_environment_that_hangs_costs_its_own_row_and_no_other(
    lend, undisturbed, where, turn, num_turns, deterministic
):
    def make(row):
        if row == 0 and where == "make":
            hang()
        return at(where, turn, hang) if row == 0 else None

    _, trajectories = play(lend, make, len(undisturbed), deterministic=deterministic)
    hung = trajectories[0]
    assert hung.failed
    assert hung.stop_reason == StopReason.timeout
    assert hung.error == "the environment took longer than 0.3 s"
    assert [turn.action for turn in hung.turns] == [turn.action for turn in undisturbed[0].turns[:num_turns]]
    assert_same(trajectories[1:], undisturbed[1:], 1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("width", [1, 2, 64])
def test_several_that_hang_free_their_places_and_their_thread(lend, undisturbed, width, deterministic):
    # rows 0 and 1 fill the places of the batch; row NUM_THREADS comes after row 0 in the same thread
    hanging = (0, 1, NUM_THREADS)
    _, trajectories = play(
        lend,
        lambda row: at("step", 0, hang) if row in hanging else None,
        len(undisturbed),
        width=width,
        deterministic=deterministic,
    )
    assert [row for row, t in enumerate(trajectories) if t.stop_reason == StopReason.timeout] == list(hanging)
    others = [row for row in range(len(undisturbed)) if row not in hanging]
    assert_same([trajectories[row] for row in others], [undisturbed[row] for row in others], 1e-5)


def test_an_answer_that_comes_too_late_changes_nothing(lend, undisturbed):
    _, trajectories = play(lend, lambda row: at("step", 0, lambda: time.sleep(0.5)) if row == 0 else None)
    assert trajectories[0].stop_reason == StopReason.timeout
    assert trajectories[0].turns[0].reward == 0.0
    assert_same(trajectories[1:], undisturbed[1:4], 1e-5)


SCRIPT = """
import sys, threading
from mlxrl.env import StepResult
from mlxrl.policy import load_policy_with_lora
from mlxrl.rollout import Engine, SamplingConfig, group_requests

class Hangs:
    max_turns = 2
    def reset(self):
        return "hi"
    def step(self, action):
        threading.Event().wait()
    def state_id(self, observation):
        return observation

model, tokenizer, _ = load_policy_with_lora(sys.argv[1])
engine = Engine(model, tokenizer, SamplingConfig(max_tokens=2), env_timeout=0.1)
for trajectory in engine.rollout(group_requests([0, 1], lambda *_: Hangs(), group_size=2)):
    print(trajectory.stop_reason)
"""


def test_a_process_with_hung_environments_can_exit(tmp_path):
    folder = make_tiny_model(tmp_path / "model", "llama")
    script = [sys.executable, "-c", SCRIPT, str(folder)]
    ended = subprocess.run(script, timeout=100, check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["timeout"] * 4


def test_an_environment_that_would_end_the_process_ends_its_row(lend, undisturbed):
    _, trajectories = play(lend, lambda row: at("step", 1, sys.exit) if row == 1 else None)
    assert trajectories[1].stop_reason == StopReason.env_error
    assert "step of the environment raised SystemExit" in str(trajectories[1].error)
    assert_same([trajectories[i] for i in (0, 2, 3)], [undisturbed[i] for i in (0, 2, 3)], 1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("where", "turn"), [("reset", 0), ("step", 0), ("state_id", 1), ("step", 2), ("close", 3)])
def test_an_interrupt_in_this_thread_is_heard_before_anyone_is_asked_more(lend, where, turn, deterministic):
    asked = []

    def interrupt():
        asked.clear()
        raise KeyboardInterrupt

    class Closing(Meddled):
        def close(self):
            self.meddle("close", len(self.answers))

    def factory(row, seed, member):
        def meddle(method, now):
            asked.append((row, method))
            if row == 0:
                at(where, turn, interrupt)(method, now)

        return Closing(meddle)

    engine = engine_of(lend("qwen3"), SAMPLING, env_timeout=None, deterministic=deterministic)
    with pytest.raises(KeyboardInterrupt):
        engine.rollout(group_requests(range(4), factory, group_size=1))
    assert {method for _, method in asked} <= {"close"}
    assert len(set(asked)) == len(asked)  # nobody twice


def test_an_environment_is_always_asked_in_one_thread(lend):
    threads = {}

    def make(row):
        def note(method, turn):
            threads.setdefault(row, []).append((method, threading.get_ident()))

        note("make", 0)
        return note

    play(lend, make, NUM_THREADS + 4, env_timeout=60)
    for calls in threads.values():
        assert [method for method, _ in calls] == ["make", "reset", *["state_id", "step"] * 3]
        assert len({thread for _, thread in calls}) == 1
    used = {thread for calls in threads.values() for _, thread in calls}
    assert len(used) == NUM_THREADS
    assert threading.get_ident() not in used


def test_without_a_bound_environments_are_asked_in_this_thread(lend):
    threads = set()
    play(lend, lambda row: lambda method, turn: threads.add(threading.get_ident()), env_timeout=None)
    assert threads == {threading.get_ident()}


def test_threads_end_with_the_rollout(lend):
    before = set(threading.enumerate())
    play(lend, lambda row: None, env_timeout=60)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_environments_work_at_the_same_time(lend):
    # each waits until another is in its step too; one after the other they would break the barrier
    barrier = threading.Barrier(2)
    _, trajectories = play(lend, lambda row: at("step", 0, lambda: barrier.wait(20)), env_timeout=60)
    assert not any(t.failed for t in trajectories)


def test_rows_decode_while_another_waits_for_its_environment(lend):
    # the first row's step ends when the second row, which came later and is longer, has been asked for its own
    later = threading.Event()

    def wait():
        assert later.wait(20)

    def make(row):
        return at("step", 0, wait if row == 0 else later.set)

    model, tokenizer = lend("qwen3")
    requests = group_requests([0, 1], lambda row, seed, member: Meddled(make(row)), group_size=1)
    longer = SamplingConfig(temperature=0.7, max_tokens=9)
    requests = [requests[0], replace(requests[1], sampling=longer)]
    engine = Engine(model, tokenizer, SAMPLING, env_timeout=60, deterministic=False)
    assert not any(trajectory.failed for trajectory in engine.rollout(requests))


@pytest.mark.parametrize("width", [3, 64])
def test_delays_change_nothing_where_rollouts_are_deterministic(lend, undisturbed, width):
    costs = []
    for _ in range(4):
        engine, trajectories = play(
            lend,
            lambda row: lambda method, turn: time.sleep(random.uniform(0, 0.01)),
            len(undisturbed),
            width=width,
            env_timeout=60,
        )
        assert_same(trajectories, undisturbed, 1e-5)
        costs.append((engine.stats.decode_forwards, engine.stats.prefill_forwards, engine.stats.prefill_tokens))
    assert len(set(costs)) == 1


@pytest.mark.parametrize("width", [3, 64])
def test_delays_do_not_change_what_rows_say_where_they_are_not(lend, undisturbed, width):
    _, trajectories = play(
        lend,
        lambda row: lambda method, turn: time.sleep(random.uniform(0, 0.01)),
        len(undisturbed),
        width=width,
        env_timeout=60,
        deterministic=False,
    )
    assert_same(trajectories, undisturbed, 1e-5)


def test_the_first_word_about_a_call_counts():
    go = threading.Event()
    late = Ticket(go.wait)
    thread = threading.Thread(target=late.run)
    thread.start()
    assert late.overrun()
    go.set()
    thread.join(20)
    with pytest.raises(OverrunError):
        late.result()
    answered = Ticket(lambda: 3)
    assert answered.run()
    assert not answered.overrun()
    assert answered.result() == 3


def test_a_thread_that_was_given_up_takes_no_more_calls():
    stage, go, used = Stage(0.05, 1), threading.Event(), []

    def call(wait):
        used.append(threading.current_thread())
        return wait and go.wait()

    calls = [stage.submit(owner, partial(call, owner == 0)) for owner in (0, 1, 0)]  # of two owners in one thread
    for ticket in calls:
        stage.await_answer(ticket)
    go.set()
    used[0].join(20)
    assert not used[0].is_alive()
    assert len(used) == 2  # nothing more is asked of an owner whose call may still run
    assert used[1] is not used[0]
    with pytest.raises(OverrunError):
        calls[2].result()
    stage.close()
