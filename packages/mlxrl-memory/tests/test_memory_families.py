"""What families of models keep for a gradient, which of it is measured, and which models are refused."""

from dataclasses import replace
from typing import Any

import pytest

from mlxrl.memory import Backend, ModelShape, RunShape, UncountedError, estimate

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "sliding_window": 64,
    "sliding_window_pattern": 2,
}
# 8 rows of 96 tokens, read whole
RUN = RunShape(
    group_size=8,
    max_prompt_len=48,
    max_completion_len=48,
    lora_rank=8,
    optimizer_states=0,
    shares_prompts=False,
    gradient_checkpointing=False,
    backend="cpu",
)
# Model type, whether its blocks are checkpointed, and MiB: `mx.get_peak_memory` of loss and gradient of a LoRA model as
# the policy reads it, weights included; mlx-lm's own classes, MLX 0.32, CPU
MEASURED = [
    ("qwen3", False, 95.3),
    ("llama", False, 90.6),
    ("qwen2", False, 90.6),
    ("phi3", False, 97.5),
    ("phi", False, 102.4),
    ("gemma", False, 122.8),
    ("gemma2", False, 152.0),
    ("gemma3_text", False, 145.2),
    ("qwen3", True, 38.9),
    ("llama", True, 38.2),
    ("qwen2", True, 38.2),
    ("phi3", True, 42.8),
    ("phi", True, 36.3),
    ("gemma", True, 42.2),
    ("gemma2", True, 40.2),
    ("gemma3_text", True, 41.6),
]


def shape(model_type, **changes: Any):
    own = {"head_dim": None, "tie_word_embeddings": False} if model_type == "phi" else {}
    return ModelShape.from_config({"model_type": model_type} | SIZES | own | changes)


def predicted_mib(model, run):
    """MiB of one loss and gradient: what is held, one gradient tree, and no batch."""
    e = estimate(model, run)
    return (e.held + e.gradients / 2 + e.update_activations) / 2**20


@pytest.mark.parametrize(("model_type", "checkpointing", "measured"), MEASURED)
def test_a_gradient_is_within_15_percent_of_what_each_family_takes(model_type, checkpointing, measured):
    model = shape(model_type)
    run = replace(RUN, gradient_checkpointing=checkpointing)
    assert predicted_mib(model, run) == pytest.approx(measured, rel=0.15)
    assert estimate(model, run).extrapolated == ()


# The same of models 512 wide, 2048 in the feed-forward, heads of 128
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}


@pytest.mark.parametrize(("model_type", "measured"), [("qwen3", 442), ("gemma2", 620), ("gemma3_text", 630)])
def test_so_it_is_of_wider_models(model_type, measured):
    assert predicted_mib(shape(model_type, **WIDE), RUN) == pytest.approx(measured, rel=0.15)


# 2 rows of 512 tokens of 4 blocks 64 wide with heads of 16, which are mostly scores
LONG = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 4}
MEASURED_LONG = [("qwen3", False, 68.1), ("gemma3_text", False, 75.5), ("gemma2", False, 107.8), ("gemma2", True, 57.4)]


@pytest.mark.parametrize(("model_type", "checkpointing", "measured"), MEASURED_LONG)
def test_a_soft_cap_keeps_the_scores_twice(model_type, checkpointing, measured):
    run = replace(RUN, group_size=2, max_prompt_len=256, max_completion_len=256, gradient_checkpointing=checkpointing)
    assert predicted_mib(shape(model_type, **LONG), run) == pytest.approx(measured, rel=0.15)


def test_scores_under_a_soft_cap_are_never_fused():
    capped, plain = (shape(model_type).blocks[0].score_bytes(100, 2, 128) for model_type in ("gemma2", "gemma3_text"))
    assert (capped, plain) == (2 * 4 * 100 * 2, 0)


def test_families_that_were_measured_on_some_backends_say_so_on_others():
    def notes(model_type, backend: Backend):
        return " ".join(estimate(shape(model_type), replace(RUN, backend=backend)).extrapolated)

    for model_type in ("gemma", "gemma2", "gemma3_text", "phi"):
        assert f"{model_type!r} are measured on cpu and not on cuda" in notes(model_type, "cuda")
    for model_type in ("olmo2", "cohere", "granite", "unknown"):
        assert f"model_type {model_type!r} is unknown" in notes(model_type, "cpu")
    assert notes("llama", "cuda") == notes("qwen3", "cuda") == ""


