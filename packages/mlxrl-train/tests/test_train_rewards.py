"""Trajectories get their rewards: once, checked, weighted, and nothing for those that failed."""

# pyright: reportArgumentType=false

import asyncio
import math
import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxrl.algo import make_algorithm
from mlxrl.env import Task
from mlxrl.train import NamedReward, RewardFault, RewardLog, make_batch, score_rewards
from mlxrl.train.metrics import rollout_metrics


@pytest.fixture
def three(episode):
    return [
        episode(0, (2,), seed=1),
        episode(0, (3,), seed=2, failed=True),
        episode(1, (1, 2), turn_rewards=(0.5, 0.25)),
    ]


class Recorded:
    """A reward function that keeps what it was called with."""

    def __init__(self, values):
        self.values, self.calls = values, []

    def __call__(self, **arguments):
        self.calls.append(arguments)
        return self.values


def test_each_function_is_called_once_with_the_sound_trajectories_alone(three):
    function = Recorded([1.0, 2.0])
    scored = score_rewards(three, [NamedReward("f", 0.5, function)])
    (call,) = function.calls
    assert call["trajectories"] == [three[0], three[2]]
    assert call["prompts"] == ["room 0", "room 0"]  # what the model first read, whatever the task says
    assert call["completions"] == ["text", "text\ntext"]  # a line a turn
    assert [len(ids) for ids in call["completion_ids"]] == [2, 3]
    assert [(t.reward, dict(t.reward_parts)) for t in scored] == [(0.5, {"f": 1.0}), (None, {}), (1.0, {"f": 2.0})]


def test_no_function_is_called_when_every_trajectory_failed(episode):
    function = Recorded([])
    (scored,) = score_rewards([episode(0, (2,), failed=True)], [NamedReward("f", 1.0, function)])
    assert (function.calls, scored.reward) == ([], None)


def test_columns_come_by_their_names_and_are_none_where_a_task_has_none(episode):
    rows = [
        replace(episode(0, (2,)), task=Task("a", {"answer": "1"})),
        replace(episode(1, (2,)), task=Task("b", {"hint": "x"})),
    ]
    function = Recorded([0.0, 0.0])
    score_rewards(rows, [NamedReward("f", 1.0, function)])
    assert (function.calls[0]["answer"], function.calls[0]["hint"]) == (["1", None], [None, "x"])


def test_the_total_is_the_weighted_sum_of_those_that_did_not_abstain(three):
    rewards = [
        NamedReward("environment", 1.0),
        NamedReward("f", 2.0, Recorded([0.5, None])),
        NamedReward("g", -1.0, Recorded([None, 3])),
    ]
    scored = score_rewards(three, rewards)
    # 0 + 2 * 0.5, nothing, 0.75 - 3
    assert [t.reward for t in scored] == [1.0, None, -2.25]
    assert scored[2].reward_parts == {"environment": 0.75, "f": None, "g": 3.0}


def test_a_row_for_which_all_abstain_has_no_reward(three):
    scored = score_rewards(three, [NamedReward("f", 1.0, Recorded([None, 1.0]))])
    assert [t.reward for t in scored] == [None, None, 1.0]


def test_the_reward_that_is_logged_is_the_one_that_is_trained_on(policy, episode):
    rewards = [
        NamedReward("f", 0.3, lambda trajectories, **_: [float(t.sample_index) for t in trajectories]),
        NamedReward("g", -2.0, lambda trajectories, **_: [0.1 * t.sample_index**2 for t in trajectories]),
    ]
    scored = score_rewards([episode(0, (3,), seed=i) for i in range(4)], rewards)
    batch = make_batch(
        policy,
        scored,
        make_algorithm("grpo", advantage="centred"),
        rewards=[[t.reward_parts[r.name] for r in rewards] for t in scored],
        reward_weights=[r.weight for r in rewards],
    )
    # 0.3 k - 0.2 k^2 for k = 0..3: 0, 0.1, -0.2, -0.9; their mean is -0.25
    logged = [0.0, 0.1, -0.2, -0.9]
    assert [t.reward for t in scored] == pytest.approx(logged)
    assert batch.advantages[:, 0].tolist() == pytest.approx([reward + 0.25 for reward in logged], abs=1e-6)
    assert rollout_metrics(scored, rewards)["reward"] == pytest.approx(-0.25)


