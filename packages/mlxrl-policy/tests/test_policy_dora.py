from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear

from mlxrl.policy import decoding, flatten_quantized_rows, rows, score
from mlxrl.policy.dora import LeanDoRALinear, keep_bases_packed
from mlxrl.policy.lora import adapters_of

# Of the norm of mlx-lm's own slopes; in 16 bits its products and ours are rounded at other places.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 2**-8, mx.bfloat16: 2**-5}


def layers(bits: int, bias: bool, dtype: mx.Dtype) -> tuple[Any, Any]:
    """mlx-lm's layer and the lean one, of the same weights, factors and magnitudes."""
    mx.random.seed(0)
    linear: Any = nn.Linear(128, 96, bias=bias)
    linear.set_dtype(dtype)
    if bits:
        linear = nn.QuantizedLinear.from_linear(linear, 64, bits)
    plain, lean = (DoRALinear.from_base(linear, r=4, scale=2.0) for _ in range(2))
    keep_bases_packed(nn.Sequential(lean))
    assert type(lean) is LeanDoRALinear
    a, b, m = plain.lora_a, 0.1 * mx.random.normal((4, 96)), plain.m * mx.random.uniform(0.5, 2, (96,))
    for layer in (plain, lean):
        layer.lora_a, layer.lora_b, layer.m = a, b, m
    return plain, lean


def slopes(layer: Any, x: mx.array) -> dict[str, mx.array]:
    """The layer's output, and the slopes of a loss of it."""
    weights = mx.sin(mx.arange(x.size // 128 * 96)).reshape(*x.shape[:-1], 96)

    def loss(x: mx.array, leaves: dict[str, mx.array]) -> mx.array:
        layer.update(leaves)
        return (layer(x).astype(mx.float32) * weights).sum()

    leaves = {name: layer[name] for name in ("lora_a", "lora_b", "m")}
    slope_x, of_leaves = mx.grad(loss, argnums=(0, 1))(x, leaves)
    layer.update(leaves)
    return {"y": layer(x), "x": slope_x, **of_leaves}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("bits", "dtype"), [(0, mx.float32), (0, mx.float16), (0, mx.bfloat16), (4, mx.float32), (8, mx.float32)]
)
def test_output_and_slopes_are_those_of_mlx_lm(bits, dtype, bias):
    plain, lean = layers(bits, bias, dtype)
    x = mx.random.normal((2, 5, 128)).astype(dtype)
    expected, got = slopes(plain, x), slopes(lean, x)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        value, own = value.astype(mx.float32), got[name].astype(mx.float32)
        assert mx.linalg.norm(own - value) <= TOLERANCES[dtype] * mx.linalg.norm(value), name


@pytest.mark.parametrize("bits", [0, 4])
def test_a_policy_scores_and_learns_as_with_the_layers_of_mlx_lm(policy, tokens, mask, bits):
    model = policy("qwen3", bits=bits, use_dora=True)

    def gradient() -> tuple[mx.array, dict[str, Any]]:
        total = nn.value_and_grad(model, lambda: score(model, tokens, mask, with_gradient=True).logprobs.sum())
        value, slopes = total()
        return value, dict(tree_flatten(slopes))

    value, got = gradient()
    adapters: list[Any] = [module for _, module in adapters_of(model)]
    assert {type(module) for module in adapters} == {LeanDoRALinear}
    for module in adapters:
        module.__class__ = DoRALinear
    expected_value, expected = gradient()
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert got.keys() == expected.keys()
    for name, slope in expected.items():
        assert mx.linalg.norm(got[name] - slope) <= 1e-4 * mx.linalg.norm(slope), name


@pytest.mark.parametrize("bits", [0, 4])
def test_a_layer_adds_no_dense_weight_to_what_a_gradient_takes(bits):
    width, x = 512, mx.ones((4, 512))
    dense = 4 * width * width

    def taken(num_layers: int) -> int:
        linears: list[Any] = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
        if bits:
            linears = [nn.QuantizedLinear.from_linear(linear, 64, bits) for linear in linears]
        model = nn.Sequential(*(DoRALinear.from_base(linear, r=2) for linear in linears))
        keep_bases_packed(model)
        model.freeze()
        for layer in model.layers:
            layer.unfreeze(keys=["lora_a", "lora_b", "m"], recurse=False)
        mx.eval(model.parameters())
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(nn.value_and_grad(model, lambda: model(x).sum())())
        return mx.get_peak_memory() - before

    assert taken(6) - taken(2) < dense  # of four layers together


def test_a_token_rounds_alike_alone_and_among_others_while_tokens_are_drawn():
    _, lean = layers(4, True, mx.float32)
    model = nn.Sequential(lean)
    x = mx.random.normal((2, 5, 128))
    plain = model(x)
    with decoding(model):
        together = model(x)
        np.testing.assert_allclose(together, plain, rtol=1e-5, atol=1e-5)
        for i in range(5):
            assert mx.array_equal(model(x[:, i : i + 1]), together[:, i : i + 1])
    assert mx.array_equal(model(x), plain)


def test_another_adapter_is_seen_by_the_next_context():
    _, lean = layers(0, False, mx.float32)
    model, x = nn.Sequential(lean), mx.random.normal((1, 1, 128))
    for factor in (1.0, -2.0):
        lean.lora_b, lean.m = factor * lean.lora_b, 2 * lean.m
        with decoding(model):
            drawn = model(x)
        np.testing.assert_allclose(drawn, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_that_its_adapter_cancels_is_finite(dtype):
    _, lean = layers(0, False, dtype)
    lean.linear.weight = (-0.9999 * lean.scale * (lean.lora_a @ lean.lora_b).T).astype(dtype)
    object.__setattr__(lean, "_base_norms", mx.linalg.norm(lean.linear.weight.astype(mx.float32), axis=1))
    assert mx.isfinite(lean(mx.random.normal((2, 5, 128)).astype(dtype))).all()


def test_a_pass_dequantizes_a_base_once_where_it_does_at_all(monkeypatch):
    _, lean = layers(4, False, mx.float32)
    flatten_quantized_rows(lean)
    monkeypatch.setattr(rows, "on_cuda", lambda: True)
    dequantize, calls = rows._dequantized, []
    monkeypatch.setattr(rows, "_dequantized", lambda *given: calls.append(given) or dequantize(*given))
    lean(mx.random.normal((2, 5, 128)))
    assert len(calls) == 1
