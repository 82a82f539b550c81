"""The prediction: bytes of a run by part, and its peak."""

import math
from dataclasses import dataclass

from mlxrl.memory.constants import (
    ADAPTER_BYTES,
    BACKWARD_BLOCKS,
    BATCH_TOKEN_BYTES,
    CHECKPOINT_BLOCKS,
    DORA_NORM_COPIES,
    FIXED_OVERHEAD,
    FLOAT32_BYTES,
    GRADIENT_COPIES,
    HEAD_COPIES,
    PREFILL_CHUNK,
    PREFIX_CACHES,
    REFERENCE_TOKEN_BYTES,
    SAMPLER_COPIES,
    SLACK,
)
from mlxrl.memory.model import ModelShape
from mlxrl.memory.run import RunShape


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes of a run by part; rollout and update take turns, so the larger of the two counts.

    Attributes:
        weights: the model, quantised or not; a reference needs no second copy.
        merged_copy: the dense copy that rollouts sample from, where there is one.
        adapters: LoRA parameters, their gradients, and the optimizer's states.
        kv_cache: caches of all rows decoded at once.
        rollout_activations: the worst moment of prefill or of sampling.
        update_activations: what the backward pass of one micro-batch holds.
        head: logits of a few chunks of positions and what is computed from them, in the update.
        overhead: batch arrays, runtime, allocator slack.
        notes: what is extrapolated or assumed rather than measured, one sentence each.
    """

    weights: int
    merged_copy: int
    adapters: int
    kv_cache: int
    rollout_activations: int
    update_activations: int
    head: int
    overhead: int
    notes: tuple[str, ...]

    @property
    def rollout(self) -> int:
        """Bytes that only the rollout holds."""
        return self.kv_cache + self.rollout_activations

    @property
    def update(self) -> int:
        """Bytes that only the update holds."""
        return self.update_activations + self.head

    @property
    def peak(self) -> int:
        """weights + merged_copy + adapters + max(rollout, update) + overhead."""
        return self.weights + self.merged_copy + self.adapters + max(self.rollout, self.update) + self.overhead


def estimate(model: ModelShape, run: RunShape) -> MemoryEstimate:
    """Predicts the peak device memory of a run.

        peak = weights + merged_copy + adapters
               + max(kv_cache + rollout_activations, update_activations + head) + overhead

    The prediction never falls when rows, lengths, turns, width, cache budget, micro-batch, rank, states or chunk grow.

    Args:
        model: from `ModelShape.from_config` or `ModelShape.from_path`.
        run: lengths in tokens, sizes in rows.

    Returns:
        The bytes by part, with notes on what is not measured.
    """
    adapter_copies = ADAPTER_BYTES * (1 + GRADIENT_COPIES) + FLOAT32_BYTES * run.optimizer_states
    adapter_copies += ADAPTER_BYTES * run.has_reference_adapter
    adapters = adapter_copies * model.lora_parameters(run.lora_rank, run.use_dora)
    kv_cache = _kv_cache(model, run)
    rollout_activations = _rollout_activations(model, run)
    update_activations = _update_activations(model, run)
    head = math.ceil(HEAD_COPIES * FLOAT32_BYTES * model.vocab_size * run.head_positions(model.vocab_size))
    token_bytes = BATCH_TOKEN_BYTES + REFERENCE_TOKEN_BYTES * run.has_reference
    moving = adapters + max(kv_cache + rollout_activations, update_activations + head)
    overhead = FIXED_OVERHEAD + run.rows * run.sequence_length * token_bytes + math.ceil(SLACK * moving)
    return MemoryEstimate(
        weights=model.weight_bytes,
        merged_copy=model.merged_copy_bytes if run.has_merged_copy else 0,
        adapters=adapters,
        kv_cache=kv_cache,
        rollout_activations=rollout_activations,
        update_activations=update_activations,
        head=head,
        overhead=overhead,
        notes=_notes(model, run),
    )


def _kv_cache(model: ModelShape, run: RunShape) -> int:
    """Rows in flight, prompts that wait to be forked, and the second copy of one block's cache while it grows.

    A budget counts tokens; each row of a batch that keeps to it may hold one step more than its tokens fill.
    """
    row = model.cache_bytes(run.sequence_length)
    rows = run.width * row
    if run.kv_budget_bytes is not None:
        steps = sum(block.cache_bytes(1, model.dtype_bytes) for block in model.blocks if block.delta is None)
        rows = min(rows, max(row, run.kv_budget_bytes + run.width * steps))
    widest = max(block.cache_bytes(run.sequence_length, model.dtype_bytes) for block in model.blocks)
    prefixes = min(PREFIX_CACHES, run.groups_per_step) * model.cache_bytes(run.max_prompt_len)
    return rows + math.ceil(rows * widest / row) + prefixes


def _rollout_activations(model: ModelShape, run: RunShape) -> int:
    """The larger of one block's prefill and one step's logits; texts of several rows are read together."""
    prompts = min(run.groups_per_step, run.width) * run.max_prompt_len
    tokens = prompts if run.max_turns == 1 else max(prompts, run.width * run.sequence_length)
    widest = max(block.forward_bytes(run.sequence_length, model.dtype_bytes) for block in model.blocks)
    logits = SAMPLER_COPIES * FLOAT32_BYTES * run.width * model.vocab_size
    return max(math.ceil(min(tokens, PREFILL_CHUNK) * widest), logits) + _dora_layer(model, run)


def _update_activations(model: ModelShape, run: RunShape) -> int:
    """What the blocks keep of a micro-batch, and what is live while one block's gradient is taken.

    No gradient goes below the first block with an adapter. A DoRA layer keeps its output before the magnitude and, of
    a quantised base, the dense weights that it multiplied by.
    """
    first = next((number for number, block in enumerate(model.blocks) if block.adapted_linears), 0)
    blocks = model.blocks[first:]
    kept = [block.kept_bytes(run.sequence_length, model.dtype_bytes, run.recurrence) for block in blocks]
    outputs = [sum(x.active * x.outputs for x in block.adapted_linears) * run.use_dora for block in blocks]
    weights = [bytes_of_block * run.use_dora for bytes_of_block in model.unpacked_bytes[first:]]
    if run.gradient_checkpointing:
        per_token = len(kept) * model.hidden_size * model.dtype_bytes + CHECKPOINT_BLOCKS * max(kept)
        per_token += max(outputs) * model.dtype_bytes
        dense = max(weights)
    else:
        per_token = sum(kept) + BACKWARD_BLOCKS * max(kept) + sum(outputs) * model.dtype_bytes
        dense = sum(weights)
    return math.ceil(run.micro_batch_tokens * per_token) + dense + _dora_layer(model, run)


def _dora_layer(model: ModelShape, run: RunShape) -> int:
    """The widest DoRA layer at work: its matrix in the dtype, and in float32 while its norms are taken."""
    widest = max((x.weights for block in model.blocks for x in block.adapted_linears), default=0)
    return run.use_dora * widest * (model.dtype_bytes + DORA_NORM_COPIES * FLOAT32_BYTES)


def _notes(model: ModelShape, run: RunShape) -> tuple[str, ...]:
    hybrid = any(block.delta is not None for block in model.blocks)
    mixture = any(linear.experts > 1 for block in model.blocks for linear in block.linears)
    notes = [
        "Activation counts come from tiny models on MLX's CPU backend; Metal and CUDA are extrapolated.",
        "Attention in training is taken as unfused: one score per head and pair of positions.",
        "Sampler copies, the fixed overhead and the slack are assumptions.",
    ]
    if not model.known_family:
        notes.append(f"model_type {model.model_type!r} is unknown and counted as a Llama-like model.")
    if hybrid and run.recurrence == "unrolled":
        notes.append("Gated-delta layers are taken as an unrolled loop that keeps two states a token.")
    if hybrid and run.recurrence == "fused":
        notes.append("The fused gated-delta kernel is taken to keep one state per 64 tokens; this is not measured.")
    if mixture:
        notes.append("Activations and adapters of expert layers are derived from their shapes, not measured.")
    return tuple(notes)
