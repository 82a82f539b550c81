"""Models that are refused, for their blocks mix tokens in a way whose memory is not counted yet."""

from mlxrl.memory.fields import Fields


class UncountedError(ValueError):
    """A sound config.json of a model with blocks whose memory is not counted yet; the message names the field."""


# What a config.json has where its blocks are of such a kind, whatever its model_type.
_MARKS = {
    "latent attention": ("kv_lora_rank", "o_lora_rank"),
    "a state-space mixer": (
        "mamba_d_state",
        "mamba_num_heads",
        "mamba_n_heads",
        "mamba_d_ssm",
        "ssm_state_size",
        "state_size",
        "ssm_cfg",
        "hybrid_override_pattern",
        "layers_block_type",
    ),
    "a convolution": ("conv_L_cache", "full_attn_idxs", "conv_window"),
    "a recurrent mixer": ("block_types", "lru_width", "linear_attn_config", "decay_low_rank_dim"),
}
# Those whose config.json need not have any of these fields.
_MODEL_TYPES = {
    "a state-space mixer": (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "mamba",
        "mamba2",
        "nemotron_h",
        "plamo2",
        "zamba",
        "zamba2",
    ),
    "a convolution": ("baichuan_m1", "lfm2", "lfm2_moe"),
    "a recurrent mixer": ("bailing_hybrid", "bailing_moe_linear", "kimi_linear", "recurrent_gemma", "rwkv7"),
}


def refuse_other_mixers(fields: Fields) -> None:
    """Refuse a model with blocks of another kind than attention or a gated-delta mixer.

    Raises:
        UncountedError: a field or the model_type tells of one.
    """
    for mixer, names in _MARKS.items():
        for name in names:
            if fields.get(name) is not None:
                raise UncountedError(
                    f"config.json field {name!r} ({fields.get(name)!r}, model_type {fields.model_type!r})"
                    f" marks {mixer}, which is not counted yet; measure a short run instead."
                )
    for mixer, model_types in _MODEL_TYPES.items():
        if fields.model_type in model_types:
            raise UncountedError(
                f"config.json field 'model_type' ({fields.model_type!r}) marks {mixer}, which is not counted yet;"
                " measure a short run instead."
            )
