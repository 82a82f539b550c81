"""One block of a model as the memory model sees it: its linear layers, its cache, and what autodiff keeps of it."""

from dataclasses import dataclass

from mlxrl.memory.constants import (
    CACHE_STEP,
    FLOAT32_BYTES,
    KEPT_CONV,
    KEPT_DELTA_KEY,
    KEPT_DELTA_VALUE,
    KEPT_EXPERT_HIDDEN,
    KEPT_FEED_FORWARD,
    KEPT_GATE,
    KEPT_HIDDEN,
    KEPT_KV,
    KEPT_QUERY,
    KEPT_ROUTER,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer: `experts` matrices of `outputs x inputs`, of which a token passes `active`; adapted or not."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 1
    active: int = 1
    router: bool = False
    adapted: bool = True

    @property
    def weights(self) -> int:
        """Elements of the matrices, biases left out."""
        return self.experts * self.inputs * self.outputs

    @property
    def bias_weights(self) -> int:
        """Elements of the bias vectors."""
        return self.experts * self.outputs * self.bias

    def lora_parameters(self, rank: int, use_dora: bool = False) -> int:
        """Elements of the pair A `[inputs, rank]`, B `[rank, outputs]`, one pair per expert; DoRA adds `[outputs]`."""
        if not self.adapted:
            return 0
        return self.experts * (rank * (self.inputs + self.outputs) + self.outputs * use_dora)


@dataclass(frozen=True)
class GatedDelta:
    """A gated-delta (linear attention) mixer: head counts, head widths, and the causal convolution's kernel."""

    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels that pass the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent state, float32 `[value_heads, value_dim, key_dim]`."""
        return FLOAT32_BYTES * self.value_heads * self.value_dim * self.key_dim

    @property
    def kept_elements(self) -> int:
        """Elements per token that autodiff keeps inside the mixer."""
        return KEPT_CONV * self.conv_width + KEPT_DELTA_KEY * self.key_width + KEPT_DELTA_VALUE * self.value_width


@dataclass(frozen=True)
class Block:
    """One transformer block.

    `query_width` and `kv_width` are heads x head_dim (0 with a gated-delta mixer); `feed_forward_width` is what one
    token passes (chosen experts and shared ones together); `other_parameters` are norms, convolutions and decay terms,
    which are never quantised nor adapted; `window` bounds the cache of a sliding-window block; `soft_cap` says that
    attention scores pass a soft cap; `extra_kept` are elements per token that autodiff keeps beside what it keeps of a
    Llama-like block: of further norms and of a GELU.
    """

    hidden_size: int
    linears: tuple[Linear, ...]
    other_parameters: int
    heads: int
    query_width: int
    kv_width: int
    feed_forward_width: int
    gated: bool = False
    window: int | None = None
    delta: GatedDelta | None = None
    soft_cap: bool = False
    extra_kept: int = 0

    @property
    def parameters(self) -> int:
        """All elements of the block."""
        return sum(x.weights + x.bias_weights for x in self.linears) + self.other_parameters

    @property
    def adapted_linears(self) -> tuple[Linear, ...]:
        """The linear layers that carry an adapter."""
        return tuple(linear for linear in self.linears if linear.adapted)

    def cache_bytes(self, positions: int, dtype_bytes: int) -> int:
        """Bytes of one row's cache with room for so many tokens: keys and values, or the recurrent state."""
        if self.delta is not None:
            return self.delta.state_bytes + dtype_bytes * (self.delta.kernel - 1) * self.delta.conv_width
        room = positions if self.window is None else min(positions, self.window + 2 * CACHE_STEP)
        return 2 * dtype_bytes * self.kv_width * room

    def score_bytes(self, context: int, dtype_bytes: int, fused_head_dim: int) -> int:
        """Bytes per token of the attention scores that a gradient keeps: none where heads are narrow enough to fuse.

        Scores that pass a soft cap are never fused, and kept before it as well.
        """
        if self.heads == 0 or (self.query_width // self.heads <= fused_head_dim and not self.soft_cap):
            return 0
        return (1 + self.soft_cap) * self.heads * context * dtype_bytes

    def kept_bytes(self, dtype_bytes: int) -> float:
        """Bytes per token that autodiff keeps of the block when no checkpoint drops them, attention scores aside."""
        chosen = max((x.active for x in self.linears if x.experts > 1), default=0)
        elements = (
            KEPT_HIDDEN * self.hidden_size
            + (KEPT_QUERY + KEPT_GATE * self.gated) * self.query_width
            + KEPT_KV * self.kv_width
            + KEPT_FEED_FORWARD * self.feed_forward_width
            + KEPT_EXPERT_HIDDEN * chosen * self.hidden_size
            + (0 if self.delta is None else self.delta.kept_elements)
        )
        router = sum(KEPT_ROUTER * FLOAT32_BYTES * x.outputs for x in self.linears if x.router)
        return dtype_bytes * elements + router + self._lora_inputs(dtype_bytes)

    def _lora_inputs(self, dtype_bytes: int) -> int:
        """Bytes per token of the inputs that the gradient of each A needs; layers that read the same input share it.

        Of a 16-bit model experts keep a float32 copy of the input at every layer.
        """
        copied = [x for x in self.adapted_linears if dtype_bytes < FLOAT32_BYTES and x.experts > 1]
        each = sum(x.active * x.inputs for x in self.adapted_linears if x not in copied)
        mixed = self.query_width if self.delta is None else self.delta.value_width
        shared = min(each, 2 * self.hidden_size + mixed + self.feed_forward_width)
        return FLOAT32_BYTES * sum(x.active * x.inputs for x in copied) + dtype_bytes * shared
