"""The memory plan of a config: read from config.json alone, and its proposals make a config that fits."""

import json
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model, quantize_model

from mlxrl.memory import ModelShape
from mlxrl.policy import LoRAConfig, MergedPolicy, ModelError, load_policy_with_lora
from mlxrl.policy.lora import attach_lora
from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import ConfigError, fitted_overrides, load_config, make_config, make_plan, memory_backend

GB = 2**30


def test_the_plan_of_a_folder_needs_its_config_alone(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    plans = [make_plan(make_config({"model_id": str(folder)}), available_bytes=GB) for folder in (tmp_path, tiny)]
    assert plans[0] == plans[1]
    assert plans[0].fit.fits
    assert fitted_overrides(plans[0]) == {}
    assert plans[0].estimate.peak == plans[0].fit.peak > plans[0].estimate.weights > 0


def test_known_models_are_planned_without_a_network_and_fewer_bits_take_less():
    names = [f"mlx-community/Qwen3-0.6B-{tag}" for tag in ("4bit", "8bit", "bf16")]
    plans = [make_plan(make_config({"model_id": name}), available_bytes=64 * GB) for name in names]
    weights = [plan.estimate.weights for plan in plans]
    assert weights == sorted(weights)
    # 4 bits, and a scale and a bias for each 64 weights; what has 16 bits is cast to float32 on the CPU
    bits = (4 + 2 * 32 / 64) / 32 if memory_backend() == "cpu" else (4 + 2 * 16 / 64) / 16
    assert weights[0] / weights[2] == pytest.approx(bits, rel=0.02)
    assert plans[0].estimate.peak < plans[2].estimate.peak


def test_what_the_plan_proposes_is_a_config_that_fits():
    fields = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "max_completion_len": 1024, "group_size": 16, "steps": 7}
    plan = make_plan(make_config(fields), available_bytes=3 * GB)
    assert not plan.fit.fits
    overrides = fitted_overrides(plan)
    assert overrides
    fitted = load_config(None, fields | overrides)
    again = make_plan(fitted, available_bytes=3 * GB)
    assert again.fit.fits
    assert again.estimate.peak == plan.fit.proposals[-1].peak
    assert fitted.steps == 7


# A field of the config and a value, and whether the peak then rises or falls.
PEAKS = {
    "group_size": (16, "rises"),
    "groups_per_step": (16, "rises"),
    "max_completion_len": (512, "rises"),
    "max_prompt_len": (2048, "rises"),
    "max_turns": (4, "rises"),
    "rank": (64, "rises"),
    "kl_beta": (0.1, "rises"),
    "use_dora": (True, "rises"),
    "targets": (("q_proj", "layers.3.mlp"), "falls"),
    "last_layers": (4, "falls"),
    "optimizer.name": ("lion", "falls"),
    "micro_batch_size": (1, "falls"),
    "update.max_tokens_per_micro_batch": (1024, "falls"),
    "gradient_checkpointing": (True, "falls"),
    "rollout.max_context": (600, "falls"),
    "rollout.weights": ("merged", "rises"),
    "eval.tasks": (64, "rises"),
}


@pytest.mark.parametrize("field", PEAKS)
def test_the_plan_reads_each_field_that_takes_memory(field):
    value, way = PEAKS[field]
    base: dict[str, Any] = {"model_id": "mlx-community/Qwen3-0.6B-4bit"}
    if field == "eval.tasks":  # which are decoded as a step's rows are: these are few and short
        base |= {"group_size": 2, "groups_per_step": 1, "rollout.kv_budget_gb": 100.0}
    before, after = (
        make_plan(load_config(None, base | change), available_bytes=GB).estimate.peak for change in ({}, {field: value})
    )
    assert (after > before) if way == "rises" else (after < before)


ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"use_dora": True, "last_layers": 1}),
    ("qwen3", {"targets": ("q_proj", "layers.1.mlp")}),
    ("qwen3_moe", {"targets": ("switch_mlp",), "last_layers": 1}),
    ("qwen3_5", {"targets": ("linear_attn.*_proj", "self_attn"), "use_dora": True}),
    ("qwen3_5", {"targets": ("language_model.model.layers.3",)}),
    ("qwen3_5", {"targets": ("layers.3",)}),
    ("gemma3_text", {"targets": ("model.layers.1",)}),
]


@pytest.mark.parametrize(("architecture", "fields"), ADAPTERS)
def test_the_plan_counts_the_parameters_that_are_trained(tmp_path, architecture, fields):
    folder = make_tiny_model(tmp_path / "model", architecture)
    config = make_config({"model_id": str(folder), "rank": 3, **fields})
    plan = make_plan(config, available_bytes=GB)
    _, _, report = load_policy_with_lora(folder, LoRAConfig(rank=3, **fields))
    assert plan.model.lora_parameters(3, config.use_dora) == report.trainable_parameters


