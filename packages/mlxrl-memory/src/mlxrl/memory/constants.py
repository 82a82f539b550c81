"""Every number of the memory model that is not read from a config, each with its reason.

What depends on MLX's backend stands in one table, `BACKENDS`; `mlxrl-cli bench memory` measures what it says.
"""

from dataclasses import dataclass
from typing import Literal

FLOAT32_BYTES = 4

# --- Adapters -------------------------------------------------------------------------------------------------------
ADAPTER_BYTES = 4  # LoRA matrices are trained in float32, whatever the model's dtype
GRADIENT_COPIES = 2  # the sum over micro-batches, and the fresh gradient that is added to it

# --- What autodiff keeps in one block, in elements per token (exact against the float32 measurement) -----------------
KEPT_HIDDEN = 2  # inputs of the two norms, hidden wide; each further norm of a block keeps one more
KEPT_QUERY = 3  # queries before their norm, after the rotation, and scaled: heads x head_dim wide
KEPT_GATE = 3  # attention output gate: the gate, its sigmoid, the ungated output
KEPT_KV = 3  # keys before the norm and after the rotation, values: kv heads x head_dim wide
KEPT_FEED_FORWARD = 2  # gate and up; their product is the down projection's LoRA input
Activation = Literal["silu", "gelu", "gelu_approx"]
# Beside gate and up, as wide: nothing of a SiLU, whose slopes `mlxrl.policy` computes anew; what autodiff keeps of a
# GELU by the error function (Gemma, 3.0) and of the approximate one (Gemma 2 and 3, 3.8 to 3.9). A backward pass
# needs as much of a SiLU for the block it is in, so these do not make its working set larger.
KEPT_ACTIVATION: dict[Activation, int] = {"silu": 0, "gelu": 3, "gelu_approx": 4}
KEPT_EXPERT_HIDDEN = 2  # per chosen expert: the gathered input and the output before weighing; not measured
KEPT_ROUTER = 2  # router scores and probabilities, float32; not measured
KEPT_CONV = 4  # gated delta: convolution input and output, sigmoid, SiLU
KEPT_DELTA_KEY = 2  # gated delta: normalised q and k
KEPT_DELTA_VALUE = 5  # gated delta: output gate z, its sigmoid, recurrence output, normed, gated

# --- Rows that begin alike -------------------------------------------------------------------------------------------
SHARING = 0.8  # the largest part of the tokens that two passes may leave, as `mlxrl.policy` has it
# Slopes of the keys and values that rows take over, times these, where blocks are computed again: layer by layer they
# come while others of these keys and values go (0.1 to 0.5 on the CPU, 0.5 on CUDA).
FORKED_SLOPES = 0.5

# --- Rollout ---------------------------------------------------------------------------------------------------------
CACHE_STEP = 256  # mlx-lm's caches grow by so many positions
TURN_COPIES = 3  # of a row's cache between turns: the batch's, which it left, its own, and the one it reads on with
PREFILL_CHUNK = 2048  # positions that one pass reads, of one row or of several together

# --- The rest --------------------------------------------------------------------------------------------------------
BATCH_TOKEN_BYTES = 32  # ids, roles, and six float32 a token: log-probs, advantages, weights, ...
REFERENCE_TOKEN_BYTES = 4  # one more float32 log-prob a token

# --- What differs between MLX's backends -----------------------------------------------------------------------------
Backend = Literal["cpu", "cuda", "metal"]


