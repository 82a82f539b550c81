"""The prediction: bytes of a run by part, and its peak."""

import math
from dataclasses import dataclass

from mlxrl.memory.constants import (
    ADAPTER_BYTES,
    BATCH_TOKEN_BYTES,
    CACHE_STEP,
    FLOAT32_BYTES,
    FORKED_SLOPES,
    GRADIENT_COPIES,
    PREFILL_CHUNK,
    REFERENCE_TOKEN_BYTES,
    TURN_COPIES,
)
from mlxrl.memory.layers import Block
from mlxrl.memory.model import ModelShape
from mlxrl.memory.run import Reading, RunShape


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes of a run by part; rollout and update take turns, so the larger of the two counts.

    Attributes:
        weights: the model, quantised or not; a reference needs no second copy.
        merged_copy: the dense copy that rollouts sample from, where there is one.
        adapters: LoRA parameters and the optimizer's states.
        kv_cache: caches of all rows decoded at once, with their copies between turns.
        rollout_activations: the worst moment of reading or of sampling.
        gradients: of the adapters, two trees.
        update_activations: what the blocks keep of one micro-batch, and either the head's chunks at the end of its
            forward pass or what one block's backward pass needs, whichever is more.
        batch: arrays of the optimizer batch.
        runtime: what the process holds beside MLX's arrays.
        extrapolated: what of the activations is derived rather than measured, a sentence each; where there is any, the
            run may take more than `peak`.
    """

    weights: int
    merged_copy: int
    adapters: int
    kv_cache: int
    rollout_activations: int
    gradients: int
    update_activations: int
    batch: int
    runtime: int
    extrapolated: tuple[str, ...]

    @property
    def held(self) -> int:
        """Bytes held from the start of a run to its end: weights + merged_copy + adapters."""
        return self.weights + self.merged_copy + self.adapters

    @property
    def rollout(self) -> int:
        """Bytes that only the rollout holds."""
        return self.kv_cache + self.rollout_activations

    @property
    def update(self) -> int:
        """Bytes that only the update holds."""
        return self.gradients + self.update_activations + self.batch

    @property
    def mlx_peak(self) -> int:
        """What `mx.get_peak_memory` will say: held + max(rollout, update)."""
        return self.held + max(self.rollout, self.update)

    @property
    def peak(self) -> int:
        """What the run needs: mlx_peak + runtime."""
        return self.mlx_peak + self.runtime


def estimate(model: ModelShape, run: RunShape) -> MemoryEstimate:
    """Predicts the peak device memory of a run.

        peak = weights + merged_copy + adapters
               + max(kv_cache + rollout_activations, gradients + update_activations + batch) + runtime

    The prediction never falls when rows, lengths, turns, width, cache budget, micro-batch, rank, states or chunk grow.
    A quantised model takes no more than its dense original, but where dense weights are there beside the packed ones
    and most of the model: the head's on CUDA, of a model that is almost all head; and those without an adapter in the
    merged copy of a float32 or float16 model, which else shares them.

    Args:
        model: from `ModelShape.from_config` or `ModelShape.from_path`, as it is loaded (`ModelShape.on`).
        run: lengths in tokens, sizes in rows.

    Returns:
        The bytes by part, and what is not measured.
    """
    parameters = model.lora_parameters(run.lora_rank, run.use_dora)
    copies = ADAPTER_BYTES * (1 + run.has_reference_adapter) + FLOAT32_BYTES * run.optimizer_states
    token_bytes = BATCH_TOKEN_BYTES + REFERENCE_TOKEN_BYTES * run.has_reference
    return MemoryEstimate(
        weights=model.weight_bytes,
        merged_copy=model.merged_copy_bytes if run.has_merged_copy else 0,
        adapters=copies * parameters,
        kv_cache=_kv_cache(model, run),
        rollout_activations=_rollout_activations(model, run),
        gradients=GRADIENT_COPIES * ADAPTER_BYTES * parameters,
        update_activations=_update_activations(model, run),
        batch=run.rows * run.sequence_length * token_bytes,
        runtime=run.constants.runtime,
        extrapolated=_extrapolated(model, run),
    )


def _kv_cache(model: ModelShape, run: RunShape) -> int:
    """The rows' caches; a budget counts tokens, and the cache of each row has room for a step more."""
    row = model.cache_bytes(run.row_positions)
    rows = run.width * row
    if run.kv_budget_bytes is not None:
        step = sum(block.cache_bytes(CACHE_STEP, model.dtype_bytes) for block in model.blocks if block.delta is None)
        rows = min(rows, max(row, run.kv_budget_bytes + run.width * step))
    return rows if run.max_turns == 1 else TURN_COPIES * rows


