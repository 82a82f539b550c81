from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from mlxrl.policy import score
from mlxrl.policy.adapter_gradients import LeanLoRALinear, lean_adapters, low_rank_term


def chain(num_layers: int, width: int, dtype: mx.Dtype) -> nn.Module:
    """Adapted layers one after the other, with factors in float32 that are trained."""
    mx.random.seed(0)
    layers = []
    for _ in range(num_layers):
        linear = nn.Linear(width, width, bias=False)
        linear.set_dtype(dtype)
        linear.freeze()
        adapter = LoRALinear.from_base(linear, r=4, scale=2.0)
        adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
        layers.append(adapter)
    model = nn.Sequential(*layers)
    model.eval()
    return model


def slopes(model: nn.Module, x: mx.array, *, lean: bool):
    def loss(model: nn.Module) -> mx.array:
        y = model(x).astype(mx.float32)
        return (y * y).mean()

    if not lean:
        return nn.value_and_grad(model, loss)(model)
    with lean_adapters(model):
        return nn.value_and_grad(model, loss)(model)


DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of the norm of what autodiff makes of mixed types; beside bfloat16 products are rounded to its 8 bits.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 2**-9, mx.bfloat16: 2**-6}


def distance(got: mx.array, expected: mx.array) -> float:
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.linalg.norm(got - expected) / mx.linalg.norm(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)])
def test_value_and_slopes_of_the_term_are_those_of_autodiff(shape, dtype):
    mx.random.seed(1)
    x = mx.random.normal(shape).astype(dtype)
    a, b = mx.random.normal((7, 3)), mx.random.normal((3, 6))
    slope = mx.random.normal((*shape[:-1], 6)).astype(dtype)

    def plain(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return (1.5 * ((x @ a) @ b)).astype(x.dtype)

    (expected,), expected_slopes = mx.vjp(plain, [x, a, b], [slope])
    (got,), got_slopes = mx.vjp(lambda x, a, b: low_rank_term(x, a, b, 1.5), [x, a, b], [slope])
    for one, other in zip([got, *got_slopes], [expected, *expected_slopes], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert distance(one, other) <= TOLERANCES[dtype]


def test_small_slopes_beside_float16_leave_a_gradient():
    x, a, b = mx.ones((4, 8), mx.float16), mx.ones((8, 2)), mx.full((2, 6), 1e-3)
    slope = mx.full((4, 6), 2e-7, mx.float16)  # times b it is less than float16 can hold
    _, (_, slope_a, _) = mx.vjp(lambda x, a, b: low_rank_term(x, a, b, 1.0), [x, a, b], [slope])
    assert distance(slope_a, mx.full((8, 2), 4 * 6 * slope[0, 0].item() * 1e-3)) < 1e-3


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_layers_that_keep_less_have_the_same_gradient(dtype):
    peaks, results = {False: [], True: []}, []
    for num_layers in (12, 48):
        model, x = chain(num_layers, 128, dtype), mx.random.normal((1024, 128), key=mx.random.key(2)).astype(dtype)
        mx.eval(model.parameters(), x)
        for lean in (False, True):
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            results.append(slopes(model, x, lean=lean))
            mx.eval(results[-1])
            peaks[lean].append(mx.get_peak_memory() - before)
    plain, lean = ((more - less) / 36 for less, more in (peaks[False], peaks[True]))  # a layer
    assert lean < 1.1 * x.nbytes  # its input
    assert lean < {mx.float32: 1.05, mx.bfloat16: 0.6}[dtype] * plain
    (value, gradient), (lean_value, lean_gradient) = results[:2]
    assert lean_value.item() == pytest.approx(value.item(), rel=TOLERANCES[dtype])
    expected, got = dict(tree_flatten(gradient)), dict(tree_flatten(lean_gradient))
    assert expected.keys() == got.keys()
    assert len(expected) == 2 * 12
    for name, wanted in expected.items():
        assert distance(got[name], wanted) <= TOLERANCES[dtype], name


def test_factors_are_made_once_and_again_when_they_change():
    model, x = chain(1, 8, mx.bfloat16), mx.random.normal((4, 8)).astype(mx.bfloat16)
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    with lean_adapters(model):
        model(x)
        made = layer._made
        model(x)
        assert layer._made is made
        layer.lora_b = 2 * layer.lora_b
        model(x)
        layer.scale = 3.0
        got, wide = model(x), layer(x.astype(mx.float32))
    assert not hasattr(layer, "_made")
    assert distance(got, model(x)) < 2**-7
    assert distance(wide, layer(x.astype(mx.float32))) < 1e-6


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_factors_of_16_bits_beside_a_wider_base_are_multiplied_in_float32(dtype):
    x, a, b = 1e5 * mx.ones((2, 4)), mx.full((4, 2), 0.5, dtype), mx.full((2, 3), 0.25, dtype)
    (got,), (_, slope_a, _) = mx.vjp(lambda x, a, b: low_rank_term(x, a, b, 1.5), [x, a, b], [mx.ones((2, 3))])
    np.testing.assert_allclose(
        got, np.full((2, 3), 1e5 * 4 * 0.5 * 2 * 0.25 * 1.5), rtol=1e-6
    )  # more than float16 holds
    assert slope_a.dtype == dtype


def set_base_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear | nn.RMSNorm):
            module.set_dtype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_scores_have_the_gradient_of_plain_layers(policy, tokens, mask, checkpointed, dtype, monkeypatch):
    model = policy("qwen3", grad_checkpoint=checkpointed)
    set_base_dtype(model, dtype)
    called = []
    lean_call = LeanLoRALinear.__call__

    def call(self, x: mx.array) -> mx.array:
        called.append(x.dtype)
        return lean_call(self, x)

    def gradient() -> mx.array:
        loss = lambda: score(model, tokens, mask, with_gradient=True).logprobs.sum()  # noqa: E731
        slopes: Any = tree_flatten(nn.value_and_grad(model, loss)()[1])
        return mx.concatenate([slope.flatten() for _, slope in slopes])

    monkeypatch.setattr(LeanLoRALinear, "__call__", call)
    lean = gradient()
    assert set(called) == {dtype}
    monkeypatch.setattr(LeanLoRALinear, "__call__", LoRALinear.__call__)
    plain = gradient()
    set_base_dtype(model, mx.float32)
    exact = gradient()
    if dtype == mx.float32:
        assert distance(lean, exact) <= 1e-5
    assert distance(lean, exact) <= 1.25 * distance(plain, exact) + 1e-5  # no further from the truth
    classes = {type(module) for module in model.modules()}
    assert LoRALinear in classes
    assert LeanLoRALinear not in classes