NUMBERS = "must return numbers between -1e+09 and 1e+09 or None, got "


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0], "must return a list of 2 rewards, got 1"),
        ([1.0] * 3, "must return a list of 2 rewards, got 3"),
        (1.0, "must return a list of 2 rewards, got float"),
        (None, "must return a list of 2 rewards, got NoneType"),
        ("11", "must return a list of 2 rewards, got str"),
        ({0: 1.0, 1: 1.0}, "must return a list of 2 rewards, got dict"),
    ],
)
def test_what_is_no_list_of_one_reward_a_row_fails_all_rows_as_one(three, values, reason):
    function, log = Recorded(values), RewardLog()
    scored = score_rewards(three, [NamedReward("f", 1.0, function), NamedReward("g", 1.0, Recorded([1.0, 1.0]))], log)
    assert len(function.calls) == 1  # what it returns once it would return again
    assert [t.error for t in scored] == [f"reward 'f' {reason}", "broke", f"reward 'f' {reason}"]
    assert [(t.reward, dict(t.reward_parts)) for t in scored[::2]] == [(None, {})] * 2
    assert log == RewardLog(2, [RewardFault("f", reason, ((0, 1), (1, 0)))])
    assert (log.failed("f"), log.failed("g")) == (2, 0)


@pytest.mark.parametrize(
    ("value", "reason", "example"),
    [
        (math.nan, NUMBERS + "nan", ""),
        (-math.inf, NUMBERS + "-inf", ""),
        (1e10, NUMBERS + "one out of range", "10000000000.0"),
        (10**400, NUMBERS + "one out of range", "1" + "0" * 296 + "..."),
        ("1", NUMBERS + "a str", "'1'"),
        ([1.0], NUMBERS + "a list", "[1.0]"),
        (1 + 0j, NUMBERS + "a complex", "(1+0j)"),
        (ValueError("no idea"), "failed: no idea", ""),
    ],
)
def test_a_value_that_is_no_reward_fails_its_row_alone(three, value, reason, example):
    function, log = Recorded([1.0, value]), RewardLog()
    scored = score_rewards(three, [NamedReward("f", 1.0, function)], log)
    assert len(function.calls) == 1
    assert [(t.reward, t.failed) for t in scored[:2]] == [(1.0, False), (None, True)]
    assert (scored[2].failed, scored[2].error) == (True, f"reward 'f' {reason}")
    assert log.faults == [RewardFault("f", reason, ((1, 0),), example)]


def nested(completion_ids):
    return [[len(ids) / 10] for ids in completion_ids]


def excepted(completion_ids):
    return [ValueError(f"{len(ids)} tokens") for ids in completion_ids]


def unread(completion_ids):
    return [float("x" * len(ids)) for ids in completion_ids]


def awaitables(completion_ids):
    async def one(ids):
        return float(len(ids))

    return [one(ids) for ids in completion_ids]


@pytest.mark.filterwarnings("error")  # nor does Python warn of what was not awaited
@pytest.mark.parametrize(
    ("function", "reason", "example"),
    [
        (nested, NUMBERS + "a list", "[0.1]"),
        (excepted, "failed with ValueError", "1 tokens"),
        (unread, r"raised ValueError (test_train_rewards.py, line LINE)", "could not convert string to float: 'x'"),
        (
            awaitables,
            "must return numbers, got awaitables; make the function async and return await asyncio.gather(*them)",
            "",
        ),
    ],
)
def test_a_fault_is_one_whatever_the_values_of_its_rows(episode, function, reason, example):
    logs, errors = (RewardLog(), RewardLog()), set()
    for log, lengths in zip(logs, ((1, 2, 3), (4, 5)), strict=True):
        rows = [episode(0, (length,), seed=n) for n, length in enumerate(lengths)]
        errors |= {t.error for t in score_rewards(rows, [NamedReward("f", 1.0, function)], log)}
    (first,), (second,) = (log.faults for log in logs)
    reason = reason.replace("LINE", str(unread.__code__.co_firstlineno + 1))
    assert first == RewardFault("f", reason, ((0, 0), (0, 1), (0, 2)), example)
    assert (second.reason, errors) == (reason, {f"reward 'f' {reason}"})


