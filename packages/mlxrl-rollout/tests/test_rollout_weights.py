"""Sampling from a merged copy of the policy: the same rows as from the policy itself, now and after it has moved."""

import gc

import mlx.core as mx
import pytest

from mlxrl.policy import MergedPolicy
from mlxrl.rollout import SamplingConfig, group_requests

from .comparing import assert_same, draw_adapter, engine_of, scorer_distance
from .environments import Chatter

SAMPLING = SamplingConfig(temperature=0.7, max_tokens=6)


def requests():
    turns_and_openings = [(1, "a"), (2, "Hello there, how are you?"), (3, "What?")]
    return group_requests(turns_and_openings, lambda task, *_: Chatter(*task), group_size=3)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe", "gemma3_text", "cohere"])
@pytest.mark.parametrize("width", [2, 64])
def test_the_copy_says_what_the_policy_says(lend, architecture, width):
    policy = lend(architecture)
    shared = engine_of(policy, SAMPLING).rollout(requests())
    merged = engine_of(policy, SAMPLING, width=width, weights="merged").rollout(requests())
    assert_same(merged, shared, 1e-4)
    with pytest.raises(AssertionError):  # other products, so that the last bits tell which of the two has spoken
        assert_same(merged, shared, 0)
    assert scorer_distance(policy[0], merged, 0.7) < 1e-4


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_the_copy_follows_the_policy(make, architecture):
    policy = make(architecture)
    shared, merged = engine_of(policy, SAMPLING), engine_of(policy, SAMPLING, weights="merged")
    rounds = []
    for seed in (1, 2):
        rounds.append(merged.rollout(requests()))
        assert_same(rounds[-1], shared.rollout(requests()), 1e-4)
        draw_adapter(policy[0], seed)
    last = merged.rollout(requests())
    assert_same(last, shared.rollout(requests()), 1e-4)
    said = [[trajectory.completion_ids for trajectory in rollout] for rollout in (*rounds, last)]
    assert said[0] != said[1] != said[2]
    assert scorer_distance(policy[0], rounds[0], 0.7) > 1e-2


def test_an_engine_that_goes_back_to_the_policy_drops_the_copy(make):
    policy = make("qwen3")
    size = MergedPolicy(policy[0]).nbytes
    engine = engine_of(policy, SAMPLING)

    def held():
        trajectories = engine.rollout(requests())
        gc.collect()
        return mx.get_active_memory(), trajectories

    before, expected = held()
    engine.weights = "merged"
    with_copy, _ = held()
    engine.weights = "shared"
    after, trajectories = held()
    assert size <= with_copy - before < 1.2 * size
    assert after == before
    assert_same(trajectories, expected, 0)
