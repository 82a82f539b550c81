"""Every causal language model of mlx-lm at toy size, and what is expected of it."""

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .architecture_configs import CONFIGS, SHARED

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
CACHE_DIFFERS = {"gemma3n", "phi3small", "plamo3"}
REFUSED = {*CACHE_DIFFERS, "deepseek_v41", "llama4"}  # the caches of the last two know one row only
# What the engine decodes one row after the other; what is in neither set it decodes in batches.
ROW_BY_ROW = {"afm7", "gemma2", "gpt_bigcode", "longcat_flash_ngram", "minimax_m3_vl"}
# What has no halves: gemma3n's inner model is trunk and head in one.
WHOLE = {"gemma3n"}
# What names no trainable parameters before `attach_lora` mends it: it does not initialise nn.Module.
UNINITIALISED = {"recurrent_gemma"}


def architecture_names() -> list[str]:
    """The architectures that `build` makes, by the name of their module in mlx_lm.models."""
    return sorted({*CONFIGS, *_TEXT_CONFIGS})


def build(name: str, seed: int = 0) -> nn.Module:
    """The architecture at toy size in evaluation mode, with seeded random weights that make its logits lively."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    text_type = _TEXT_CONFIGS.get(name, name)
    config = {**SHARED, "model_type": text_type, **CONFIGS.get(name, CONFIGS.get(text_type, {}))}
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
    if "gate_weight" in path:  # gates of recurrent_gemma: at 0 its square root has no slope
        return 0.05 * mx.random.normal(value.shape)
    if value.ndim < 2:  # norms and biases: near what the module itself begins with
        return (value + 0.1 * mx.random.normal(value.shape)).astype(mx.float32)
    inputs = value.size // value.shape[0] if "conv" in path else value.shape[-1]
    spread = 0.2 if "embed" in path else 1.5 * inputs**-0.5
    return spread * mx.random.normal(value.shape)
