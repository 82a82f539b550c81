from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.policy import score
from mlxrl.policy.column_major import ColumnMajorEmbedding, ColumnMajorLinear, lay_out_by_columns


def linear_and_twin(**how) -> tuple[nn.Module, nn.Module]:
    """64 values to 48, as MLX has it and laid out by columns."""
    mx.random.seed(0)
    plain = nn.Linear(64, 48, **how)
    twin = nn.Linear(64, 48, **how)
    twin.update(plain.parameters())
    lay_out_by_columns(twin)
    return plain, twin


@pytest.mark.parametrize("shape", [(64,), (5, 64), (3, 1, 64), (3, 5, 64), (2, 3, 5, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_by_columns_and_its_gradients_are_those_of_the_plain_one(shape, bias):
    plain, twin = linear_and_twin(bias=bias)
    x, slope = mx.random.normal(shape), mx.random.normal((*shape[:-1], 48))

    def value_and_gradients(layer):
        def product(x: mx.array, weight: mx.array) -> mx.array:
            layer.weight = weight
            return layer(x)

        return mx.vjp(product, [x, layer.weight], [slope])

    ((expected,), expected_slopes), ((got,), got_slopes) = map(value_and_gradients, (plain, twin))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)  # of sums of 64 float32 products
    for got_slope, expected_slope in zip(got_slopes, expected_slopes, strict=True):
        assert got_slope.shape == expected_slope.shape
        np.testing.assert_allclose(got_slope, expected_slope, rtol=1e-5, atol=1e-5)


def test_an_embedding_by_columns_reads_the_same_rows_and_is_the_same_head():
    mx.random.seed(0)
    plain, twin = nn.Embedding(96, 64), nn.Embedding(96, 64)
    twin.update(plain.parameters())
    lay_out_by_columns(twin)
    x, slope = mx.random.normal((3, 5, 64)), mx.random.normal((3, 5, 96))
    assert mx.array_equal(twin(mx.array([[1, 95]])), plain(mx.array([[1, 95]])))
    (_, (expected,)), (_, (got,)) = (mx.vjp(layer.as_linear, [x], [slope]) for layer in (plain, twin))
    np.testing.assert_allclose(twin.as_linear(x), plain.as_linear(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_loaded_policy_has_the_gradient_of_plain_layers(policy, architecture, tokens, mask):
    loaded, plain = policy(architecture), policy(architecture)
    plain_classes = {ColumnMajorLinear: nn.Linear, ColumnMajorEmbedding: nn.Embedding}
    swapped = [module for module in plain.modules() if type(module) in plain_classes]
    for module in swapped:
        module.__class__ = plain_classes[type(module)]
    assert swapped

    (value, gradient), (expected, expected_gradient) = (
        nn.value_and_grad(model, lambda model=model: score(model, tokens, mask, with_gradient=True).logprobs.sum())()
        for model in (loaded, plain)
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    got_leaves, expected_leaves = (dict[str, Any](tree_flatten(tree)) for tree in (gradient, expected_gradient))
    for name, wanted in expected_leaves.items():
        got = got_leaves[name]
        assert mx.linalg.norm(got - wanted) <= 1e-5 * mx.linalg.norm(wanted), name


def test_a_layer_with_a_product_of_its_own_keeps_it():
    class Own(nn.Linear):
        pass

    own = Own(64, 8, bias=False)
    lay_out_by_columns(nn.Sequential(own))
    assert type(own) is Own
