"""Trajectories get their rewards: once, checked, weighted, and nothing for those that failed."""

# pyright: reportArgumentType=false

import math
from dataclasses import replace

import pytest

from mlxrl.algo import make_algorithm
from mlxrl.env import Task
from mlxrl.train import NamedReward, RewardError, make_batch, score_rewards
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
    assert call["prompts"] == ["prompt", "prompt"]
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"reward 'f' must return a list of 2 rewards, got 1\."),
        ([1.0] * 3, r"reward 'f' must return a list of 2 rewards, got 3\."),
        (1.0, r"reward 'f' must return a list of 2 rewards, got float\."),
        (None, r"reward 'f' must return a list of 2 rewards, got NoneType\."),
        ([1.0, math.nan], r"reward 'f' must return numbers between -1e\+09 and 1e\+09 or None, got nan in row 1\."),
        ([math.inf, 0.0], r"reward 'f' must return numbers between -1e\+09 and 1e\+09 or None, got inf in row 0\."),
        ([1.0, "1"], r"reward 'f' must return numbers between -1e\+09 and 1e\+09 or None, got '1' in row 1\."),
        ("11", r"reward 'f' must return numbers between -1e\+09 and 1e\+09 or None, got '1' in row 0\."),
    ],
)
def test_a_function_that_breaks_its_contract_is_named(three, values, message):
    with pytest.raises(RewardError, match=message):
        score_rewards(three, [NamedReward("f", 1.0, Recorded(values))])


def test_a_function_that_raises_is_named_with_what_it_raised(three):
    def broken(**arguments):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"reward 'f' raised KeyError: 'answer'"):
        score_rewards(three, [NamedReward("f", 1.0, broken)])


def test_true_and_false_count_as_one_and_zero(three):
    scored = score_rewards(three, [NamedReward("f", 1.0, Recorded([True, False]))])
    assert [t.reward for t in scored] == [1.0, None, 0.0]


def test_a_function_takes_by_name_what_it_needs_and_may_return_an_array(episode):
    import numpy as np

    seen = {}

    def lengths(completion_ids):
        seen["arguments"] = completion_ids
        return np.array([len(ids) for ids in completion_ids], dtype=np.float32)

    episodes = [episode(0, (3,)), episode(0, (5,), seed=1)]
    scored = score_rewards(episodes, [NamedReward("lengths", 1.0, lengths)])
    assert [t.reward for t in scored] == [3.0, 5.0]
    assert seen["arguments"] == [t.completion_ids for t in episodes]


def test_a_reward_beyond_all_bounds_is_refused_by_name(episode):
    for value in (1e10, -1e300, float("inf"), 10**400):
        with pytest.raises(RewardError, match="reward 'huge' "):
            score_rewards([episode(0, (3,))], [NamedReward("huge", 1.0, lambda completions, value=value: [value])])