def test_layers_have_the_names_that_mlx_lm_gives_them():
    def names(model):
        return [x.name for x in model.blocks[0].linears]

    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    assert names(shape("phi")) == [*attention, "self_attn.dense", "mlp.fc1", "mlp.fc2"]
    mixtral = shape("mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert "block_sparse_moe.gate" in names(mixtral)
    nested = ModelShape.from_config({"model_type": "gemma3", "text_config": SIZES | {"model_type": "gemma3_text"}})
    assert (nested.blocks_path, mixtral.blocks_path) == ("language_model.model.layers", "model.layers")


OTHER_MIXERS = [
    ({"model_type": "jamba", "mamba_d_state": 16}, "'mamba_d_state' .16.* a state-space mixer"),
    ({"model_type": "jamba"}, "'model_type' .'jamba'.* a state-space mixer"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}, "'hybrid_override_pattern' .'M-"),
    ({"model_type": "brandnew", "mamba_num_heads": 8}, "'mamba_num_heads' .8, model_type 'brandnew'"),
    ({"model_type": "falcon_h1"}, "'falcon_h1'.* a state-space mixer"),
    ({"model_type": "lfm2", "full_attn_idxs": [2, 5]}, "'full_attn_idxs' .* a convolution"),
    ({"model_type": "lfm2_moe"}, "'lfm2_moe'.* a convolution"),
    ({"model_type": "mamba", "state_size": 16}, "'state_size' .16"),
    ({"model_type": "mamba2"}, "'mamba2'.* a state-space mixer"),
    ({"model_type": "granitemoehybrid"}, "'granitemoehybrid'.* a state-space mixer"),
    ({"model_type": "rwkv7"}, "'rwkv7'.* a recurrent mixer"),
    ({"model_type": "recurrent_gemma", "block_types": ["recurrent"]}, "'block_types' .*a recurrent mixer"),
    ({"model_type": "deepseek_v41", "o_lora_rank": 1024}, "'o_lora_rank' .1024.* latent attention"),
    ({"model_type": "kimi_k2", "kv_lora_rank": 512}, "'kv_lora_rank' .512.* latent attention"),
]


@pytest.mark.parametrize(("fields", "message"), OTHER_MIXERS)
def test_mixers_that_are_not_counted_are_refused_however_a_config_tells_of_them(fields, message):
    for config in (SIZES | fields, {"model_type": "wrapper", "text_config": SIZES | fields}):
        with pytest.raises(UncountedError, match=f"{message}.*not counted yet; measure a short run"):
            ModelShape.from_config(config)


ODD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 4, "mlp_only_layers": 5}, "'mlp_only_layers' must be a list of whole numbers, got 5"),
    ({"num_experts": 4, "mlp_only_layers": "0"}, "'mlp_only_layers' must be a list of whole numbers, got '0'"),
    ({"num_experts": 4, "mlp_only_layers": ["0"]}, r"'mlp_only_layers' must be a list of whole numbers, got \['0'\]"),
    ({"layer_types": 3}, "'layer_types' must be a list of names, got 3"),
    ({"layer_types": "full_attention"}, "'layer_types' must be a list of names, got 'full_attention'"),
    ({"text_config": "x"}, "'text_config' must be an object, got 'x'"),
    ({"text_config": ""}, "'text_config' must be an object, got ''"),
    ({"model_type": 5}, "'model_type' must be a name, got 5"),
    ({"max_position_embeddings": "1024"}, "'max_position_embeddings' must be a whole number of at least 1, got '1024'"),
    ({"max_position_embeddings": 4096.0}, "'max_position_embeddings' must be a whole number of at least 1, got 4096.0"),
    ({"max_position_embeddings": 0}, "'max_position_embeddings' must be a whole number of at least 1, got 0"),
    ({"num_hidden_layers": 10**30}, "'num_hidden_layers' must be a whole number of at most 10000, got 1000000000"),
    ({"hidden_size": 10**400}, "'hidden_size' must be a whole number of at most 1099511627776, got 1000000"),
    ({"quantization": {"bits": True}}, r"'quantization\.bits' must be one of .* got True"),
    ({"quantization": {"bits": 4.0}}, r"'quantization\.bits' must be one of .* got 4\.0"),
    ({"quantization": {"bits": 4, "group_size": True}}, r"'quantization\.group_size' must be .* got True"),
    ({"quantization": {"bits": 4, "mode": "foo"}}, r"'quantization\.mode' must be one of .* got 'foo'"),
    ({"quantization": {"bits": 4, "mode": 3}}, r"'quantization\.mode' must be one of .* got 3"),
]


@pytest.mark.parametrize(("changes", "message"), ODD)
def test_fields_of_another_kind_are_refused_with_name_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config({"model_type": "qwen3_moe"} | SIZES | changes)


@pytest.mark.parametrize("text", ["3", '["model_type"]', '"model_type"', "{}"])
def test_a_file_that_describes_no_model_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must hold"):
        ModelShape.from_path(tmp_path)


def test_the_context_is_that_around_the_text_model_first():
    assert shape("qwen3").context_length is None
    assert shape("qwen3", max_position_embeddings=300).context_length == 300
    nested = {"model_type": "qwen3_vl", "text_config": SIZES | {"max_position_embeddings": 200}}
    assert ModelShape.from_config(nested).context_length == 200
    assert ModelShape.from_config(nested | {"max_position_embeddings": 100}).context_length == 100


def test_an_evaluation_decodes_as_many_rows_as_a_step_may():
    def parts(**changes):
        return estimate(shape("qwen3"), replace(RUN, **changes))

    step, evaluation = parts(), parts(eval_tasks=32)
    # 8 rows of a step, 32 of an evaluation, or as many as decode at once
    assert evaluation.kv_cache == 4 * step.kv_cache
    assert parts(eval_tasks=32, rollout_width=16).kv_cache == 2 * step.kv_cache
    assert parts(eval_tasks=8) == parts(eval_tasks=0) == step
    assert (evaluation.update, evaluation.held) == (step.update, step.held)
