"""What a model family does that its config.json does not say."""

from dataclasses import dataclass

from mlxrl.memory.constants import Activation, Backend


@dataclass(frozen=True)
class Family:
    """Habits of a `model_type`: its blocks' biases, norms and activations, and whether the head is tied when not said.

    `soft_cap` says that attention scores pass a soft cap, which no fused attention does; `mixture` names the experts'
    part of a block, `out` the projection behind its attention; `measured` are the backends on which what autodiff keeps
    of such blocks, or of ones that are built alike, was measured.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    norm_bias: bool = False
    gated_mlp: bool = True
    activation: Activation = "silu"
    soft_cap: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    fused: bool = False  # one matrix for q, k, v and one for gate, up; or, in a gated-delta mixer, for q, k, v, z
    gated_attention: bool = False
    tied: bool = False
    mixture: str = "mlp"
    out: str = "o_proj"
    measured: tuple[Backend, ...] = ("cpu", "cuda")


_QWEN_HYBRID = Family(qk_norm=True, gated_attention=True)
_GEMMA3 = Family(qk_norm=True, norms=4, activation="gelu_approx", tied=True, measured=("cpu",))

FAMILIES = {
    "llama": Family(tied=True),
    "mistral": Family(tied=True),
    "mixtral": Family(mixture="block_sparse_moe"),
    "qwen2": Family(qkv_bias=True, tied=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "qwen3_next": Family(qk_norm=True, gated_attention=True, fused=True),
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "gemma": Family(activation="gelu", tied=True, measured=("cpu",)),
    "gemma2": Family(norms=4, activation="gelu_approx", soft_cap=True, tied=True, measured=("cpu",)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": Family(
        qkv_bias=True,
        out_bias=True,
        norms=1,
        norm_bias=True,
        gated_mlp=False,
        mlp_bias=True,
        head_bias=True,
        out="dense",
        measured=("cpu",),
    ),
    "phi3": Family(fused=True),
}
