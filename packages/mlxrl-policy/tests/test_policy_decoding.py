import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from mlxrl.policy import LoRAConfig, adapters_disabled, decoding, load_policy_with_lora
from mlxrl.policy.decoding import DecodingLoRALinear, add_low_rank
from mlxrl.policy.testing import make_tiny_model


@pytest.fixture
def gpu():
    if not mx.cuda.is_available():
        pytest.skip("CUDA is not available")
    mx.set_default_device(mx.gpu)  # the fixture of all tests puts back what was there


def classes(model):
    return [type(module) for module in model.modules()]


def test_the_model_is_as_it_was_after_the_context_and_after_an_error_in_it(tmp_path):
    model, _, _ = load_policy_with_lora(make_tiny_model(tmp_path), LoRAConfig(rank=2))
    before = classes(model)
    assert LoRALinear in before
    with decoding(model):
        assert DecodingLoRALinear in classes(model)
        assert LoRALinear not in classes(model)
    assert classes(model) == before
    with pytest.raises(KeyError), decoding(model):
        raise KeyError
    assert classes(model) == before


def test_a_token_rounds_alike_alone_and_among_others():
    mx.random.seed(0)
    layer = LoRALinear.from_base(nn.Linear(64, 48), r=2, scale=3.0)
    layer.lora_b = mx.random.normal(layer.lora_b.shape)
    x = mx.random.normal((2, 5, 64))
    plain = layer(x)
    layer.__class__ = DecodingLoRALinear
    together = layer(x)
    np.testing.assert_allclose(together, plain, rtol=1e-5, atol=1e-5)
    for i in range(5):
        assert mx.array_equal(layer(x[:, i : i + 1]), together[:, i : i + 1])


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("scale", [1.5, -2.5])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(("rank", "width", "outputs"), [(1, 64, 32), (8, 1024, 3072), (16, 96, 1025), (64, 3072, 1024)])
def test_one_kernel_adds_what_two_products_add(scale, dtype, rank, width, outputs):
    mx.random.seed(rank)
    x = mx.random.normal((5, 1, width)).astype(dtype)
    y = mx.random.normal((5, 1, outputs)).astype(dtype)
    a = mx.random.normal((width, rank)) * width**-0.5
    b = mx.random.normal((rank, outputs))
    term = ((x.astype(mx.float32) @ a) @ b * scale).astype(dtype)
    result = add_low_rank(x, y, a, b, scale)
    assert result.dtype == dtype
    assert result.shape == y.shape
    error = mx.abs(result.astype(mx.float32) - (y + term).astype(mx.float32)).max()
    size = mx.abs((y + term).astype(mx.float32)).max()
    assert error <= size * {mx.bfloat16: 2**-7, mx.float16: 2**-10, mx.float32: 5e-3}[dtype]  # TF32 in the products
    assert mx.abs(term).max() > 0.5 * mx.abs(y).max()  # the term is no smaller than what would hide it


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_decode_step_gives_the_same_logits_within_rounding(tmp_path, dtype):
    model, _, _ = load_policy_with_lora(make_tiny_model(tmp_path), LoRAConfig(rank=4, scale=3.0))
    model.set_dtype(dtype)
    names = [name for name, _ in tree_flatten(model.parameters())]
    mx.random.seed(0)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.lora_a = module.lora_a.astype(mx.float32)
            module.lora_b = 0.3 * mx.random.normal(module.lora_b.shape)
    tokens = mx.array([[1], [2], [3]])
    plain = model(tokens).astype(mx.float32)
    with adapters_disabled(model):
        base = model(tokens).astype(mx.float32)
    with decoding(model):
        fused = model(tokens).astype(mx.float32)
        assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert mx.abs(plain - base).max() > 0.3 * mx.abs(base).max()  # the adapter matters
    assert mx.abs(fused - plain).max() < {mx.float32: 1e-5, mx.bfloat16: 5e-2}[dtype] * mx.abs(plain).max()


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
def test_on_cuda_a_decode_step_gives_the_same_logits_within_rounding(tmp_path):
    test_a_decode_step_gives_the_same_logits_within_rounding(tmp_path, mx.bfloat16)


def test_each_context_sees_the_adapter_as_it_is_then(tmp_path):
    model, _, _ = load_policy_with_lora(make_tiny_model(tmp_path), LoRAConfig(rank=4))
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    tokens = mx.array([[1]])
    with decoding(model):
        before = model(tokens)
    layer.lora_b = mx.ones(layer.lora_b.shape)
    with decoding(model):
        after = model(tokens)
    assert not mx.allclose(before, after)
    assert mx.allclose(after, model(tokens), atol=1e-4)
