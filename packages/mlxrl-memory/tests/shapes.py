"""Models and runs that several tests estimate."""

from typing import Any

from hypothesis import strategies as st

from mlxrl.memory import Backend, ModelShape, RunShape, known_config


def known(model_id):
    config = known_config(model_id)
    assert config is not None
    return ModelShape.from_config(config)


SMALL = known("mlx-community/Qwen3-0.6B-4bit")
HYBRID = known("mlx-community/Qwen3.5-9B-MLX-4bit")
MIXTURE = ModelShape.from_config(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 300,
    }
)
MODELS = [SMALL, HYBRID, MIXTURE]
RUN = RunShape(group_size=4, max_prompt_len=100, max_completion_len=412)
BACKENDS: tuple[Backend, ...] = ("cpu", "cuda", "metal")

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "qwen3"},
    {"model_type": "gemma3_text", "sliding_window": 128},
    {"model_type": "gemma3_text", "sliding_window": 1024},
    {"model_type": "qwen3_moe"} | EXPERTS,
    {
        "model_type": "qwen3_next",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
    }
    | EXPERTS,
)
SIZES = {
    "vocab_size": (1000, 151_936),
    "hidden_size": (64, 1024, 4096),
    "num_hidden_layers": (1, 2, 28),
    "intermediate_size": (128, 3072),
    "num_attention_heads": (8,),
    "num_key_value_heads": (1, 2, 8),
    "head_dim": (16, 64, 128, 256),
    "tie_word_embeddings": (True, False),
    "torch_dtype": ("bfloat16",),
}
# config.json files of all proportions: wide and shallow, nearly all head, experts, windows, recurrent states
CONFIGS = st.builds(
    lambda family, sizes: family | sizes,
    st.sampled_from(FAMILIES),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIZES.items()}),
)

COUNTS = {
    "max_prompt_len": 3000,
    "max_completion_len": 3000,
    "group_size": 32,
    "groups_per_step": 32,
    "max_turns": 8,
    "max_observation_len": 500,
    "max_context": 3000,
    "eval_tasks": 300,
    "rollout_width": 300,
    "kv_budget_bytes": 2**32,
    "micro_batch_size": 300,
    "max_tokens_per_micro_batch": 100_000,
    "lora_rank": 128,
    "optimizer_states": 4,
    "score_chunk": 3000,
}
OPTIONAL = (
    "max_context",
    "rollout_width",
    "kv_budget_bytes",
    "micro_batch_size",
    "max_tokens_per_micro_batch",
    "score_chunk",
)


def run_shape(fields: dict[str, Any]) -> RunShape:
    return RunShape(**fields)


RUNS = st.fixed_dictionaries(
    {name: st.integers(1, most) | (st.none() if name in OPTIONAL else st.nothing()) for name, most in COUNTS.items()}
    | {
        "gradient_checkpointing": st.booleans(),
        "has_reference": st.booleans(),
        "has_reference_adapter": st.booleans(),
        "use_dora": st.booleans(),
        "has_merged_copy": st.booleans(),
        "shares_prompts": st.booleans(),
        "backend": st.sampled_from(BACKENDS),
    }
).map(run_shape)
