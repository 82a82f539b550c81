"""Models and a run that several tests estimate."""

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
