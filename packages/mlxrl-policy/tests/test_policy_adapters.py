import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters

from mlxrl.policy import (
    LoRAConfig,
    ModelError,
    adapter_parameters,
    adapters_disabled,
    load_adapter,
    load_policy_with_lora,
    save_adapter,
)

CONFIG = LoRAConfig(rank=4, scale=1.0)


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


@pytest.fixture
def saved(folders, trained, tmp_path):
    """saved("qwen3") -> a policy with a trained adapter, and the folder it was saved in."""

    def save(architecture, *, bits=0, **options):
        config = replace(CONFIG, **options)
        model, _, report = load_policy_with_lora(folders(architecture, bits=bits), config)
        trained(model)
        save_adapter(model, tmp_path, config, report.target_keys)
        return model, tmp_path

    return save


def test_an_adapter_comes_back_bit_for_bit(saved, policy, architecture):
    model, folder = saved(architecture)
    fresh = policy(architecture, trained=False)
    load_adapter(fresh, folder)
    before, after = adapter_parameters(model), adapter_parameters(fresh)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert all(mx.any(value) for value in after.values())
    assert {name.rsplit(".", 1)[-1] for name in after} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_a_file_of_16_bits_becomes_an_adapter_of_32_with_its_values(saved, policy, dtype, options):
    _, folder = saved("qwen3", **options)
    file = str(folder / "adapters.safetensors")
    halved = {name: value.astype(dtype) for name, value in leaves(mx.load(file)).items()}
    mx.save_safetensors(file, halved)
    fresh = policy("qwen3", **options)
    load_adapter(fresh, folder)
    for name, value in adapter_parameters(fresh).items():
        assert value.dtype == mx.float32
        assert mx.array_equal(value, halved[name])


@pytest.mark.parametrize("bits", [0, 4])
def test_mlx_lm_loads_the_adapter_and_generates_what_the_policy_does(saved, folders, architecture, tokens, bits):
    model, folder = saved(architecture, bits=bits)
    theirs, tokenizer, *_ = mlx_lm.load(str(folders(architecture, bits=bits)), adapter_path=str(folder))
    np.testing.assert_allclose(theirs(mx.array(tokens)), model(mx.array(tokens)), atol=2e-5)
    one, other = (mlx_lm.generate(m, tokenizer, "What?", max_tokens=8) for m in (theirs, model))
    assert one == other


# Fields of the config, and what stock mlx-lm is told of them: the kind, the last blocks, the layers' names.
KINDS = {
    "dora": ({"use_dora": True}, "dora", 2, 7),
    "rank-stabilised": ({"rank_stabilized": True}, "lora", 2, 7),
    "the last block": ({"last_layers": 1}, "lora", 1, 7),
    "attention of the first block": ({"targets": ("layers.0.self_attn",)}, "lora", 2, 4),
    "dora of two layers": ({"use_dora": True, "targets": ("layers.1.mlp.up_proj", "q_proj")}, "dora", 2, 3),
}


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_comes_back_here_and_in_mlx_lm(saved, folders, policy, tokens, kind, bits):
    options, fine_tune_type, num_layers, num_keys = KINDS[kind]
    model, folder = saved("qwen3", bits=bits, **options)
    description = json.loads((folder / "adapter_config.json").read_text())
    assert (description["fine_tune_type"], description["num_layers"]) == (fine_tune_type, num_layers)
    assert len(description["lora_parameters"]["keys"]) == num_keys
    fresh = policy("qwen3", bits=bits, trained=False, **options)
    assert np.abs(fresh(mx.array(tokens)) - model(mx.array(tokens))).max() > 0.01
    load_adapter(fresh, folder)
    assert mx.array_equal(fresh(mx.array(tokens)), model(mx.array(tokens)))
    theirs, *_ = mlx_lm.load(str(folders("qwen3", bits=bits)), adapter_path=str(folder))
    np.testing.assert_allclose(theirs(mx.array(tokens)), model(mx.array(tokens)), atol=5e-5)


def test_mlx_lm_reads_adapters_of_some_experts(saved, folders, tokens):
    model, folder = saved("qwen3_moe", targets=("layers.1.mlp.switch_mlp", "layers.0.self_attn.?_proj"))
    assert len(adapter_parameters(model)) == 2 * (3 + 4)
    theirs, *_ = mlx_lm.load(str(folders("qwen3_moe")), adapter_path=str(folder))
    np.testing.assert_allclose(theirs(mx.array(tokens)), model(mx.array(tokens)), atol=2e-5)


def test_the_adapter_says_how_it_was_built(saved):
    _, folder = saved("qwen3_moe")
    description = json.loads((folder / "adapter_config.json").read_text())
    assert description["fine_tune_type"] == "lora"
    assert description["num_layers"] == 2
    parameters = description["lora_parameters"]
    assert (parameters["rank"], parameters["scale"], parameters["dropout"]) == (4, 1.0, 0.0)
    assert "mlp.switch_mlp.up_proj" in parameters["keys"]


