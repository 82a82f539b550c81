import sys
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.qwen3
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu

from mlxrl.policy import score
from mlxrl.policy.swiglu_gradient import lean_swiglu

qwen3: Any = mlx_lm.models.qwen3  # a module like all others, which calls `swiglu` by a name of its own


@pytest.fixture
def feed_forward() -> Any:
    """A layer of that module."""
    return qwen3.MLP(8, 16)


@pytest.mark.parametrize(
    ("dtype", "up_dtype", "tolerance"),
    [(mx.float32, mx.float32, 1e-6), (mx.bfloat16, mx.bfloat16, 2**-7), (mx.bfloat16, mx.float32, 2**-7)],
)
def test_value_and_slopes_are_those_of_autodiff(feed_forward, dtype, up_dtype, tolerance):
    mx.random.seed(0)
    gate, up, slope = (4 * mx.random.normal((2, 3, 50)).astype(kind) for kind in (dtype, up_dtype, up_dtype))
    gate[0, 0, :3] = mx.array([-100.0, 0.0, 100.0])  # where the sigmoid is 0, 1/2 and 1
    (expected,), expected_slopes = mx.vjp(swiglu, [gate, up], [slope])
    with lean_swiglu(feed_forward):
        assert qwen3.swiglu is not swiglu
        (got,), got_slopes = mx.vjp(qwen3.swiglu, [gate, up], [slope])
    assert qwen3.swiglu is swiglu
    assert mx.array_equal(got, expected)
    for got_slope, expected_slope in zip(got_slopes, expected_slopes, strict=True):
        assert got_slope.dtype == expected_slope.dtype
        error = mx.linalg.norm((got_slope - expected_slope).astype(mx.float32))
        assert error <= tolerance * mx.linalg.norm(expected_slope.astype(mx.float32))


def test_a_step_that_breaks_leaves_the_name_as_it_was(feed_forward):
    with pytest.raises(RuntimeError), lean_swiglu(feed_forward):
        raise RuntimeError
    assert qwen3.swiglu is swiglu


def test_layers_of_a_module_that_has_no_name_are_scored_as_they_are(policy, tokens, mask, monkeypatch):
    model = policy("qwen3")
    expected = score(model, tokens, mask).logprobs
    own = type("MLP", (qwen3.MLP,), {"__module__": "run_from_a_file"})  # as mlx-lm loads a model's own code
    assert "run_from_a_file" not in sys.modules
    model.layers[0].mlp.__class__ = own
    assert mx.array_equal(score(model, tokens, mask).logprobs, expected)


def test_layers_that_keep_less_have_the_same_gradient():
    peaks, slopes = {False: [], True: []}, []
    for num_layers in (8, 32):
        mx.random.seed(0)
        layers = [qwen3.MLP(16, 512) for _ in range(num_layers)]
        model, x = nn.Sequential(*layers), mx.random.normal((512, 16))
        mx.eval(model.parameters(), x)
        slope = mx.grad(lambda x, model=model: model(x).sum())
        for lean in (False, True):
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            with lean_swiglu(model) if lean else nullcontext():
                slopes.append(slope(x))
            mx.eval(slopes[-1])
            peaks[lean].append(mx.get_peak_memory() - before)
    plain, lean = ((more - less) / 24 / (512 * 512 * 4) for less, more in (peaks[False], peaks[True]))
    assert plain == pytest.approx(4, abs=0.5)  # what a layer keeps: gate, up, sigmoid and SiLU
    assert lean == pytest.approx(2, abs=0.5)  # gate and up
    for expected, got in (slopes[:2], slopes[2:]):
        assert mx.linalg.norm(got - expected) <= 1e-5 * mx.linalg.norm(expected)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_scores_have_the_gradient_of_plain_layers(policy, tokens, mask, checkpointed, monkeypatch):
    model = policy("qwen3", grad_checkpoint=checkpointed)

    def gradient():
        loss = lambda: score(model, tokens, mask, with_gradient=True).logprobs.sum()  # noqa: E731
        return dict(tree_flatten(nn.value_and_grad(model, loss)()[1]))

    lean = gradient()
    monkeypatch.setattr("mlxrl.policy.swiglu_gradient._lean", swiglu)
    for name, wanted in gradient().items():
        assert mx.linalg.norm(lean[name] - wanted) <= 1e-5 * mx.linalg.norm(wanted), name
