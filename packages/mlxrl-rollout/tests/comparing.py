"""Policies and engines for tests, and trajectories held against one another and against the scorer."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy import score
from mlxrl.rollout import Engine, Role


def draw_adapter(model, seed):
    """Give the model's adapter random values, far from zero."""
    mx.random.seed(seed)
    values: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    drawn = [(name, 0.1 * mx.random.normal(v.shape)) for name, v in values.items() if name.endswith("lora_b")]
    model.update(tree_unflatten(drawn))


def engine_of(policy, sampling, **options):
    """An engine for a model and its tokenizer."""
    model, tokenizer = policy
    return Engine(model, tokenizer, sampling, **options)


def assert_same(some, others, tolerance=1e-4):
    """The same tokens, roles and turns, and log-probabilities within the tolerance: bit for bit where it is 0."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        for name in ("group_id", "sample_index", "stop_reason", "error", "turns"):
            assert getattr(one, name) == getattr(other, name)
        assert len(one.segments) == len(other.segments)
        for left, right in zip(one.segments, other.segments, strict=True):
            for name in ("token_ids", "roles", "turns"):
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
            np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, atol=tolerance, rtol=0)


def scorer_distance(model, trajectories, temperature):
    """The largest |sampler log-probability - scorer log-probability| over all sampled tokens, padded to one batch."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    shape = (len(segments), max(len(segment.token_ids) for segment in segments))
    tokens, mask, sampled = np.zeros(shape, dtype=int), np.zeros(shape, dtype=bool), np.zeros(shape)
    for row, segment in enumerate(segments):
        length = len(segment.token_ids)
        tokens[row, :length], mask[row, :length] = segment.token_ids, segment.roles == Role.ACTION
        sampled[row, :length] = segment.sampler_logprobs
    assert not sampled[~mask].any()
    return np.abs(np.array(score(model, tokens, mask, temperature=temperature).logprobs) - sampled).max()