def test_saving_again_replaces_the_files(saved, policy, tmp_path):
    model, folder = saved("qwen3")
    model.layers[0].self_attn.q_proj.lora_b = mx.ones_like(model.layers[0].self_attn.q_proj.lora_b)
    save_adapter(model, folder, CONFIG, ("self_attn.q_proj",))
    fresh = policy("qwen3", trained=False)
    load_adapter(fresh, folder)
    assert mx.all(fresh.layers[0].self_attn.q_proj.lora_b == 1)


def test_what_has_no_adapter_is_not_saved_over_one_that_was(saved, base, tmp_path):
    model, folder = saved("qwen3")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with adapters_disabled(model), pytest.raises(ModelError, match=r"no block .*; leave adapters_disabled first"):
        save_adapter(model, folder, CONFIG, ("self_attn.q_proj",))
    with pytest.raises(ModelError, match=rf"no block of the model has an adapter to save in {tmp_path / 'new'};"):
        save_adapter(base("qwen3"), tmp_path / "new", CONFIG, ())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def refused(model, folder, reason):
    """The adapter is refused for that reason, and the model is what it was."""
    before = {name: np.array(value) for name, value in leaves(model.parameters()).items()}
    with pytest.raises(ModelError, match=reason):
        load_adapter(model, folder)
    after = leaves(model.parameters())
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_a_missing_adapter_is_refused(policy, saved, tmp_path):
    refused(policy("qwen3"), tmp_path / "nowhere", "adapter_config.json is missing or unreadable")
    _, folder = saved("qwen3")
    (folder / "adapters.safetensors").unlink()
    refused(policy("qwen3"), folder, "adapters.safetensors cannot be read")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[]", b"{}", b'{"lora_parameters": 3}'])
def test_a_description_of_something_else_is_refused(policy, saved, text):
    _, folder = saved("qwen3")
    (folder / "adapter_config.json").write_bytes(text)
    refused(policy("qwen3"), folder, "not valid JSON|no lora_parameters")


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_refused(policy, saved, kept):
    _, folder = saved("qwen3")
    path = folder / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    refused(policy("qwen3"), folder, "cannot be read")


def test_a_file_of_other_bytes_is_refused(policy, saved):
    _, folder = saved("qwen3")
    (folder / "adapters.safetensors").write_bytes(b"no tensors at all" * 99)
    refused(policy("qwen3"), folder, "cannot be read")


def test_the_adapter_of_another_architecture_is_refused(policy, saved):
    _, folder = saved("qwen3_moe")
    refused(policy("qwen3"), folder, "fits another policy: .* on one side only")


def test_an_adapter_of_other_layers_is_refused(policy, saved):
    _, folder = saved("qwen3")
    refused(policy("qwen3", targets=("self_attn.q_proj",)), folder, "fits another policy: .* on one side only")


def test_an_adapter_of_another_rank_is_refused_with_both_shapes(policy, saved):
    _, folder = saved("qwen3")
    refused(policy("qwen3", rank=2), folder, r"has shape \(\d+, 4\), the policy has \(\d+, 2\); set `rank`|\(4, ")


def test_an_adapter_of_another_scale_is_refused_with_both(policy, saved):
    _, folder = saved("qwen3")
    refused(policy("qwen3", scale=2.0), folder, r"trained with scale 1.0, the policy has \[2.0\]")


def test_the_scale_of_a_rank_stabilised_adapter_is_its_factor(policy, saved):
    # rank 4: the factor is 1.0 * sqrt(4)
    _, folder = saved("qwen3", rank_stabilized=True)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]["scale"] == 2.0
    refused(policy("qwen3"), folder, r"trained with scale 2.0, the policy has \[1.0\]; set `scale` and `rank_stab")
    load_adapter(policy("qwen3", scale=2.0), folder)


def test_an_adapter_of_another_kind_is_refused(policy, saved):
    _, folder = saved("qwen3", use_dora=True)
    refused(policy("qwen3"), folder, r"is of the kind 'dora', the policy has 'lora'; set use_dora to the adapter's")
    _, folder = saved("qwen3")
    refused(policy("qwen3", use_dora=True), folder, "is of the kind 'lora', the policy has 'dora'")


def test_an_adapter_that_is_not_finite_is_refused(policy, saved):
    model, folder = saved("qwen3")
    model.layers[0].self_attn.q_proj.lora_b = mx.full(model.layers[0].self_attn.q_proj.lora_b.shape, mx.nan)
    save_adapter(model, folder, CONFIG, ("self_attn.q_proj",))
    refused(policy("qwen3"), folder, "layers.0.self_attn.q_proj.lora_b is not finite")


def test_what_was_loaded_is_whole_before_it_is_used(policy, saved, tokens):
    model, folder = saved("qwen3")
    fresh = policy("qwen3")
    load_adapter(fresh, folder)
    (folder / "adapters.safetensors").write_bytes(b"")  # nothing is read from the file any more
    assert mx.array_equal(fresh(mx.array(tokens)), model(mx.array(tokens)))


def test_the_adapter_fits_the_models_that_mlx_lm_itself_adapts(saved, folders, tokens):
    model, folder = saved("qwen3")
    theirs = load_adapters(mlx_lm.load(str(folders("qwen3")))[0], str(folder))
    np.testing.assert_allclose(theirs(mx.array(tokens)), model(mx.array(tokens)), atol=2e-5)
