import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrl.policy import LoRAConfig, MergedPolicy, decoding, few_rows, load_policy_with_lora
from mlxrl.policy.few_rows import FewRowsLinear, can_multiply, few_rows_product, has_few_rows_kernel
from mlxrl.policy.testing import make_tiny_model


@pytest.fixture
def gpu():
    if not mx.cuda.is_available():
        pytest.skip("CUDA is not available")
    mx.set_default_device(mx.gpu)  # the fixture of all tests puts back what was there


@pytest.mark.parametrize(
    ("x", "x_type", "weight_type", "can"),
    [
        ((2, 1, 64), mx.float16, mx.float16, True),
        ((64, 1, 64), mx.bfloat16, mx.bfloat16, True),
        ((1, 1, 64), mx.float16, mx.float16, False),
        ((65, 1, 64), mx.float16, mx.float16, False),
        ((2, 2, 64), mx.float16, mx.float16, False),
        ((2, 64), mx.float16, mx.float16, False),
        ((2, 1, 1, 64), mx.float16, mx.float16, False),
        ((2, 1, 48), mx.float16, mx.float16, False),
        ((2, 1, 64), mx.float32, mx.float16, False),
        ((2, 1, 64), mx.float16, mx.bfloat16, False),
        ((2, 1, 64), mx.float32, mx.float32, False),
    ],
)
def test_the_kernel_is_for_decode_steps_of_a_few_rows_in_16_bits(x, x_type, weight_type, can):
    assert can_multiply(mx.zeros(x, dtype=x_type), mx.zeros((8, x[-1]), dtype=weight_type)) is can


@pytest.mark.parametrize(("rows", "outputs", "can"), [(16, 2**20, True), (17, 2**20, False), (17, 2**19, True)])
def test_a_large_weight_is_for_the_kernel_of_few_rows_only(rows, outputs, can):
    weight = mx.zeros((outputs, 32), dtype=mx.float16)  # never evaluated
    assert can_multiply(mx.zeros((rows, 1, 32), dtype=mx.float16), weight) is can


@pytest.mark.parametrize("shape", [(3, 1, 64), (3, 5, 64), (3, 64)])
def test_what_the_kernel_cannot_multiply_is_multiplied_as_ever(shape):
    mx.random.seed(0)
    layer, x = nn.Linear(64, 8), mx.random.normal(shape)
    expected = layer(x)
    layer.__class__ = FewRowsLinear
    assert mx.array_equal(layer(x), expected)


@pytest.mark.parametrize(("major", "has"), [(7, False), (8, True), (9, True)])
def test_the_kernel_needs_tensor_cores_for_bfloat16(monkeypatch, major, has):
    monkeypatch.setattr(few_rows, "on_cuda", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": major})
    assert has_few_rows_kernel() is has


def test_elsewhere_dense_layers_stay_what_they_are():
    model = nn.Sequential(nn.Linear(64, 8))
    assert mx.default_device() == mx.cpu
    with decoding(model):
        assert type(model.layers[0]) is nn.Linear


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
class TestOnCuda:
    @pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
    @pytest.mark.parametrize(("outputs", "width"), [(1024, 3072), (3072, 1024), (1, 32), (33, 96), (1000, 2560)])
    def test_the_product_is_summed_in_float32_and_rounded_once(self, outputs, width, dtype):
        mx.random.seed(outputs)
        weight = mx.random.normal((outputs, width)).astype(dtype)
        for rows in (2, 8, 9, 16, 17, 32, 33, 63, 64):
            x = mx.random.normal((rows, 1, width)).astype(dtype)
            y = few_rows_product(x, weight)
            assert y.dtype == dtype
            assert y.shape == (rows, 1, outputs)
            exact = np.array(x.astype(mx.float32), dtype=float) @ np.array(weight.astype(mx.float32), dtype=float).T
            half_step = {mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
            np.testing.assert_allclose(y.astype(mx.float32), exact, rtol=1.01 * half_step, atol=1e-6 * width)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        mx.random.seed(0)
        x = mx.random.normal((64, 1, 1024)).astype(mx.bfloat16)
        weight = mx.random.normal((512, 1024)).astype(mx.bfloat16)
        together = few_rows_product(x, weight)
        for rows in ([0, 1], [5, 40, 63], list(range(20, 53))):
            assert mx.array_equal(few_rows_product(x[mx.array(rows)], weight), together[mx.array(rows)])

    def test_a_bias_is_added(self):
        layer, x = nn.Linear(64, 8), mx.ones((3, 1, 64), dtype=mx.float16)
        layer.set_dtype(mx.float16)
        expected = layer(x)
        layer.__class__ = FewRowsLinear
        np.testing.assert_allclose(layer(x), expected, rtol=2e-3, atol=2e-3)
        assert mx.abs(layer(x) - few_rows_product(x, layer.weight)).max() > 0

    def test_a_decode_step_of_a_merged_copy_gives_the_same_logits_within_rounding(self, tmp_path):
        model, _, _ = load_policy_with_lora(make_tiny_model(tmp_path), LoRAConfig(rank=4))
        model.set_dtype(mx.bfloat16)
        merged = MergedPolicy(model).model
        tokens = mx.array([[1], [2], [3]])
        plain = merged(tokens).astype(mx.float32)
        with decoding(merged):
            assert has_few_rows_kernel()
            assert any(type(module) is FewRowsLinear for module in merged.modules())
            fused = merged(tokens).astype(mx.float32)
        assert mx.abs(fused - plain).max() < 1e-2 * mx.abs(plain).max()
