"""Every causal language model of mlx-lm at toy size: one shared config, what each adds to it, and one builder."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy.testing import character_tokenizer

VOCAB = len(character_tokenizer())
WINDOW = 8  # of sliding attention: shorter than the prompts
FULL, SLIDING = "full_attention", "sliding_attention"
ALTERNATING = [SLIDING, FULL] * 2

# Names that several architectures share; each takes those that its own ModelArgs knows.
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"], 1e-5),
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(["attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "tie_word_embeddings"], False),
    "use_qk_norm": True,
    # sliding attention
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    # experts
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 16),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "num_shared_expert"], 1),
    **dict.fromkeys(["n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step", "first_k_dense_replace"], 1),
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # latent attention, and the index of sparse attention
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim", "index_head_dim"], 8),
    "qk_rope_head_dim": 4,
    "index_n_heads": 2,
    "index_topk": 6,
    # gated delta and state-space layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "conv_kernel": 4,
    "state_size": 4,
    "use_conv_bias": True,
    "time_step_limit": (0.001, 100.0),
    "conv_L_cache": 3,
    "conv_bias": False,
}
_MROPE = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_QWEN3_5 = {"num_hidden_layers": 4, "full_attention_interval": 2, "rope_parameters": _MROPE}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
_GRANITE = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GPT2 = {"n_ctx": 1024, "n_positions": 1024, "n_embd": 32, "n_head": 4, "n_layer": 2}
_PER_KIND = {FULL: {"rope_theta": 10000.0}, SLIDING: {"rope_theta": 1000.0}}
_FOUR = {"num_hidden_layers": 4, "layer_types": ALTERNATING}


# Per module of mlx_lm.models, what its config has beside and instead of `_SHARED`.
CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afm7": {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {**_FOUR, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe": {"moe_router_enable_expert_bias": True},
    "bailing_moe_linear": {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {"num_hidden_layers": 4, "layer_group_size": 2, "moe_shared_expert_intermediate_size": 16},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "dbrx": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {},
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {
        "num_hidden_layers": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_ratios": [0, 2, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 4,
        "scoring_func": "sqrtsoftplus",
        "hc_mult": 2,
    },
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "exaone": {"num_layers": 2},
    "exaone4": {"num_hidden_layers": 4, "rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {**_FOUR, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 4,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    },
    "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", SLIDING, FULL]},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
        "rope_local_base_freq": 1000.0,
        "final_logit_softcapping": 3.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 100.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "final_logit_softcapping": 3.0,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt2": _GPT2,
    "gpt_bigcode": {**_GPT2, "n_inner": 48},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"num_hidden_layers": 4},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "helium": {},
    "hunyuan": {
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 8.0},
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 4,
        "mamba_expand": 2,
    },
    "kimi_k25": {},
    "kimi_k3": {
        "num_hidden_layers": 4,
        "linear_attn_config": _KDA,
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 16,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
    },
    "kimi_linear": {"num_hidden_layers": 4, "linear_attn_config": _KDA, "model_max_length": 1024},
    "kimi_vl": {},
    "laguna": {**_FOUR, "num_attention_heads_per_layer": [4, 2, 4, 2]},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 48,
    },
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "use_expert_bias": True,
        "num_dense_layers": 1,
    },
    "lille-130m": {"block_size": 1024, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": _FOUR,
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "rope_scaling": None,
        "floor_scale": 4,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1, "time_step_rank": 4, "intermediate_size": 64},
    "mellum": {**_FOUR, "rope_parameters": _PER_KIND},
    "mimo": {},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2},
    "minicpm3": {"rope_scaling": {}, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2},
    "minimax": {"rotary_dim": 4},
    "minimax_m3_vl": {
        "num_hidden_layers": 3,
        "dense_intermediate_size": 48,
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_freq": [0, 1, 1],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {**_FOUR, "rope_parameters": _YARN},
    "mistral3": {"num_hidden_layers": 4, "layer_types": ALTERNATING, "rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "mixtral": {},
    "muse_glimmer": {"num_hidden_layers": 4, "output_multiplier": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
        ],
        "num_hidden_layers": 4,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "M", "-", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 4,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", FULL] * 2,
        "linear_allow_neg_eigval": True,
    },
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 1.5],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "mup_width_multiplier": 1.0,
    },
    "phimoe": {
        "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "long_mscale": 1.2, "short_mscale": 1.2}
    },
    "phixtral": {"num_vocab": VOCAB, "model_dim": 32, "num_heads": 4, "num_layers": 2, "rotary_dim": 4},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": WINDOW,
        "mamba_d_state": 4,
        "mamba_num_heads": 4,
    },
    "plamo3": {"num_hidden_layers": 4, "window_size": WINDOW},
    "qwen": {"kv_channels": 8},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5": {**_QWEN3_5, "num_experts": 0},
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_moe": {},
    "qwen3_next": {"num_hidden_layers": 4, "full_attention_interval": 2},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 3.0,
        "attention_window_size": WINDOW,
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {},
    "spark2_5": {**_FOUR, "rope_parameters": _PER_KIND},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {},
    "step3p5": {**_FOUR, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 16},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {},
}

# Modules that keep the text model's config under "text_config", and the model_type that it has there.
_TEXT_CONFIGS: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

# Modules of mlx_lm.models that are not built here, and why.
UNBUILT: dict[str, str] = {
    "bitnet": "its kernel exists for Metal only",
    "muse_spark": "its kernels exist for Metal only",
    "olmo": "ends the process on import unless hf_olmo is installed",
    "prism_hadamard_qwen35": "qwen3_5 with weights packed to 2 bits, which only a checkpoint's manifest describes",
    **dict.fromkeys(
        ["activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"],
        "layers and helpers without a Model",
    ),
    "switch_layers": "layers and helpers without a Model",
}

# What a cache says differs from a full forward, by faults of mlx-lm; a policy is scored by full forwards.
CACHE_DIFFERS: dict[str, str] = {
    "gemma3n": "without a cache, layers that share keys and values compute their own",
    "phi3small": "a boolean mask is added to the scores: a full forward sees the future",
    "plamo3": "the mask lets a window of one more token through than the cache keeps",
}
# What the engine decodes one row after the other, and why; what is in no table it decodes in batches.
ROW_BY_ROW: dict[str, str] = {
    "afm7": "layers that reuse keys turn their queries to the padded length, not to the row's own",
    "gemma2": "masks of rows are broadcast over heads",
    "gpt_bigcode": "learned positions take one offset for all rows",
    "longcat_flash_ngram": "rows remember their last tokens, padding among them",
    "minimax_m3_vl": "key blocks are cut over padded places, not over the row's own",
}
REFUSED: dict[str, str] = {
    **CACHE_DIFFERS,
    "deepseek_v41": "its cache knows one row only",
    "llama4": "its cache knows one row only",
}


def architecture_names() -> list[str]:
    """The architectures that `build` makes, by the name of their module in mlx_lm.models."""
    return sorted({*CONFIGS, *_TEXT_CONFIGS})


def build(name: str, seed: int = 0) -> nn.Module:
    """The architecture at toy size in evaluation mode, with seeded random weights that make its logits lively."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    text_type = _TEXT_CONFIGS.get(name, name)
    config = {**_SHARED, "model_type": text_type, **CONFIGS.get(name, CONFIGS.get(text_type, {}))}
    if name in _TEXT_CONFIGS:
        config = {**config, "model_type": name, "text_config": config}
    model = module.Model(module.ModelArgs.from_dict(config))
    if name == "phi3small":  # it rules tokens out by their ids in its own vocabulary, which are past this one's end
        model._dummy_tokenizer_ids = mx.array([], dtype=mx.int32)
    values: dict[str, Any] = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(path, _draw(path, value)) for path, value in values.items()]))
    mx.eval(model.parameters())
    model.eval()
    return model


def _draw(path: str, value: mx.array) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    if "A_log" in path:  # states that keep about 0.8 of themselves a step, so that they remember
        return 0.5 * mx.random.normal(value.shape) - 2
    if value.ndim < 2:  # norms and biases: near what the module itself begins with
        return (value + 0.1 * mx.random.normal(value.shape)).astype(mx.float32)
    inputs = value.size // value.shape[0] if "conv" in path else value.shape[-1]
    spread = 0.2 if "embed" in path else 1.5 * inputs**-0.5
    return spread * mx.random.normal(value.shape)
