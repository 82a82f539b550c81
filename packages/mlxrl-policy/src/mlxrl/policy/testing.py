"""Tiny random models with a real tokenizer, for tests and for trying things out in a second.

They are mlx-lm's own classes at toy sizes: float32, seeded, a few ten thousand parameters.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model, save_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS, PAD = "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [PAD, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Prefix-preserving: a longer conversation starts with the text of the shorter one."""
THINKING_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
"""Rewrites history, as Qwen3's does: thoughts of earlier turns go, and `enable_thinking=False` writes an empty one."""

_SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_HYBRID: dict[str, Any] = _SHARED | {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {**_SHARED},
    "llama": {**_SHARED, "tie_word_embeddings": False},
    "qwen3_5": {"text_config": _HYBRID | {"model_type": "qwen3_5_text"}},
    "qwen3_moe": {
        **_SHARED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gemma2": {**_SHARED, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {**_SHARED, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "cohere": {**_SHARED, "logit_scale": 0.25, "layer_norm_eps": 1e-5, "use_qk_norm": False},
}
"""Configs by model type: dense (tied, untied, logit scale, soft caps), gated-delta hybrid, experts, sliding window."""


def make_tiny_model(
    folder: str | Path,
    model_type: str = "qwen3",
    *,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **config: Any,
) -> Path:
    """Write a tiny random model and its tokenizer in mlx-lm format.

    Args:
        folder: where to; made if need be.
        model_type: a key of `ARCHITECTURES`.
        seed: seed of the weights.
        tokenizer: by default `character_tokenizer()`.
        **config: further fields of config.json, or other values for those of `ARCHITECTURES`.

    Returns:
        The folder, ready for `mlx_lm.load` and `load_policy_with_lora`.

    Raises:
        ValueError: model_type is not in `ARCHITECTURES`.
    """
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {', '.join(sorted(ARCHITECTURES))}, got {model_type!r}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or character_tokenizer()
    tokenizer.save_pretrained(folder)
    description: dict[str, Any] = {
        "model_type": model_type,
        **ARCHITECTURES[model_type],
        **config,
        "eos_token_id": tokenizer.eos_token_id,
    }
    description.get("text_config", description)["vocab_size"] = len(tokenizer)
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    mx.random.seed(seed)  # before the model is built: what `_draw` keeps is drawn there
    model, _ = load_model(folder, lazy=True, strict=False)
    # Gemma scales what it embeds by sqrt(hidden_size), and norms by 1 + weight: smaller rows give the same liveliness
    embedding = 0.08 if model_type.startswith("gemma") else 0.2
    values: dict[str, Any] = dict(tree_flatten(model.parameters()))
    drawn = [(name, _draw(name, value, embedding)) for name, value in values.items()]
    model.update(tree_unflatten(drawn))
    save_model(folder, model)
    return folder


def make_scripted_model(
    folder: str | Path, follows: Mapping[str, str], *, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Write a model that says what it is told to: its next token depends on the last one alone, and is certain.

    Args:
        folder: where to; made if need be.
        follows: per token the one that comes next, e.g. `{"<|assistant|>": "g", "g": "o"}` to answer "go"; after any
            other token the end token comes.
        tokenizer: by default `character_tokenizer()`.

    Returns:
        The folder, ready for `mlx_lm.load` and `load_policy_with_lora`.
    """
    tokenizer = tokenizer or character_tokenizer()
    size = len(tokenizer)
    sizes = {"hidden_size": size, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = make_tiny_model(folder, "llama", tokenizer=tokenizer, **sizes)
    model: Any = load_model(folder)[0]
    for layer in (model.layers[0].self_attn.o_proj, model.layers[0].mlp.down_proj):
        layer.weight = mx.zeros_like(layer.weight)  # the block adds nothing: token x arrives at the head as row x
    vocabulary = tokenizer.get_vocab()
    successors = [vocabulary[EOS]] * size
    for token, successor in follows.items():
        successors[vocabulary[token]] = vocabulary[successor]
    model.model.embed_tokens.weight = mx.eye(size)
    # row x is scaled by the norm to sqrt(size), about 10; 20 times that leaves every other token exp(-200) = 0
    model.lm_head.weight = 20 * mx.eye(size)[mx.array(successors)].T
    save_model(folder, model)
    return folder


def character_tokenizer(
    *, chat_template: str = CHAT_TEMPLATE, merges: Sequence[str] = (), pad: str = PAD
) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every printable ASCII character, five special tokens and a chat template.

    Args:
        chat_template: `CHAT_TEMPLATE`, `THINKING_TEMPLATE` or another.
        merges: texts that are one token, e.g. `["ab"]`; sampled as "a" then "b", they come back as another token when
            the text is encoded again.
        pad: the padding token; `EOS` gives a tokenizer that pads with its end token.
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *string.printable[:95], "\n", *merges])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    pieces = "|".join([*map(re.escape, merges), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=pad, additional_special_tokens=SPECIAL_TOKENS[2:]
    )
    fast.chat_template = chat_template
    return fast


def wrapped_character_tokenizer(**options: Any) -> TokenizerWrapper:
    """`character_tokenizer(**options)` as mlx-lm hands it out."""
    return TokenizerWrapper(character_tokenizer(**options))


def _draw(name: str, value: mx.array, embedding: float) -> mx.array:
    """Weights wide enough that the next token is far from uniform, with embeddings small enough not to be copied."""
    if value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating) or "conv" in name:
        return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    spread = embedding if "embed" in name else 1.5 * value.shape[-1] ** -0.5
    return mx.random.normal(value.shape) * spread