def _rollout_activations(model: ModelShape, run: RunShape) -> int:
    """A step's logits while caches grow, or what reading takes: a late prompt, or observations of several rows.

    The adapters' factors are there in the model's dtype. Prompts that are read before any row decodes take less than
    the rows' caches later on.
    """
    constants, size = run.constants, model.dtype_bytes
    growing = max((x.cache_bytes(run.row_positions, size) for x in model.blocks if x.delta is None), default=0)
    grown = min(run.width * growing, _kv_cache(model, run) * growing // model.cache_bytes(run.row_positions))
    logits = constants.sampler_copies * FLOAT32_BYTES * run.width * model.vocab_size
    decoding = constants.growing_layers * grown + logits
    tokens = run.prompt_length if run.max_turns == 1 else max(run.prompt_length, run.width * run.max_observation_len)
    reading = min(tokens, PREFILL_CHUNK) * max(_kept_bytes(model, run, block) for block in model.blocks)
    factors = size * model.lora_parameters(run.lora_rank)
    unpacked = model.unpacked_block_bytes + model.unpacked_head_bytes
    # those in flight, and the packed ones, are taken to be no more than a dense model
    dense = constants.dequantised * min(unpacked, max(0, size * model.parameters - model.weight_bytes))
    return factors + dense + math.ceil(max(decoding, reading))


def _kept_bytes(model: ModelShape, run: RunShape, block: Block) -> float:
    """Bytes per token that a gradient keeps of a block, attention scores included."""
    scores = block.score_bytes(run.sequence_length, model.dtype_bytes, run.constants.fused_head_dim)
    return block.kept_bytes(model.dtype_bytes) + scores


def _update_activations(model: ModelShape, run: RunShape) -> int:
    """What the blocks keep of a micro-batch, and what is live at the worst moment besides."""
    whole = _passed(model, run, checkpointing=False)
    return min(whole, _passed(model, run, checkpointing=True)) if run.gradient_checkpointing else whole


def _passed(model: ModelShape, run: RunShape, *, checkpointing: bool) -> int:
    """What a forward and backward pass takes, of the reading that takes the most.

    No gradient goes below the first block with an adapter. A DoRA layer keeps its output before the magnitude.
    """
    constants, size = run.constants, model.dtype_bytes
    first = next((number for number, block in enumerate(model.blocks) if block.adapted_linears), 0)
    blocks = model.blocks[first:]
    every = [_kept_bytes(model, run, block) for block in blocks]
    extra = size * sum(block.extra_kept for block in blocks)
    outputs = [size * sum(x.active * x.outputs for x in block.adapted_linears) * run.use_dora for block in blocks]
    states = constants.delta_states * max(block.delta.state_bytes if block.delta else 0 for block in blocks)
    if checkpointing:
        kept = len(blocks) * model.hidden_size * size
        working = constants.checkpoint_blocks * max(every) + max(outputs)
    else:
        kept = sum(every) + extra + sum(outputs)
        working = constants.backward_blocks * max(every)
    forked = 2 * size * sum(block.kv_width for block in blocks)
    head = constants.head_copies * FLOAT32_BYTES * model.vocab_size * run.head_positions(model.vocab_size)
    head += constants.dequantised * model.unpacked_head_bytes

    def bytes_of(reading: Reading) -> float:
        # the states of both passes exist at once where they are computed again
        together = states and (checkpointing or constants.delta_together)
        at_once = reading.tokens if together else reading.at_once
        # the slopes of what rows took over wait for the pass over their beginnings, while all else is small
        slopes = FORKED_SLOPES * forked * reading.forked if checkpointing else 0
        backward = slopes + (working + states) * at_once
        return kept * reading.tokens + forked * reading.forked + max(head, backward)

    return math.ceil(max(map(bytes_of, run.readings)))


def _extrapolated(model: ModelShape, run: RunShape) -> tuple[str, ...]:
    """What of the activations was not measured: a sentence each."""
    notes: list[str] = []
    if not run.constants.measured:
        notes.append(f"Activations are measured on other backends than {run.backend}.")
    if not model.known_family:
        notes.append(f"model_type {model.model_type!r} is unknown and counted as a Llama-like model.")
    elif run.constants.measured and run.backend not in model.measured:
        notes.append(
            f"Activations of model_type {model.model_type!r} are measured on {' and '.join(model.measured)}"
            f" and not on {run.backend}."
        )
    if any(linear.experts > 1 for block in model.blocks for linear in block.linears):
        notes.append("Activations and adapters of expert layers are derived from their shapes, not measured.")
    return tuple(notes)
