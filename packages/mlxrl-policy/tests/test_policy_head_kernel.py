import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.policy import rows, score
from mlxrl.policy.head_kernel import judged_by_kernel
from mlxrl.policy.head_rows import chunks_with_slopes, judged, recomputed_chunks
from mlxrl.policy.rows import dequantized_once, dequantized_product


@pytest.fixture
def gpu():
    if not mx.cuda.is_available():
        pytest.skip("CUDA is not available")
    mx.set_default_device(mx.gpu)  # the fixture of all tests puts back what was there


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
class TestJudgedByKernel:
    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
    @pytest.mark.parametrize("vocabulary", [2, 33, 1024, 5000])
    def test_it_says_what_judged_says(self, vocabulary, dtype):
        mx.random.seed(vocabulary)
        logits = (4 * mx.random.normal((7, vocabulary))).astype(dtype)
        targets = mx.random.randint(0, vocabulary, (7,)).astype(mx.int32)
        targets[0] = logits[0].argmax().item()
        temperature = mx.array([1.0, 0.7, 2.0, 1.0, 0.1, 1.0, 1.0])
        expected, got = judged(logits, targets, temperature), judged_by_kernel(logits, targets, temperature)
        for one, other in zip(got[:3], expected[:3], strict=True):
            assert one.dtype == mx.float32
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)
        assert got[2][0].item() == 1
        assert got[3].dtype == dtype
        wanted = expected[3].astype(dtype).astype(mx.float32)
        bits = {mx.float32: 1e-5, mx.bfloat16: 2**-8, mx.float16: 2**-11}[dtype]
        np.testing.assert_allclose(got[3].astype(mx.float32), wanted, rtol=bits, atol=1e-6)

    def test_equal_logits_are_all_the_likeliest(self):
        logprobs, entropy, is_top, slope = judged_by_kernel(mx.zeros((1, 4)), mx.array([2]), mx.ones(1))
        np.testing.assert_allclose(logprobs, [-np.log(4)], rtol=1e-6)
        np.testing.assert_allclose(entropy, [np.log(4)], rtol=1e-6)
        assert is_top.item() == 1
        np.testing.assert_allclose(slope, [[-0.25, -0.25, 0.75, -0.25]], rtol=1e-6)

    def test_a_token_that_cannot_be_drawn_has_no_weight(self):
        logits = mx.array([[0.0, -mx.inf, 0.0]])
        logprobs, entropy, _, slope = judged_by_kernel(logits, mx.array([0]), mx.ones(1))
        np.testing.assert_allclose([logprobs.item(), entropy.item()], [-np.log(2), np.log(2)], rtol=1e-6)
        np.testing.assert_allclose(slope, [[0.5, 0, -0.5]], rtol=1e-6)

    def test_a_logit_that_is_no_number_is_not_hidden(self):
        logprobs, *_ = judged_by_kernel(mx.array([[0.0, mx.nan, 0.0]]), mx.array([0]), mx.ones(1))
        assert np.isnan(logprobs.item())


@pytest.mark.cuda
@pytest.mark.skipif(not mx.cuda.is_available(), reason="CUDA is not available")
@pytest.mark.parametrize("bits", [None, 4])
def test_scores_on_cuda_and_their_gradient_are_those_of_the_cpu(policy, tokens, mask, bits):
    model = policy("qwen3", bits=bits or 0)

    def gradient():
        def loss() -> mx.array:
            return score(model, tokens, mask, temperature=0.7, with_gradient=True).logprobs.sum()

        value, slopes = nn.value_and_grad(model, loss)()
        return value.item(), dict(tree_flatten(slopes))

    (value, slopes), before = gradient(), mx.default_device()
    mx.set_default_device(mx.gpu)
    gpu_value, gpu_slopes = gradient()
    mx.set_default_device(before)
    assert gpu_value == pytest.approx(value, rel=1e-3)  # TF32 in the products
    for name, slope in slopes.items():
        assert mx.linalg.norm(gpu_slopes[name] - slope) <= 1e-2 * mx.linalg.norm(slope), name


@pytest.fixture
def dequantized(monkeypatch) -> list:
    """What was dequantized so far."""
    calls, plain = [], rows._dequantized

    def counted(*args):
        calls.append(args)
        return plain(*args)

    monkeypatch.setattr(rows, "_dequantized", counted)
    return calls


def with_slopes(head, *about):
    return lambda x: chunks_with_slopes(head, 4, *about)(x)[0]


def recomputed(head, *about):
    return lambda x: recomputed_chunks(lambda _, rows, *about: judged(head(rows), *about)[:3], 4, *about)([], x)[0]


@pytest.mark.parametrize(("chunks", "passes"), [(with_slopes, 1), (recomputed, 2)])
def test_all_chunks_of_a_pass_dequantize_the_head_once(dequantized, chunks, passes):
    mx.random.seed(0)
    layer, hidden = nn.QuantizedLinear(64, 48, bias=False, group_size=32, bits=4), mx.random.normal((10, 64))
    about = mx.arange(10), mx.ones(10)

    def run(head):
        return mx.vjp(chunks(head, *about), [hidden], [mx.ones(10)])

    chunks(lambda x: dequantized_product(layer, x), *about)(hidden)  # without a gradient
    assert len(dequantized) == 1
    dequantized.clear()
    (got,), (slope,) = run(lambda x: dequantized_product(layer, x))
    assert len(dequantized) == passes
    (expected,), (expected_slope,) = run(layer)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-5)
    dequantized_product(layer, hidden)  # outside nothing is held
    dequantized_product(layer, hidden)
    assert len(dequantized) == passes + 2


def test_what_is_held_is_the_layers_own_in_its_type():
    x = mx.ones((2, 64))
    with dequantized_once():
        for seed in range(20):  # layers that come and go, whose places in memory others take
            mx.random.seed(seed)
            layer = nn.QuantizedLinear(64, 8, bias=False, group_size=32, bits=4)
            np.testing.assert_allclose(dequantized_product(layer, x), layer(x), rtol=1e-4, atol=1e-5)
            assert dequantized_product(layer, x.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_what_is_held_is_let_go_after_an_error():
    with pytest.raises(KeyError), dequantized_once():
        raise KeyError
    assert rows._held_weights.get() is None