def test_the_plan_counts_the_adapter_of_the_reference():
    base = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "adapter": "a", "kl_beta": 0.1}
    plain, kept = (
        make_plan(make_config(base | {"reference": reference}), available_bytes=GB)
        for reference in ("base", "initial_adapter")
    )
    assert kept.estimate.adapters - plain.estimate.adapters == 4 * plain.model.lora_parameters(16)


def test_the_plan_reads_how_wide_a_rollout_is():
    base = {"model_id": "mlx-community/Qwen3-0.6B-4bit"}

    def cache(**change):
        return make_plan(make_config(base | change), available_bytes=GB).estimate.kv_cache

    assert cache(rollout_mode="sequential") < cache(rollout={"width": 8}) < cache()
    assert cache(rollout={"kv_budget_gb": 1.0}) < cache(rollout={"kv_budget_gb": 2.0}) < cache()
    # the environment's turns count where the config leaves them open, and so do its observations
    config = make_config(base)
    turns = [make_plan(config, max_turns=n, available_bytes=GB).run.sequence_length for n in (1, 3)]
    assert turns == [512 + 256, 512 + 3 * 256 + 2 * 512]
    assert make_plan(
        make_config(base | {"max_observation_len": 9}), max_turns=3, available_bytes=GB
    ).run.sequence_length == (512 + 3 * 256 + 2 * 9)


def test_a_row_is_as_long_as_the_model_was_made_for_unless_the_config_says_otherwise(tiny):
    endless = {"model_id": str(tiny), "max_completion_len": 64, "max_prompt_len": 64}  # made for 1,024 tokens
    longest = [
        make_plan(make_config(endless | fields), max_turns=sys.maxsize, available_bytes=GB).run.sequence_length
        for fields in ({}, {"rollout": {"max_context": 300}}, {"rollout": {"max_context": 4000}})
    ]
    assert longest == [1024, 300, 4000]


def test_auto_plans_with_the_copy_where_it_fits_and_without_it_where_it_does_not():
    def plan(weights, available_bytes=256 * GB):
        fields = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "rollout": {"weights": weights}}
        return make_plan(make_config(fields), available_bytes=available_bytes)

    shared, merged = plan("shared"), plan("merged")
    # 596,049,920 parameters, the matrices dense in the copy: all of them float16, or float32 beside float32 norms
    copy = merged.estimate.merged_copy
    assert copy == merged.estimate.peak - shared.estimate.peak
    assert copy == pytest.approx((4 if memory_backend() == "cpu" else 2) * 596_049_920, rel=1e-3)
    assert plan("auto") == merged
    between = merged.estimate.peak - 1
    assert plan("auto", between).estimate == shared.estimate
    assert plan("auto", between).fit.fits
    # a copy that was asked for is what is given up
    refused = plan("merged", between)
    assert not refused.fit.fits
    assert "gradient_checkpointing" in fitted_overrides(refused)
    checkpointed = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "rollout": {"weights": "merged"}}
    checkpointed |= {"gradient_checkpointing": True, "micro_batch_size": 1, "update": {"max_tokens_per_micro_batch": 1}}
    smallest = make_plan(make_config(checkpointed), available_bytes=256 * GB)
    fewer = make_plan(make_config(checkpointed), available_bytes=smallest.estimate.peak - 1)
    assert fitted_overrides(fewer) == {"rollout.weights": "shared"}


def test_a_budget_that_is_proposed_is_in_gb():
    long = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "max_completion_len": 8192, "gradient_checkpointing": True}
    plan = make_plan(make_config(long), available_bytes=60 * GB)
    overrides = fitted_overrides(plan)
    # 64 rows of 512 + 8192 tokens of 114,688 bytes are 59.5 GB
    assert overrides["rollout.kv_budget_gb"] == 32.0
    assert make_plan(load_config(None, long | overrides), available_bytes=60 * GB).fit.fits


COPIES = [
    ("qwen3", None, "float32"),
    ("qwen3", None, "float16"),
    ("qwen3", None, "bfloat16"),
    ("qwen3", 4, "float32"),
    ("qwen3", 8, "bfloat16"),
    ("llama", 4, "float16"),
    ("qwen3_moe", None, "float32"),
    ("qwen3_moe", 8, "bfloat16"),
    ("qwen3_5", 4, "bfloat16"),
]


@pytest.mark.parametrize(("architecture", "bits", "dtype"), COPIES)
def test_the_copy_takes_the_bytes_that_were_planned(tmp_path, architecture, bits, dtype):
    folder = make_tiny_model(tmp_path / "model", architecture)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    model, _ = load_model(folder)
    model.set_dtype(getattr(mx, dtype))
    if bits is not None:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    attach_lora(model, LoRAConfig(rank=2))
    planned = ModelShape.from_config(config).merged_copy_bytes
    assert MergedPolicy(model).nbytes == pytest.approx(planned, rel=0.01)


