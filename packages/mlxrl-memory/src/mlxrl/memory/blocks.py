"""Blocks built from the fields of a config.json, as mlx-lm builds its modules."""

from mlxrl.memory.constants import KEPT_ACTIVATION, KEPT_HIDDEN
from mlxrl.memory.families import Family
from mlxrl.memory.fields import Fields
from mlxrl.memory.layers import Block, GatedDelta, Linear
from mlxrl.memory.mixers import UncountedError

MOST_BLOCKS = 10_000  # more are a mistake in the file, and would take long to count
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")


def read_blocks(fields: Fields, family: Family) -> tuple[Block, ...]:
    """The blocks of the model, first to last."""
    return tuple(_block(fields, family, index, layer_type) for index, layer_type in enumerate(_layer_types(fields)))


def _layer_types(fields: Fields) -> list[str]:
    """The mixer of every block: `layer_types`, else the interval of full attention, else full attention throughout."""
    count = fields.number("num_hidden_layers", most=MOST_BLOCKS)
    listed = fields.listed("layer_types", str, "names")
    if listed is not None:
        if len(listed) != count:
            raise ValueError(
                f"config.json field 'layer_types' must name num_hidden_layers = {count} layers, got {len(listed)}."
            )
        if unknown := [x for x in listed if x not in LAYER_TYPES]:
            raise UncountedError(
                f"config.json field 'layer_types' names {unknown[0]!r}, which is not counted yet; measure a short run"
                f" instead. Counted are {', '.join(LAYER_TYPES)}."
            )
        return listed
    if fields.model_type.startswith("gemma3"):
        interval, other = fields.number("sliding_window_pattern", default=6), "sliding_attention"
    elif fields.get("linear_num_value_heads") is not None:
        interval, other = fields.number("full_attention_interval", default=4), "linear_attention"
    else:
        return ["full_attention"] * count
    return [other if (index + 1) % interval else "full_attention" for index in range(count)]


