"""Arguments of the optimizer step: what they mean at their ends, and what is refused."""

import math
from dataclasses import replace

import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.algo import make_algorithm
from mlxrl.policy import adapters_disabled
from mlxrl.train import make_batch, optimizer_step


def adapter(model):
    return {name: np.array(value) for name, value in tree_flatten(model.trainable_parameters())}


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def batch_of(model, episodes, algorithm):
    return make_batch(model, episodes, algorithm, rewards=[[e.reward] for e in episodes], reward_weights=[1.0])


@pytest.fixture
def four(episode):
    return [episode(0, (4, 3), reward=float(seed), seed=seed) for seed in range(4)]


def test_a_limit_of_0_does_not_clip(load, four):
    algorithm, moved = make_algorithm("grpo"), []
    for limit in (None, 0.0):
        model = load()
        batch = batch_of(model, four, algorithm)
        optimizer_step(model=model, optimizer=optim.SGD(1.0), batch=batch, algorithm=algorithm, max_grad_norm=limit)
        moved.append(adapter(model))
    assert same(*moved)
    assert not same(moved[0], adapter(load()))


def test_a_finite_gradient_whose_norm_float32_cannot_hold_is_clipped_and_told(load, four):
    algorithm, moved, norms = make_algorithm("grpo"), [], []
    for factor in (1.0, 1e22):
        model = load()
        batch = batch_of(model, four, algorithm)
        huge = replace(batch, advantages=factor * batch.advantages)
        options = {"model": model, "batch": huge, "algorithm": algorithm}
        if factor > 1:  # an optimizer would square what is not clipped
            before = adapter(model)
            unclipped = optimizer_step(optimizer=optim.Adam(0.1), **options)
            assert (unclipped["skipped"], unclipped["nonfinite"], unclipped["grad_norm"]) == (1, 1, math.inf)
            assert same(adapter(model), before)
        metrics = optimizer_step(optimizer=optim.SGD(1.0), max_grad_norm=1e-3, **options)
        assert (metrics["skipped"], metrics["nonfinite"]) == (0, 0)
        norms.append(metrics["grad_norm"])
        moved.append(adapter(model))
    assert norms[1] == pytest.approx(1e22 * norms[0], rel=1e-4)
    for name, value in moved[0].items():
        np.testing.assert_allclose(moved[1][name], value, atol=1e-6)


REFUSED = [
    ({"max_grad_norm": math.nan}, "max_grad_norm must be a number of at least 0, got nan"),
    ({"max_grad_norm": -1.0}, r"max_grad_norm must be a number of at least 0, got -1\.0"),
    ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1, or None for no limit, got 0"),
    ({"micro_batch_size": -3}, "micro_batch_size must be .* got -3"),
    ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, or None for no limit, got 0"),
    ({"max_tokens": 1.5}, r"max_tokens must be .* got 1\.5"),
    ({"beta": math.nan}, "beta must be a finite number of at least 0, got nan"),
    ({"beta": math.inf}, "beta must be a finite number of at least 0, got inf"),
    ({"echo_alpha": -0.1}, r"echo_alpha must be a finite number of at least 0, got -0\.1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_an_argument_out_of_range_is_refused_by_name_and_leaves_the_policy(load, four, options, message):
    model, algorithm = load(), make_algorithm("grpo")
    batch, before = batch_of(model, four, algorithm), adapter(model)
    with pytest.raises(ValueError, match=message):
        optimizer_step(model=model, optimizer=optim.SGD(1.0), batch=batch, algorithm=algorithm, **options)
    assert same(adapter(model), before)


def test_a_policy_without_its_adapters_has_nothing_to_train(load, four):
    model, algorithm = load(), make_algorithm("grpo")
    batch = batch_of(model, four, algorithm)
    step = {"model": model, "optimizer": optim.SGD(1.0), "batch": batch, "algorithm": algorithm}
    with adapters_disabled(model), pytest.raises(ValueError, match=r"nothing to train; .* adapters_disabled"):
        optimizer_step(**step)