def test_a_model_that_cannot_be_planned_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'no-model' is no folder, and no hub name"):
        make_plan(make_config({"model_id": "no-model"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match=f"model_id = '{tmp_path}': "):
        make_plan(make_config({"model_id": str(tmp_path)}))


def test_a_folder_that_is_named_like_a_known_model_is_planned_as_what_it_is(tiny, tmp_path, monkeypatch):
    (tmp_path / "x" / "Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "x" / "Qwen3-0.6B" / "config.json").write_text((tiny / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    expected = make_plan(make_config({"model_id": str(tiny)}), available_bytes=GB).model
    for name in (str(tmp_path / "x" / "Qwen3-0.6B"), "x/Qwen3-0.6B", "./x/Qwen3-0.6B"):
        assert make_plan(make_config({"model_id": name}), available_bytes=GB).model == expected


@pytest.mark.parametrize("name", ["/no/Qwen3-0.6B", "./Qwen3-0.6B", "../Qwen3-0.6B", "~/no/Qwen3-0.6B"])
def test_a_path_that_is_no_folder_is_named_whatever_its_end(name):
    with pytest.raises(ConfigError, match=f"model_id '{name}' is no folder"):
        make_plan(make_config({"model_id": name}), available_bytes=GB)


ODD = ["3", '["model_type"]', '{"model_type": "qwen3", "text_config": "x"}']


@pytest.mark.parametrize("text", ODD)
def test_a_config_that_is_none_is_an_error_with_the_model(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"model_id = '{tmp_path}': "):
        make_plan(make_config({"model_id": str(tmp_path)}), available_bytes=GB)


@pytest.mark.parametrize("length", ["1024", 4096.0, 0])
def test_a_context_that_is_no_whole_number_is_named(tiny, tmp_path, length):
    fields = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": length}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=f"'max_position_embeddings' must be a whole number.* got {length!r}"):
        make_plan(make_config({"model_id": str(tmp_path)}), available_bytes=GB)


def test_an_evaluation_is_planned_as_wide_as_it_is_played():
    base = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "group_size": 2, "groups_per_step": 2}

    def width(tasks, **changes):
        config = make_config(base | {"eval": {"tasks": tasks}} | changes)
        return make_plan(config, available_bytes=GB).run.width

    assert [width(tasks) for tasks in (0, 3, 20, 1000)] == [4, 4, 20, 64]
    assert width(20, rollout={"width": 8}) == 8
    assert width(20, rollout_mode="sequential") == 1


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"targets": ("q_projj",)}),
    ("qwen3", {"targets": ("q_proj", "layers.7.mlp")}),
    ("qwen3", {"targets": ("layers.0",), "last_layers": 1}),
    ("qwen3", {"last_layers": 99}),
    ("qwen3_moe", {"targets": ("experts",)}),
    ("qwen3_5", {"targets": ("model.layers.3.mlpp",)}),
    ("gemma2", {"targets": ("language_model.model.layers.1",)}),
]


@pytest.mark.parametrize(("architecture", "fields"), WRONG)
def test_what_names_no_layer_is_refused_as_loading_refuses_it(tmp_path, architecture, fields):
    folder = make_tiny_model(tmp_path / "model", architecture)
    with pytest.raises(ConfigError) as planned:
        make_plan(make_config({"model_id": str(folder), **fields}), available_bytes=GB)
    with pytest.raises(ModelError) as loaded:
        load_policy_with_lora(folder, LoRAConfig(**fields))
    assert str(planned.value) == str(loaded.value)


def test_targets_of_an_unknown_family_are_not_refused_and_count_as_all_layers(tmp_path):
    folder = make_tiny_model(tmp_path / "model", "cohere")
    every, some = (
        make_plan(make_config({"model_id": str(folder), "targets": targets}), available_bytes=GB).model
        for targets in ((), ("its_own_name",))
    )
    assert some == every


def planned_to_fit(fields, budget):
    plan = make_plan(make_config(fields), available_bytes=budget)
    assert not plan.fit.fits
    return plan


def test_what_a_config_refuses_is_never_proposed():
    model = {"model_id": "mlx-community/Qwen3-0.6B-4bit", "max_completion_len": 4096}
    few = {**model, "update": {"minibatches": 64}}
    short = {**model, "algorithm": {"overlong_buffer": 1500}}
    fitted = [fitted_overrides(planned_to_fit(fields, 6 * GB)) for fields in (model, few, short)]
    # a step of 64 trajectories has 64 minibatches, so that answers are shorter instead; a buffer ends at 2048
    assert [("group_size" in overrides) for overrides in fitted] == [True, False, True]
    for fields, overrides in zip((few, short), fitted[1:], strict=True):
        assert make_plan(load_config(None, fields | overrides), available_bytes=6 * GB).fit.fits
    stays = planned_to_fit(few | short, GB).fit
    assert stays.run is None
    assert "group_size stays, for update.minibatches = 64 exceeds the 32 trajectories of a step" in stays.reason
    assert ".." not in stays.reason
    assert "max_completion_len stays, for algorithm.overlong_buffer = 1500 exceeds the 1024" in stays.reason