@dataclass(frozen=True)
class BackendConstants:
    """How one of MLX's backends holds memory.

    Attributes:
        fused_head_dim: the widest head whose attention keeps no score under a gradient, 0 where none is fused; others
            keep one score a head and pair of positions.
        backward_blocks: live at the worst moment of a backward pass without checkpointing, on top of what all blocks
            keep, in units of the widest block's kept bytes.
        checkpoint_blocks: the same with checkpointing, on top of the blocks' inputs: a recomputed block, cotangents.
        delta_states: recurrent states a token that the backward pass of one gated-delta layer holds.
        delta_together: whether those of beginnings and of the rows' rests exist at once without checkpoints too.
        chunk: logits that a chunk of the head holds, and positions that it has at least, as in `mlxrl.policy.score`.
        head_copies: arrays of a chunk's logits, its slopes computed beside it, as if in float32.
        head_chunks: chunks whose arrays exist at once, the host launching ahead.
        dequantised: 1 where texts are multiplied with quantised weights in their dense form, one matrix at a time: the
            head's for its chunks, and while prompts are read those of all blocks, the host launching ahead; else 0.
        growing_layers: layers whose old and new caches exist at once while all grow.
        sampler_copies: float32 `[rows, vocabulary]` of one draw.
        runtime: bytes of the process that MLX does not count.
        measured: whether these are measured or taken over from another backend.
    """

    fused_head_dim: int
    backward_blocks: float
    checkpoint_blocks: float
    delta_states: float
    delta_together: bool
    chunk: tuple[int, int]
    head_copies: float
    head_chunks: float
    dequantised: int
    growing_layers: float
    sampler_copies: float
    runtime: int
    measured: bool


_CPU = BackendConstants(
    fused_head_dim=0,
    backward_blocks=1.6,  # 1.6
    checkpoint_blocks=2.8,  # 2.8
    delta_states=2.4,  # 2.2 to 2.7
    delta_together=False,
    chunk=(2**19, 16),
    head_copies=6.5,  # 6.4
    head_chunks=2.3,  # 1.9 of 2, 2.2 of 4
    dequantised=0,
    growing_layers=1.7,
    sampler_copies=3,
    runtime=128 * 2**20,
    measured=True,
)
_CUDA = BackendConstants(
    fused_head_dim=128,
    backward_blocks=2.0,  # 2.0 of 16-bit models on the CPU, whose slopes are cast to float32; less than the head here
    checkpoint_blocks=2.6,  # 2.1 to 2.5
    delta_states=3.5,  # 3.0 to 3.6
    delta_together=True,  # the host launches ahead, and what is launched holds its arrays
    chunk=(2**25, 256),
    head_copies=2,  # logits, slopes and the slopes passed on, in 16 bits
    head_chunks=1,  # 0.8 to 1.5
    dequantised=1,
    growing_layers=7.5,  # 4.9 to 7.5, launched ahead
    sampler_copies=3,
    runtime=512 * 2**20,
    measured=True,
)
_METAL = BackendConstants(
    fused_head_dim=0,
    backward_blocks=2.3,  # 2.0 of one block to 3.0 of eight, 16-bit on the CPU
    checkpoint_blocks=3.0,  # 2.8 to 3.0, so too
    delta_states=0.1,  # assumed: there the operation is a kernel in both directions
    delta_together=False,
    chunk=(2**22, 128),
    head_copies=6.5,
    head_chunks=2.3,
    dequantised=0,
    growing_layers=1.7,
    sampler_copies=3,
    runtime=128 * 2**20,
    measured=False,
)
BACKENDS: dict[Backend, BackendConstants] = {"cpu": _CPU, "cuda": _CUDA, "metal": _METAL}

# --- Quantised weights -----------------------------------------------------------------------------------------------
ROUTER_BITS = (
    8  # most mixtures keep router and shared-expert gate at 8 bits, groups of 64; a few pack them like the rest
)
ROUTER_GROUP = 64
DEFAULT_GROUP = 64  # group_size of mlx-lm's converter, used where only the bits are known

# --- What `fit` will not go below, and the quantization that it advises -----------------------------------------------
MIN_GROUP_SIZE = 2  # a group of one has no baseline
MIN_COMPLETION_LEN = 32  # shorter answers are rarely a task
ADVISED_BITS = 4  # the usual size of a quantised model; fewer bits cost quality
