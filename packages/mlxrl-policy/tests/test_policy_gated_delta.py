from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.gated_delta as theirs
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.policy import checkpoint_blocks, score
from mlxrl.policy.gated_delta import differentiable_gated_delta


def leaves(tree):
    return [np.array(leaf) for _, leaf in tree_flatten(tree)]


def draws(vector_gate, masked):
    keys = iter(mx.random.split(mx.random.key(0), 7))
    rows, length, heads, size = 2, 9, 2, 8
    shape = (rows, length, heads, size)
    q, k, v = (mx.random.normal(shape, key=next(keys)) * size**-0.5 for _ in range(3))
    gate = mx.random.uniform(0.5, 1, shape if vector_gate else shape[:3], key=next(keys))
    beta = mx.random.uniform(0, 1, shape[:3], key=next(keys))
    state = mx.random.normal((rows, heads, size, size), key=next(keys))
    return (q, k, v, gate, beta, state), mx.arange(length) < mx.array([[9], [6]]) if masked else None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector_gate", [False, True])
def test_values_and_gradients_are_those_of_steps_one_by_one(vector_gate, masked):
    inputs, mask = draws(vector_gate, masked)

    def loss(*inputs):
        outputs, state = theirs.gated_delta_ops(*inputs, mask=mask)
        return (mx.sin(3 * outputs).sum() + mx.cos(3 * state).sum()), outputs, state

    run: Any = mx.value_and_grad(loss, argnums=list(range(6)))
    expected = run(*inputs)
    with differentiable_gated_delta():
        got = run(*inputs)
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_mlx_lm_has_its_own_functions_back_also_after_an_exception():
    steps, kernel = theirs.gated_delta_ops, theirs.gated_delta_kernel

    def run():
        with differentiable_gated_delta():
            assert theirs.gated_delta_ops is theirs.gated_delta_kernel is not steps
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        run()
    assert (theirs.gated_delta_ops, theirs.gated_delta_kernel) == (steps, kernel)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_layer_is_read_step_by_step_under_a_gradient(policy, tokens, mask, monkeypatch, recompute):
    model = policy("qwen3_5")
    checkpoint_blocks(model, enabled=recompute)
    gradient = nn.value_and_grad(model, lambda: score(model, tokens, mask).logprobs.sum())
    expected = gradient()
    read = []
    steps = theirs._gated_delta_step_ops  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(theirs, "_gated_delta_step_ops", lambda *args: read.append(1) or steps(*args))
    got = gradient()
    assert not read
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    checkpoint_blocks(model, enabled=False)
    model(mx.array(tokens))
    assert read  # outside of a score mlx-lm does as it always did
