from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from mlxrl.policy import (
    LoRAConfig,
    ModelError,
    adapter_parameters,
    adapter_replaced,
    adapters_disabled,
    dropout_active,
    score,
)
from mlxrl.policy.lora import attach_lora


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


def logits_of(model, tokens):
    return np.array(model(mx.array(tokens)))


def test_without_its_adapters_a_policy_is_its_base(policy, architecture, tokens):
    base = logits_of(policy(architecture, trained=False), tokens)  # lora_b = 0: the base and nothing else
    model = policy(architecture)
    adapted = logits_of(model, tokens)
    with adapters_disabled(model):
        np.testing.assert_array_equal(logits_of(model, tokens), base)
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)
    assert np.abs(adapted - base).max() > 0.1  # there was something to switch off


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_comes_back_too(policy, tokens, bits):
    base = logits_of(policy("qwen3_moe", bits=bits, trained=False), tokens)
    model = policy("qwen3_moe", bits=bits)
    with adapters_disabled(model):
        np.testing.assert_array_equal(logits_of(model, tokens), base)


@pytest.mark.parametrize("adapter_class", [LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding])
def test_every_class_of_adapter_is_switched_off(base, put_on, tokens, adapter_class):
    model = base("qwen3_moe")
    plain = logits_of(model, tokens)
    put_on(model, adapter_class)
    adapted = logits_of(model, tokens)
    assert np.abs(adapted - plain).max() > 0.01
    with adapters_disabled(model):
        np.testing.assert_array_equal(logits_of(model, tokens), plain)
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)
    with pytest.raises(RuntimeError, match="midway"), adapters_disabled(model):
        raise RuntimeError("midway")
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)


