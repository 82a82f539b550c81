from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from mlxrl.policy import flatten_quantized_rows, load_policy_with_lora, score
from mlxrl.policy.rows import FlatQuantizedEmbedding, FlatQuantizedLinear, dequantized_product


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


def quantized_linear(**how):
    """64 values to 48, with a bias."""
    mx.random.seed(0)
    linear = nn.Linear(64, 48)
    return nn.QuantizedLinear.from_linear(linear, **how)


MODES = [{"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 8}, {"mode": "mxfp4"}]
SHAPES = [(64,), (5, 64), (3, 1, 64), (3, 5, 64), (2, 3, 5, 64)]


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_flat_product_and_its_gradient_are_those_of_the_plain_one(shape, how):
    plain, flat = quantized_linear(**how), quantized_linear(**how)
    flatten_quantized_rows(flat)
    x, slope = mx.random.normal(shape), mx.random.normal((*shape[:-1], 48))
    (expected,), (expected_slope,) = mx.vjp(plain, [x], [slope])
    (got,), (got_slope,) = mx.vjp(flat, [x], [slope])
    assert got.shape == slope.shape
    assert mx.array_equal(got, expected)
    assert mx.array_equal(got_slope, expected_slope)


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantized_product_and_its_gradient_are_those_of_the_quantized_one(shape, how):
    layer = quantized_linear(**how)
    x, slope = mx.random.normal(shape), mx.random.normal((*shape[:-1], 48))
    (expected,), (expected_slope,) = mx.vjp(layer, [x], [slope])
    (got,), (got_slope,) = mx.vjp(lambda x: dequantized_product(layer, x) + layer.bias, [x], [slope])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_slope, expected_slope, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not mx.cuda.is_available(), reason="CUDA is not available")
@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("rows", [(4, 40), (1, 7), (300,)])
def test_on_cuda_texts_have_the_product_of_tokens_one_by_one(rows, how):
    mx.set_default_device(mx.gpu)  # the fixture of all tests puts back what was there
    layer = quantized_linear(**how)
    flatten_quantized_rows(layer)
    x = mx.random.normal((*rows, 64)).astype(mx.bfloat16)
    one_by_one = layer(x.reshape(-1, 1, 64)).reshape(*rows, 48)
    difference = mx.abs((layer(x) - one_by_one).astype(mx.float32)).max()
    assert difference <= 2**-6 * mx.abs(one_by_one.astype(mx.float32)).max()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tied_embedding_is_flat_as_a_head_and_as_ever_as_an_embedding(shape):
    plain = nn.QuantizedEmbedding.from_embedding(nn.Embedding(96, 64), group_size=32, bits=4)
    flat = nn.QuantizedEmbedding(96, 64, group_size=32, bits=4)
    flat.update(plain.parameters())
    flatten_quantized_rows(flat)
    x = mx.random.normal(shape)
    assert mx.array_equal(flat.as_linear(x), plain.as_linear(x))
    assert mx.array_equal(flat(mx.array([[1, 95]])), plain(mx.array([[1, 95]])))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_flat_policy_has_the_logits_and_gradients_of_the_plain_one(policy, architecture, tokens, mask, bits):
    plain, flat = policy(architecture, bits=bits), policy(architecture, bits=bits)
    flatten_quantized_rows(flat)
    for ids in (tokens, tokens[:, :1], tokens[:1, :1]):
        assert mx.array_equal(flat(mx.array(ids)), plain(mx.array(ids)))
    one, other = (
        nn.value_and_grad(model, lambda model=model: score(model, tokens, mask).logprobs.sum())()
        for model in (flat, plain)
    )
    assert one[0].item() == other[0].item()
    assert all(mx.array_equal(leaves(one[1])[name], value) for name, value in leaves(other[1]).items())


def quantized_modules(model):
    return [module for module in model.modules() if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))]


def test_every_quantized_layer_is_flat_and_stays_what_it_was(policy, tokens):
    model, other = policy("llama", bits=4), policy("llama", bits=4)
    before = [type(module) for module in other.modules()]
    names = leaves(model.parameters()).keys()
    flatten_quantized_rows(model)
    flatten_quantized_rows(model)  # asking twice is asking once
    # 7 linear layers, wrapped in adapters, in each of 2 blocks; the embedding and the head
    assert len(quantized_modules(model)) == 2 * 7 + 2
    assert {type(module) for module in quantized_modules(model)} == {FlatQuantizedLinear, FlatQuantizedEmbedding}
    assert [type(module) for module in other.modules()] == before  # the class itself is not touched
    assert leaves(model.parameters()).keys() == names
    model.load_weights(list(leaves(other.parameters()).items()))  # strict: the same names and shapes
    assert mx.array_equal(model(mx.array(tokens)), other(mx.array(tokens)))


def test_a_layer_with_a_product_of_its_own_keeps_it():
    class Own(nn.QuantizedLinear):
        pass

    own = Own.from_linear(nn.Linear(64, 8), group_size=32)
    flatten_quantized_rows(nn.Sequential(own))
    assert type(own) is Own


def test_a_flat_layer_is_quantized_and_fused_like_any_other():
    plain, flat = quantized_linear(group_size=32, bits=4), quantized_linear(group_size=32, bits=4)
    flatten_quantized_rows(flat)
    fused = []
    for layer in (flat, plain):
        mx.random.seed(1)
        layer: Any
        adapter = LoRALinear.from_base(layer, r=2)
        adapter.lora_b = mx.ones_like(adapter.lora_b)
        fused.append(adapter.fuse())
    assert type(fused[0]) is nn.QuantizedLinear
    for name, value in fused[1].parameters().items():
        assert mx.array_equal(fused[0][name], value)
    again = FlatQuantizedLinear.from_linear(nn.Linear(64, 8), group_size=32)
    assert again(mx.zeros((2, 3, 64))).shape == (2, 3, 8)


def test_a_loaded_policy_is_flat_where_cuda_is(folders, tokens):
    model, _, _ = load_policy_with_lora(folders("qwen3", bits=4))
    flat = [isinstance(m, (FlatQuantizedLinear, FlatQuantizedEmbedding)) for m in quantized_modules(model)]
    assert len(flat) == 2 * 7 + 1
    assert set(flat) == {mx.cuda.is_available()}
    assert np.isfinite(model(mx.array(tokens))).all()