class Leaving(BaseException):
    """What no `except Exception` sees."""


@pytest.mark.parametrize("timeout", [0.0, 30.0])
@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(3), asyncio.CancelledError("x"), Leaving("x")])
def test_a_row_that_makes_a_function_raise_is_found_by_asking_row_by_row(episode, error, timeout):
    episodes, log, sizes = [episode(0, (n + 1,), seed=n) for n in range(4)], RewardLog(), []

    def picky(completion_ids):
        sizes.append(len(completion_ids))
        if any(len(ids) == 3 for ids in completion_ids):
            raise error
        return [float(len(ids)) for ids in completion_ids]

    scored = score_rewards(episodes, [NamedReward("picky", 1.0, picky, timeout)], log)
    assert sizes == [4, 1, 1, 1, 1]
    assert [t.reward for t in scored if not t.failed] == [1.0, 2.0, 4.0]
    assert (scored[2].error or "").startswith(
        f"reward 'picky' raised {type(error).__name__}: {error} (test_train_rewards.py, "
    )
    assert [fault.rows for fault in log.faults] == [((0, 2),)]
    assert log.failed("picky") == 1


def test_a_failed_row_is_out_of_the_baseline_of_its_group(policy, episode):
    rewards = [NamedReward("f", 1.0, lambda trajectories: [[1.0, 3.0, math.nan][t.sample_index] for t in trajectories])]
    scored = score_rewards([episode(0, (2,), seed=seed) for seed in range(3)], rewards)
    table = [[t.reward_parts.get("f")] for t in scored]
    centred = make_algorithm("grpo", advantage="centred")
    batch = make_batch(policy, scored, centred, rewards=table, reward_weights=[1.0])
    # the mean of 1 and 3 is 2
    assert batch.advantages[:, 0].tolist() == [-1.0, 1.0, 0.0]
    assert (batch.weights[2] == 0).all()


def test_a_function_that_raises_with_many_rows_only_costs_no_row_but_is_told(episode):
    log = RewardLog()

    def small(completions):
        if len(completions) > 1:
            raise MemoryError("too many")
        return [1.0]

    scored = score_rewards([episode(0, (2,), seed=seed) for seed in range(2)], [NamedReward("f", 1.0, small)], log)
    assert [t.reward for t in scored] == [1.0, 1.0]
    (fault,) = log.faults
    assert fault.rows == ()
    assert fault.reason.startswith("raised MemoryError: too many (")
    assert fault.reason.endswith(") with 2 rows at once, and was asked again for each row alone")


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_an_async_function_is_awaited_once_a_batch(episode, timeout):
    calls, together = [], []

    async def scored_by(trajectories):
        calls.append(len(trajectories))
        running = []

        async def one(trajectory):
            running.append(trajectory)
            await asyncio.sleep(0)
            together.append(len(running))
            return float(trajectory.sample_index)

        return await asyncio.gather(*(one(t) for t in trajectories))

    scored = score_rewards([episode(0, (2,), seed=n) for n in range(3)], [NamedReward("f", 1.0, scored_by, timeout)])
    assert [t.reward for t in scored] == [0.0, 1.0, 2.0]
    assert (calls, together) == ([3], [3, 3, 3])


