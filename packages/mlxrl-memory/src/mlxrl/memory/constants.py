"""Every number of the memory model that is not read from a config, each with its reason.

"Measured" means: the slope of `mx.get_peak_memory` over layers and tokens, MLX 0.32 CPU backend, tiny Qwen3 and Qwen3.5
models of mlx-lm with float32 LoRA on every linear layer. Other backends differ; calibration changes this file alone.
"""

FLOAT32_BYTES = 4

# --- Adapters -------------------------------------------------------------------------------------------------------
ADAPTER_BYTES = 4  # LoRA matrices are trained in float32, whatever the model's dtype
GRADIENT_COPIES = 2  # the sum over micro-batches, and the fresh gradient that is added to it
DORA_NORM_COPIES = 2  # float32 of one layer's matrix, while its norms are taken: the low-rank product, and the sum

# --- What autodiff keeps in one block, in elements per token (exact against the float32 measurement) -----------------
KEPT_HIDDEN = 2  # inputs of the two norms, hidden wide
KEPT_QUERY = 3  # queries before their norm, after the rotation, and scaled: heads x head_dim wide
KEPT_GATE = 3  # attention output gate: the gate, its sigmoid, the ungated output; not measured alone
KEPT_KV = 3  # keys before the norm and after the rotation, values: kv heads x head_dim wide
KEPT_FEED_FORWARD = 4  # gate, up, sigmoid and the SiLU between them; the product is the down projection's LoRA input
KEPT_EXPERT_HIDDEN = 2  # per chosen expert: the gathered input and the output before weighing; not measured
KEPT_ROUTER = 2  # router scores and probabilities, float32; not measured
KEPT_SCORES = 1  # softmax of the attention scores per head and context position: training attention is not fused
KEPT_CONV = 4  # gated delta: convolution input and output, sigmoid, SiLU
KEPT_DELTA_KEY = 2  # gated delta: normalised q and k; counted once more where key heads repeat per value head
KEPT_DELTA_VALUE = 4  # gated delta: output gate z, recurrence output, normed, gated
KEPT_STATES_UNROLLED = 2  # gated delta: recurrent states a token leaves in a step-by-step loop (measured 2.0)
DELTA_CHUNK = 64  # gated delta, fused kernel: tokens per kept state; assumed, not measured

# --- Live at the worst moment of the backward pass, in units of the widest block's kept bytes ------------------------
BACKWARD_BLOCKS = 1.4  # without checkpointing, on top of what all blocks keep (measured 1.27 and 1.33)
CHECKPOINT_BLOCKS = 3.3  # with it, on top of the block inputs: recomputed block, cotangents (measured 2.9 and 3.2)

# --- The head --------------------------------------------------------------------------------------------------------
HEAD_CHUNK_LOGITS = 2**22  # logits of a chunk when no chunk is given, as `mlxrl.policy.score` has it
HEAD_CHUNK_POSITIONS = 128  # and at least so many positions
HEAD_COPIES = 6.5  # float32 arrays of a chunk's logits, its slopes computed beside it (measured 6.4; 4.3 without)
HEAD_CHUNKS = 2.3  # chunks whose arrays exist at once, the host launching ahead (measured 1.9 of 2, 2.2 of 4)

# --- Rollout ---------------------------------------------------------------------------------------------------------
CACHE_STEP = 256  # mlx-lm's caches grow in steps of 256 positions
PREFIX_CACHES = 2  # prompts whose cache waits to be forked: the current group's and the next one's; assumed
PREFILL_CHUNK = 2048  # positions that one pass reads, of one row or of several together
SAMPLER_COPIES = 3  # float32 [rows, vocabulary]: logits, log-probs, filtered or sorted; assumed

# --- The rest --------------------------------------------------------------------------------------------------------
BATCH_TOKEN_BYTES = 32  # ids, roles, and six float32 a token: log-probs, advantages, weights, ...
REFERENCE_TOKEN_BYTES = 4  # one more float32 log-prob a token
FIXED_OVERHEAD = 128 * 2**20  # runtime, kernels, tokenizer buffers; assumed
SLACK = 0.10  # of adapters, caches and activations: allocator slack, and the 8 % that 16-bit blocks measured higher

# --- Quantised weights -----------------------------------------------------------------------------------------------
ROUTER_BITS = (
    8  # most mixtures keep router and shared-expert gate at 8 bits, groups of 64; a few pack them like the rest
)
ROUTER_GROUP = 64
DEFAULT_GROUP = 64  # group_size of mlx-lm's converter, used where only the bits are known

# --- What `fit` will not go below ------------------------------------------------------------------------------------
MIN_GROUP_SIZE = 2  # a group of one has no baseline
MIN_COMPLETION_LEN = 32  # shorter answers are rarely a task
