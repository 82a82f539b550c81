import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import phi3small
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import save_model

from mlxrl.policy import LoRAConfig, ModelError, context_length, find_model, load_policy_with_lora, read_config
from mlxrl.policy.lora import attach_lora

MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
EXPERTS = {"mlp.gate", *(f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down"))}
GATED_DELTA = {f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")}
TARGETS = {"qwen3_5": ATTENTION | GATED_DELTA | MLP, "qwen3_moe": ATTENTION | EXPERTS}


def leaves(tree) -> dict[str, Any]:
    """Arrays by their full names."""
    return dict(tree_flatten(tree))


def test_only_the_lora_factors_can_be_trained(policy, architecture):
    model = policy(architecture)
    assert {name.rsplit(".", 1)[-1] for name, _ in leaves(model.trainable_parameters()).items()} == {"lora_a", "lora_b"}
    assert not any(module.training for module in model.modules())


def test_every_linear_layer_of_every_block_gets_an_adapter(folders, architecture):
    model, _, report = load_policy_with_lora(folders(architecture))
    blocks: Any = model.layers
    assert set(report.target_keys) == TARGETS.get(architecture, ATTENTION | MLP)
    # none is left bare: each linear layer of a block sits inside an adapter
    inside = {id(m["linear"]) for block in blocks for _, m in block.named_modules() if "lora_a" in m}
    linear = {id(m) for block in blocks for _, m in block.named_modules() if isinstance(m, (nn.Linear, SwitchLinear))}
    assert inside == linear
    assert report.adapted_layers == len(linear)


def test_the_report_counts_what_is_trained_and_what_there_is(folders):
    _, _, report = load_policy_with_lora(folders("qwen3"), LoRAConfig(rank=4))
    # rank * (inputs + outputs): q, o 4 * 128, k, v 4 * 96, gate, up, down 4 * 192: 4096 a layer
    assert report.trainable_parameters == 2 * 4096
    # a layer: q, o 64 * 64, k, v 64 * 32, three of 64 * 128, two norms of 64, two of 16: 37024; a final norm of 64
    # and 101 tied rows of 64
    assert report.total_parameters == 2 * 37024 + 64 + 101 * 64 + 2 * 4096
    assert (report.num_layers, report.adapted_per_layer, report.adapted_layers) == (2, (7, 7), 14)
    assert (report.model_type, report.dtype, report.quantization) == ("qwen3", "float32", "none")
    assert report.trainable_leaves == ("lora_a", "lora_b")
    assert report.separable_head


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "gemma2", "cohere"])
def test_the_report_knows_what_context_the_model_was_made_for(folders, architecture):
    # qwen3_5 tells in its text_config, and of gemma2's and cohere's mlx-lm keeps nothing
    assert load_policy_with_lora(folders(architecture))[2].context_length == 1024


def test_a_config_may_tell_no_context():
    assert context_length({"model_type": "mamba"}) is None
    assert context_length({"text_config": None}) is None
    assert context_length({"text_config": "none"}) is None


def test_the_part_for_text_may_be_an_object_as_some_of_mlx_lms_models_keep_it():
    assert context_length({"text_config": SimpleNamespace(max_position_embeddings=7)}) == 7
    assert context_length({"text_config": SimpleNamespace()}) is None


def test_the_report_counts_a_quantized_model_as_if_it_were_unpacked(folders):
    _, _, plain = load_policy_with_lora(folders("llama"))
    _, _, packed = load_policy_with_lora(folders("llama", bits=4))
    assert packed.quantization == "4-bit"
    assert packed.total_parameters == plain.total_parameters
    assert packed.trainable_parameters == plain.trainable_parameters


def test_the_hybrid_reports_its_two_kinds_of_layers(folders):
    _, _, report = load_policy_with_lora(folders("qwen3_5"))
    # three gated-delta blocks of 5 + 3 linear layers, then a full-attention block of 4 + 3
    assert report.adapted_per_layer == (8, 8, 8, 7)


def test_the_initial_adapter_depends_on_its_seed_alone(folders):
    def factors(seed):
        model, _, _ = load_policy_with_lora(folders("qwen3"), LoRAConfig(seed=seed))
        return leaves(model.trainable_parameters())

    first = factors(1)
    mx.random.seed(99)
    mx.eval(mx.random.normal((7,)))
    again, other = factors(1), factors(2)
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not any(mx.array_equal(first[name], other[name]) for name in first if name.endswith("lora_a"))


def test_the_policy_starts_as_its_base(policy, base, architecture, tokens):
    assert mx.array_equal(
        policy(architecture, trained=False)(mx.array(tokens)), base_in_layout(base(architecture), tokens)
    )


def base_in_layout(model: Any, tokens: np.ndarray) -> mx.array:
    for _, module in model.named_modules():  # the same layout, so that sums run in the same order
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = mx.contiguous(module.weight.T).T
    return model(mx.array(tokens))


def test_the_layout_for_the_cpu_changes_no_value(policy, base, tokens):
    loaded, plain = policy("llama", trained=False), base("llama")
    for (name, weight), (_, layer) in zip(
        leaves(plain.layers[0].self_attn.parameters()).items(), lora_bases(loaded), strict=True
    ):
        assert mx.array_equal(weight, layer.weight), name
    # only the order of the sums differs: float32 rounding of logits of a few units
    np.testing.assert_allclose(loaded(mx.array(tokens)), plain(mx.array(tokens)), atol=1e-5)


def lora_bases(model: Any) -> list[tuple[str, Any]]:
    attention = model.layers[0].self_attn
    return [(name, attention[name]["linear"]) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]


@pytest.mark.parametrize("bits", [0, 4])
def test_on_the_cpu_everything_becomes_float32(policy, folders, bits):
    model = policy("qwen3", bits=bits, dtype=mx.bfloat16, trained=False)
    floats = {n: v for n, v in leaves(model.parameters()).items() if mx.issubdtype(v.dtype, mx.floating)}
    assert {value.dtype for value in floats.values()} == {mx.float32}  # the scales and biases of 4-bit included
    stored: Any = mx.load(str(folders("qwen3", bits=bits, dtype=mx.bfloat16) / "model.safetensors"))
    leaf = "self_attn.q_proj.scales" if bits else "self_attn.q_proj.weight"
    here = leaf.replace("q_proj", "q_proj.linear")
    # bfloat16 values are float32 values: the cast is exact
    assert mx.array_equal(floats[f"model.layers.0.{here}"], stored[f"model.layers.0.{leaf}"].astype(mx.float32))


def test_a_second_adapter_on_top_is_refused(policy):
    with pytest.raises(ModelError, match="already carries LoRA"):
        attach_lora(policy("qwen3"), LoRAConfig())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", 2.5),
        ("rank", "8"),
        ("scale", 0.0),
        ("scale", "2"),
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("last_layers", 0),
        ("last_layers", 1.5),
        ("seed", -1),
        ("targets", "q_proj"),
        ("targets", (8,)),
    ],
)
def test_an_adapter_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(ModelError, match=rf"{field} must be .* got {re.escape(repr(value))}"):
        LoRAConfig(**{field: value})