class Secretive(nn.Module):
    """An adapter that keeps what it wraps under a name of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.lora_a, self.lora_b = inner, mx.ones((64, 2)), mx.zeros((2, 64))

    def __call__(self, x):
        return self.inner(x) + (x @ self.lora_a) @ self.lora_b


class Peculiar(nn.Linear):
    """A layer that is adapted in its own way."""

    def to_lora(self, **_):
        return Secretive(self)


def test_a_model_whose_adapters_cannot_be_switched_off_is_refused_when_they_are_attached(base):
    model = base("qwen3")
    model.layers[1].self_attn.o_proj.__class__ = Peculiar
    with pytest.raises(ModelError, match=r"not its base: model\.layers\.1\.self_attn\.o_proj\.inner\.weight differs"):
        attach_lora(model, LoRAConfig(rank=2))


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"use_dora": True}),
        ("qwen3_5", {"use_dora": True}),
        ("qwen3_moe", {"use_dora": True, "targets": ("self_attn", "mlp.gate")}),
        ("qwen3_moe", {"targets": ("switch_mlp",), "rank_stabilized": True}),
        ("gemma2", {"last_layers": 1}),
    ],
)
def test_every_kind_of_adapter_leaves_its_base_when_switched_off(
    base, folders, policy, trained, tokens, architecture, options, bits
):
    plain = logits_of(base(architecture, bits=bits), tokens)
    model = policy(architecture, bits=bits, trained=False, **options)
    # DoRA multiplies by a dequantized weight, and weights on the CPU have another layout: other orders of the sums
    np.testing.assert_allclose(logits_of(model, tokens), plain, atol=1e-4)
    with adapters_disabled(model):
        untouched = logits_of(model, tokens)
    np.testing.assert_allclose(untouched, plain, atol=2e-5)
    trained(model)
    adapted = logits_of(model, tokens)
    assert np.abs(adapted - plain).max() > 0.01
    with adapters_disabled(model):
        np.testing.assert_array_equal(logits_of(model, tokens), untouched)
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3", {"use_dora": True}),
        ("qwen3", {"last_layers": 1}),
        ("qwen3", {"targets": ("*.0.*",)}),
    ],
)
def test_a_policy_is_what_it_was_with_the_adapter_it_had(policy, trained, tokens, mask, architecture, options):
    model = trained(policy(architecture, trained=False, **options))
    initial, first = adapter_parameters(model), logits_of(model, tokens)
    optimizer = optim.SGD(0.1)
    gradient = nn.value_and_grad(model, lambda: score(model, tokens, mask).logprobs.sum())
    optimizer.update(model, gradient()[1])
    moved, own = logits_of(model, tokens), adapter_parameters(model)
    assert np.abs(moved - first).max() > 0.01
    with adapter_replaced(model, initial):
        np.testing.assert_array_equal(logits_of(model, tokens), first)
    with pytest.raises(RuntimeError, match="midway"), adapter_replaced(model, initial):
        raise RuntimeError("midway")
    np.testing.assert_array_equal(logits_of(model, tokens), moved)
    # the very arrays: a merged copy that is up to date stays so
    assert all(value is own[name] for name, value in adapter_parameters(model).items())


REPLACEMENTS = {
    "an unknown name": (
        lambda own: own | {"model.layers.0.nothing": mx.zeros(1)},
        r"the first is model\.layers\.0\.noth",
    ),
    "a missing name": (lambda own: dict(list(own.items())[1:]), r"1 tensors are on one side only"),
    "another rank": (lambda own: {n: v[..., :2] for n, v in own.items()}, r"has shape \(\d+, 2\), the policy has"),
}


@pytest.mark.parametrize("case", REPLACEMENTS)
def test_an_adapter_of_another_policy_does_not_replace_a_part_of_this_one(policy, tokens, case):
    model = policy("qwen3")
    own, adapted = adapter_parameters(model), logits_of(model, tokens)
    change, reason = REPLACEMENTS[case]
    other = change({name: 2 * value for name, value in own.items()})
    with (
        pytest.raises(ModelError, match=f"in parameters fits another policy: .*{reason}"),
        adapter_replaced(model, other),
    ):
        pass
    assert all(value is own[name] for name, value in adapter_parameters(model).items())
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)


def test_what_is_no_array_leaves_the_adapter_whole(policy):
    model = policy("qwen3")
    own = adapter_parameters(model)
    last = list(own)[-1]
    other: Any = {name: 2 * value for name, value in own.items()} | {last: np.array(own[last])}  # MLX refuses it
    with pytest.raises(ValueError, match="invalid type"), adapter_replaced(model, other):
        pass
    assert all(value is own[name] for name, value in adapter_parameters(model).items())


def test_a_base_has_no_adapter_to_replace(policy):
    model = policy("qwen3")
    own = adapter_parameters(model)
    refused = pytest.raises(ModelError, match="no adapter to replace; leave adapters_disabled")
    with adapters_disabled(model), refused, adapter_replaced(model, own):
        pass
    assert all(value is own[name] for name, value in adapter_parameters(model).items())


def test_the_adapters_come_back_after_an_exception(policy, tokens):
    model = policy("qwen3")
    adapted = logits_of(model, tokens)
    with pytest.raises(RuntimeError, match="midway"), adapters_disabled(model):
        raise RuntimeError("midway")
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)


def test_a_second_switch_inside_the_first_changes_nothing(policy, tokens):
    model = policy("qwen3")
    adapted = logits_of(model, tokens)
    with adapters_disabled(model):
        base = logits_of(model, tokens)
        with adapters_disabled(model):
            np.testing.assert_array_equal(logits_of(model, tokens), base)
        np.testing.assert_array_equal(logits_of(model, tokens), base)
    np.testing.assert_array_equal(logits_of(model, tokens), adapted)


def test_a_reference_in_between_leaves_the_gradient_as_it_was(policy, tokens, mask):
    model = policy("qwen3_moe", grad_checkpoint=True)
    gradient = nn.value_and_grad(model, lambda: score(model, tokens, mask).logprobs.sum())
    _, before = gradient()
    with adapters_disabled(model):
        assert leaves(model.trainable_parameters()) == {}
        mx.eval(score(model, tokens, mask))
    _, after = gradient()
    before, after = leaves(before), leaves(after)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert all(mx.abs(value).max() > 0 for name, value in after.items() if "gate_proj" in name)


def test_dropout_is_off_while_a_policy_is_scored(policy, tokens, mask):
    model, still = policy("qwen3", dropout=0.5), policy("qwen3")
    first, second = (score(model, tokens, mask).logprobs for _ in range(2))
    assert mx.array_equal(first, second)
    assert mx.array_equal(first, score(still, tokens, mask).logprobs)


def test_dropout_acts_where_it_is_asked_for_and_then_stops(policy, tokens, mask):
    model = policy("qwen3_moe", dropout=0.5)  # linear layers and experts
    still = score(model, tokens, mask).logprobs
    with dropout_active(model):
        first, second = (score(model, tokens, mask).logprobs for _ in range(2))
    assert not mx.array_equal(first, second)
    with pytest.raises(RuntimeError, match="midway"), dropout_active(model):
        raise RuntimeError("midway")
    assert mx.array_equal(score(model, tokens, mask).logprobs, still)


def test_dropout_of_the_base_model_never_acts(policy, tokens, mask):
    model = policy("qwen3", dropout=0.0)
    still = score(model, tokens, mask).logprobs
    model.layers[0].mlp = nn.Sequential(model.layers[0].mlp, nn.Dropout(0.5)).eval()
    with dropout_active(model):
        assert mx.array_equal(score(model, tokens, mask).logprobs, still)