def test_an_async_function_that_raises_fails_its_rows(three):
    async def broken(trajectories):
        raise OSError("no network")

    log = RewardLog()
    score_rewards(three, [NamedReward("f", 1.0, broken)], log)
    (fault,) = log.faults
    assert fault.reason.startswith("raised OSError: no network (test_train_rewards.py, line ")
    assert fault.rows == ((0, 1), (1, 0))


def test_ctrl_c_ends_the_run(three):
    def interrupted(trajectories):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_rewards(three, [NamedReward("f", 1.0, interrupted, timeout=0.0)])


def test_without_a_timeout_a_function_runs_in_the_callers_thread(three):
    threads = []

    def where(trajectories):
        threads.append(threading.current_thread())
        return [1.0 for _ in trajectories]

    for timeout in (0.0, 30.0):
        score_rewards(three, [NamedReward("f", 1.0, where, timeout)])
    assert (threads[0] is threading.main_thread(), threads[1] is threading.main_thread()) == (True, False)


def test_an_option_wins_over_a_column_of_its_name(episode):
    from functools import partial

    def named(completions, *, answer):
        return [float(answer) for _ in completions]

    row = replace(episode(0, (2,)), task=Task("a", {"answer": "1"}))
    (scored,) = score_rewards([row], [NamedReward("f", 1.0, partial(named, answer=7))])
    assert scored.reward == 7.0


def test_true_and_false_count_as_one_and_zero(three):
    scored = score_rewards(three, [NamedReward("f", 1.0, Recorded([True, False]))])
    assert [t.reward for t in scored] == [1.0, None, 0.0]


@pytest.mark.parametrize(
    "values", [(1, 2.5), [np.float32(1), np.float64(2.5)], [mx.array(1), mx.array(2.5)], mx.array([1, 2.5])]
)
def test_numbers_may_be_of_any_kind(three, values):
    scored = score_rewards(three, [NamedReward("f", 1.0, Recorded(values))])
    assert [t.reward for t in scored] == [1.0, None, 2.5]


def test_a_function_may_compute_with_mlx_in_its_thread(three):
    weights = mx.array([1.0, 2.0])
    mx.eval(weights)
    rewards = [NamedReward("f", 1.0, lambda completion_ids: weights * mx.array([len(ids) for ids in completion_ids]))]
    assert [t.reward for t in score_rewards(three, rewards)] == [2.0, None, 6.0]


def test_flags_of_numpy_count_as_one_and_zero(three):
    scored = score_rewards(three, [NamedReward("f", 1.0, Recorded([np.True_, np.False_]))])
    assert [t.reward for t in scored] == [1.0, None, 0.0]


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def test_what_cannot_be_put_into_words_costs_its_row_all_the_same(three):
    def broken(trajectories):
        raise UnspeakableError

    log = RewardLog()
    huge = 10**5000  # Python spells no integer of so many digits
    rewards = [NamedReward("f", 1.0, broken), NamedReward("g", 1.0, Recorded([UnspeakableError(), huge]))]
    score_rewards(three, rewards, log)
    rows = [(fault.reward, fault.rows) for fault in log.faults]
    assert rows == [("f", ((0, 1), (1, 0))), ("g", ((0, 1),)), ("g", ((1, 0),))]
    assert log.faults[2][1:] == (NUMBERS + "one out of range", ((1, 0),), "a int that cannot be shown")
    assert log.faults[1].reason == "failed: a UnspeakableError that cannot be shown"


def test_a_function_takes_by_name_what_it_needs_and_may_return_an_array(episode):
    seen = {}

    def lengths(completion_ids):
        seen["arguments"] = completion_ids
        return np.array([len(ids) for ids in completion_ids], dtype=np.float32)

    episodes = [episode(0, (3,)), episode(0, (5,), seed=1)]
    scored = score_rewards(episodes, [NamedReward("lengths", 1.0, lengths)])
    assert [t.reward for t in scored] == [3.0, 5.0]
    assert seen["arguments"] == [t.completion_ids for t in episodes]