def test_a_missing_folder_is_no_model():
    with pytest.raises(ModelError, match=r"'\./nowhere/at/all' is no folder, and no hub name"):
        find_model("./nowhere/at/all")


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"folder without config\.json"):
        find_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1}', "no model_type"),
        (b'["model_type"]', "no model_type"),
        (b"3", "no model_type"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(tmp_path, text, reason):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path)


def test_a_model_that_mlx_lm_cannot_load_is_refused_with_its_reason(folders, tmp_path):
    shutil.copytree(folders("qwen3"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match=r"cannot be loaded.*abacus"):
        load_policy_with_lora(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded.*No safetensors"):
        load_policy_with_lora(tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, r"TypeError: .*missing 6 required positional arguments: 'hidden_size'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"num_attention_heads": "4"}, "TypeError: "),
        ({"num_hidden_layers": 3}, "ValueError: Missing 9 parameters"),
        ({"hidden_size": 128}, r"ValueError: Expected shape \(101, 128\) but received shape \(101, 64\)"),
        ({"quantization": {"group_size": 32}}, "KeyError: 'bits'"),
        ({"quantization": [4]}, "TypeError: "),
        ({"model_type": "base"}, "AttributeError: "),
    ],
)
def test_a_config_that_is_broken_or_does_not_fit_the_weights_is_refused_with_the_reason(
    folders, tmp_path, fields, reason
):
    shutil.copytree(folders("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    config = {"model_type": "llama"} if fields is None else json.loads(file.read_text()) | fields
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"cannot be loaded; see whether config.json.* in {tmp_path} .*{reason}"):
        load_policy_with_lora(tmp_path)


def test_a_model_that_mlx_lm_scores_wrongly_is_refused_at_load_with_the_reason(folders, tmp_path):
    shutil.copytree(folders("qwen3"), tmp_path, dirs_exist_ok=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 48, "gegelu_limit": 20.0}
    config = {"model_type": "phi3small", **sizes, **rest, "mup_width_multiplier": 1.0, "vocab_size": 101}
    config |= {"layer_norm_epsilon": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_model(tmp_path, phi3small.Model(phi3small.ModelArgs.from_dict(config)))
    with pytest.raises(ModelError, match="scores the architecture phi3small wrongly: it adds a boolean mask"):
        load_policy_with_lora(tmp_path)


def test_a_hub_name_without_a_network_says_so(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match="neither a local folder nor in the hub cache"):
        find_model("nobody/no-such-model")


def test_a_cache_that_holds_the_config_alone_is_not_taken_for_the_model(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    snapshot = cached_snapshot(tmp_path)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert find_model("somebody/planned", config_only=True) == snapshot
    with pytest.raises(ModelError, match="neither a local folder nor in the hub cache"):
        find_model("somebody/planned")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_model("somebody/planned") == snapshot


def test_what_mlx_lm_would_not_download_is_not_missed_in_the_cache(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    snapshot = cached_snapshot(tmp_path)
    here, elsewhere = ("config.json", "model.safetensors", "tokenizer.json"), ("consolidated.safetensors", "en.model")
    listing = {"format_version": 1, "files": {name: {"size": 2, "blob_id": "0"} for name in here + elsewhere}}
    trees = snapshot.parents[1] / "trees"  # as the hub client keeps what files the repository has
    trees.mkdir()
    (trees / f"{snapshot.name}.json").write_text(json.dumps(listing))
    for name in here:
        (snapshot / name).write_text("{}")
    assert find_model("somebody/planned") == snapshot
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="IncompleteSnapshotError"):
        find_model("somebody/planned")


def test_a_cache_that_lacks_a_shard_is_not_taken_for_the_model(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    snapshot = cached_snapshot(tmp_path)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / shards[0]).write_bytes(b"")
    with pytest.raises(ModelError, match=f"the hub did not give it .{shards[1]} is missing.; check"):
        find_model("somebody/planned")
    (snapshot / shards[1]).write_bytes(b"")
    assert find_model("somebody/planned") == snapshot


def test_an_index_beside_weights_in_one_file_may_be_an_old_one(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    snapshot = cached_snapshot(tmp_path)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (snapshot / name).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert find_model("somebody/planned") == snapshot


def test_a_cache_without_a_config_is_no_model_to_plan_for(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    snapshot = cached_snapshot(tmp_path)
    (snapshot / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        find_model("somebody/planned", config_only=True)


def offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def cached_snapshot(cache: Path) -> Path:
    """A model's folder in the hub's cache, laid out as the hub client does."""
    repository = cache / "models--somebody--planned"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot
