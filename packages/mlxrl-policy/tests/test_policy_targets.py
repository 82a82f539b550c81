"""Which layers get an adapter, of which kind and size."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlxrl.policy import (
    LoRAConfig,
    MergedPolicy,
    ModelError,
    adapter_parameters,
    is_target,
    load_policy_with_lora,
    score,
)
from mlxrl.policy.dora import LeanDoRALinear
from mlxrl.policy.lora import adapters_of

PATH = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("q_proj", True),  # the end
        ("proj", False),  # names are whole
        ("self_attn", True),  # in between
        ("self_attn.q_proj", True),
        ("model.layers.3", True),  # the beginning
        ("layers.3", True),
        ("layers.3.q_proj", False),  # names in a row
        ("layers", True),
        ("model.layers.30", False),
        ("model.layers.3.self_attn.q_proj.linear", False),
        ("*_proj", True),
        ("[kq]_proj", True),
        ("[kv]_proj", False),
        ("layers.*.q_proj", True),  # a star spans names
        ("layers.[0-2].*", False),
        ("layers.?.self_attn", True),
        ("mlp", False),
    ],
)
def test_a_target_is_whole_names_of_the_path_in_a_row(target, meant):
    assert is_target(PATH, [target]) is meant
    assert is_target(PATH, ["mlp", target, "embed_tokens"]) is meant


def test_without_targets_every_layer_is_one():
    assert is_target(PATH, ())


# Per case: model, fields, keys as mlx-lm has them, adapters in each block.
CHOICES = {
    "an end": ("qwen3", {"targets": ("q_proj",)}, ("self_attn.q_proj",), (1, 1)),
    "two": ("qwen3", {"targets": ("q_proj", "up_proj")}, ("mlp.up_proj", "self_attn.q_proj"), (2, 2)),
    "the last block": ("qwen3", {"targets": ("mlp.up_proj",), "last_layers": 1}, ("mlp.up_proj",), (0, 1)),
    "one block": ("qwen3", {"targets": ("layers.0.self_attn.v_proj",)}, ("model.layers.0.self_attn.v_proj",), (1, 0)),
    "experts": ("qwen3_moe", {"targets": ("switch_mlp.up_proj",)}, ("mlp.switch_mlp.up_proj",), (1, 1)),
    "of some blocks": ("qwen3_5", {"targets": ("linear_attn.out_proj",)}, ("linear_attn.out_proj",), (1, 1, 1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_targets_choose_the_adapted_layers(folders, case):
    architecture, fields, keys, per_block = CHOICES[case]
    model, _, report = load_policy_with_lora(folders(architecture), LoRAConfig(**fields))
    assert tuple(key.removeprefix("language_model.") for key in report.target_keys) == keys
    assert report.adapted_per_layer == per_block
    adapted = [name for name, _ in adapters_of(model)]
    assert len(adapted) == sum(per_block)
    assert all(is_target(name, fields["targets"]) for name in adapted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"targets": ("q_proj", "qkv_proj")},
            r"targets \['qkv_proj'\] name no linear layer of the model, which has .*'self_attn.q_proj'.* in its blocks",
        ),
        (
            {"targets": ("layers.0.mlp",), "last_layers": 1},
            r"of the last 1 of the 2 blocks, which has .*in full for example 'model.layers.1.mlp.down_proj'",
        ),
        ({"targets": ("embed_tokens",)}, "name no linear layer"),
        ({"last_layers": 3}, "last_layers = 3 exceeds the 2 blocks of the model; lower it"),
    ],
)
def test_targets_that_the_model_does_not_have_are_refused_with_those_it_has(folders, fields, message):
    with pytest.raises(ModelError, match=message):
        load_policy_with_lora(folders("qwen3"), LoRAConfig(**fields))


def test_dora_of_experts_is_refused_and_of_the_layers_beside_them_is_not(folders):
    with pytest.raises(ModelError, match=r"use_dora has no form for layers of experts, and .*switch_mlp.*; leave it"):
        load_policy_with_lora(folders("qwen3_moe"), LoRAConfig(use_dora=True))
    model, _, report = load_policy_with_lora(
        folders("qwen3_moe"), LoRAConfig(use_dora=True, targets=("self_attn", "mlp.gate"))
    )
    assert report.adapted_per_layer == (5, 5)
    assert {type(module) for _, module in adapters_of(model)} == {LeanDoRALinear}


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_dora_of_layers_whose_weights_cross_words_is_refused_and_lora_is_not(folders, tokens, bits):
    folder = folders("qwen3", bits=bits)
    message = rf"use_dora has no form for layers of {bits} bits, and model.layers.0.mlp.down_proj is one; leave it out"
    with pytest.raises(ModelError, match=message):
        load_policy_with_lora(folder, LoRAConfig(use_dora=True))
    model, _, report = load_policy_with_lora(folder)
    assert report.quantization == f"{bits}-bit"
    assert mx.isfinite(model(mx.array(tokens))).all()


@pytest.mark.parametrize("bits", [2, 8])
def test_dora_of_layers_whose_weights_fill_words_starts_as_the_base(policy, base, tokens, bits):
    model = policy("qwen3", bits=bits, use_dora=True, trained=False)
    np.testing.assert_allclose(model(mx.array(tokens)), base("qwen3", bits=bits)(mx.array(tokens)), atol=1e-4)


def test_dora_trains_a_magnitude_for_each_output(folders):
    model: Any
    model, _, report = load_policy_with_lora(folders("qwen3"), LoRAConfig(rank=4, use_dora=True))
    assert report.trainable_leaves == ("lora_a", "lora_b", "m")
    # factors as of LoRA, 4096 a layer; outputs: q, o 64, k, v 32, gate, up 128, down 64
    assert report.trainable_parameters == 2 * (4096 + 2 * 64 + 2 * 32 + 2 * 128 + 64)
    assert model.layers[0].self_attn.q_proj.m.shape == (64,)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"last_layers": 1}])
@pytest.mark.parametrize("bits", [0, 4])
def test_checkpointing_changes_no_gradient_of_any_adapter(policy, tokens, mask, options, bits):
    gradients = []
    for checkpoint in (False, True):
        model = policy("qwen3", bits=bits, grad_checkpoint=checkpoint, **options)
        _, gradient = nn.value_and_grad(model, lambda model=model: score(model, tokens, mask).logprobs.sum())()
        gradients.append(dict(tree_flatten(gradient)))
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() == adapter_parameters(model).keys()
    for name, value in plain.items():
        assert mx.abs(value).max() > 0, name
        np.testing.assert_allclose(checkpointed[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_factor_is_alpha_over_rank_or_over_its_root(folders, rank):
    # alpha = scale * rank = 8
    config = LoRAConfig(rank=rank, scale=8 / rank)
    stable = LoRAConfig(rank=rank, scale=8 / rank, rank_stabilized=True)
    assert (config.factor, stable.factor) == pytest.approx((8 / rank, 8 / rank**0.5))
    model, _, _ = load_policy_with_lora(folders("qwen3_moe"), stable)
    assert {(type(module), module.scale) for _, module in adapters_of(model)} == {
        (LoRALinear, stable.factor),
        (LoRASwitchLinear, stable.factor),
    }


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("qwen3", {"use_dora": True}),
        ("qwen3", {"rank_stabilized": True, "last_layers": 1}),
        ("qwen3_moe", {"targets": ("switch_mlp", "layers.0.self_attn")}),
    ],
)
@pytest.mark.parametrize("bits", [0, 4])
def test_a_merged_copy_of_any_adapter_says_what_the_policy_says(policy, trained, tokens, architecture, fields, bits):
    model = policy(architecture, bits=bits, trained=False, **fields)
    copy = MergedPolicy(model)
    trained(model)
    copy.renew()
    np.testing.assert_allclose(copy.model(mx.array(tokens)), model(mx.array(tokens)), atol=5e-5)
    assert not [name for name in adapter_parameters(copy.model) if "lora" in name]