def _block(fields: Fields, family: Family, index: int, layer_type: str) -> Block:
    hidden = fields.number("hidden_size")
    norms = family.norms * hidden * (1 + family.norm_bias)
    mlp, width = _mixture(fields, family, hidden) if _is_sparse(fields, index) else _dense(fields, family, hidden)
    if layer_type == "linear_attention":
        delta = _gated_delta(fields)
        extra = delta.conv_width * delta.kernel + 2 * delta.value_heads + delta.value_dim
        linears = _delta_linears(delta, hidden, fused=family.fused)
        return Block(hidden, linears + mlp, norms + extra, 0, 0, 0, width, delta=delta)
    heads = fields.number("num_attention_heads")
    head_dim = fields.number("head_dim", default=max(1, hidden // heads))
    kv_width = fields.number("num_key_value_heads", default=heads) * head_dim
    gated = family.gated_attention and fields.flag("attn_output_gate", True)
    window = fields.number("sliding_window") if layer_type == "sliding_attention" else None
    return Block(
        hidden_size=hidden,
        linears=_attention_linears(fields, family, hidden, heads * head_dim, kv_width, gated) + mlp,
        other_parameters=norms + 2 * head_dim * family.qk_norm,
        heads=heads,
        query_width=heads * head_dim,
        kv_width=kv_width,
        feed_forward_width=width,
        gated=gated,
        window=window,
        soft_cap=family.soft_cap,
        extra_kept=max(0, family.norms - KEPT_HIDDEN) * hidden + KEPT_ACTIVATION[family.activation] * width,
    )


def _attention_linears(
    fields: Fields, family: Family, hidden: int, query_width: int, kv_width: int, gated: bool
) -> tuple[Linear, ...]:
    bias = fields.flag("attention_bias", False)
    qkv_bias, out_bias = family.qkv_bias or bias, family.out_bias or bias
    out = Linear(f"self_attn.{family.out}", query_width, hidden, out_bias)
    if family.fused and not gated:
        return (Linear("self_attn.qkv_proj", hidden, query_width + 2 * kv_width, qkv_bias), out)
    return (
        Linear("self_attn.q_proj", hidden, query_width * (1 + gated), qkv_bias),
        Linear("self_attn.k_proj", hidden, kv_width, qkv_bias),
        Linear("self_attn.v_proj", hidden, kv_width, qkv_bias),
        out,
    )


def _gated_delta(fields: Fields) -> GatedDelta:
    return GatedDelta(
        value_heads=fields.number("linear_num_value_heads"),
        key_heads=fields.number("linear_num_key_heads"),
        key_dim=fields.number("linear_key_head_dim"),
        value_dim=fields.number("linear_value_head_dim"),
        kernel=fields.number("linear_conv_kernel_dim"),
    )


def _delta_linears(delta: GatedDelta, hidden: int, *, fused: bool) -> tuple[Linear, ...]:
    out = Linear("linear_attn.out_proj", delta.value_width, hidden)
    if fused:
        return (
            Linear("linear_attn.in_proj_qkvz", hidden, delta.conv_width + delta.value_width),
            Linear("linear_attn.in_proj_ba", hidden, 2 * delta.value_heads),
            out,
        )
    return (
        Linear("linear_attn.in_proj_qkv", hidden, delta.conv_width),
        Linear("linear_attn.in_proj_z", hidden, delta.value_width),
        Linear("linear_attn.in_proj_b", hidden, delta.value_heads),
        Linear("linear_attn.in_proj_a", hidden, delta.value_heads),
        out,
    )


def _is_sparse(fields: Fields, index: int) -> bool:
    """Whether block `index` has a mixture of experts in place of a dense feed-forward."""
    if not fields.number("num_experts", "num_local_experts", "n_routed_experts", default=0, least=0):
        return False
    dense = fields.listed("mlp_only_layers", int, "whole numbers") or []
    first = fields.number("first_k_dense_replace", default=0, least=0)
    return index >= first and index not in dense and (index + 1) % fields.number("decoder_sparse_step", default=1) == 0


def _dense(fields: Fields, family: Family, hidden: int) -> tuple[tuple[Linear, ...], int]:
    width = fields.number("intermediate_size")
    bias = family.mlp_bias or fields.flag("mlp_bias", False)
    if not family.gated_mlp:
        return (Linear("mlp.fc1", hidden, width, bias), Linear("mlp.fc2", width, hidden, bias)), width
    if family.fused and family.gated_attention is False:
        return (
            Linear("mlp.gate_up_proj", hidden, 2 * width, bias),
            Linear("mlp.down_proj", width, hidden, bias),
        ), width
    return _swiglu("mlp", hidden, width, bias=bias), width


def _mixture(fields: Fields, family: Family, hidden: int) -> tuple[tuple[Linear, ...], int]:
    experts = fields.number("num_experts", "num_local_experts", "n_routed_experts")
    active = fields.number("num_experts_per_tok")
    width = fields.number("moe_intermediate_size", "intermediate_size")
    linears = (Linear(f"{family.mixture}.gate", hidden, experts, router=True),)
    linears += _swiglu(f"{family.mixture}.switch_mlp", hidden, width, experts=experts, active=active)
    shared = fields.number("shared_expert_intermediate_size", default=0, least=0)
    if shared:
        linears += (Linear("mlp.shared_expert_gate", hidden, 1, router=True),)
        linears += _swiglu("mlp.shared_expert", hidden, shared)
    always = width * fields.number("n_shared_experts", default=0, least=0)
    if always:
        linears += _swiglu("mlp.shared_experts", hidden, always)
    return linears, active * width + shared + always


def _swiglu(
    name: str, hidden: int, width: int, *, bias: bool = False, experts: int = 1, active: int = 1
) -> tuple[Linear, ...]:
    return (
        Linear(f"{name}.gate_proj", hidden, width, bias, experts, active),
        Linear(f"{name}.up_proj", hidden, width, bias, experts, active),
        Linear(f"{name}.down_proj", width, hidden, bias, experts, active),
    )
