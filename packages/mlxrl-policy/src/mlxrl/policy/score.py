"""What the policy says of given tokens: log-probabilities, entropies, and whether they are its first choice."""

from numbers import Integral
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlxrl.policy.head import Head, blocks_of, split_head
from mlxrl.policy.head_rows import chunks_with_slopes, recomputed_chunks, row_scorer
from mlxrl.policy.rows import on_cuda
from mlxrl.policy.shared_prefix import plan_reading, read, shares_prefixes

# Logits that one chunk of the head may hold, and positions that it has at least: 2^22 float32 values are 16 MiB, and
# with a gradient some six arrays of that size live at a time, of two chunks or more. A large vocabulary still gets
# positions enough to keep its products busy. The CPU computes value by value: there small chunks cost no time.
CHUNK = 2**22, 128
CUDA_CHUNK = 2**25, 256
CPU_CHUNK = 2**19, 16


class Scores(NamedTuple):
    """Per-token results, float32 `[B, T]`, 0 where the mask is 0."""

    logprobs: mx.array
    entropy: mx.array
    is_top: mx.array
    """1 where no token is likelier."""


def score(
    model: nn.Module,
    token_ids: npt.ArrayLike,
    mask: npt.ArrayLike,
    *,
    temperature: float | npt.ArrayLike = 1.0,
    chunk_size: int | None = None,
    with_gradient: bool = False,
) -> Scores:
    """log softmax(logits / temperature) of each masked token given the tokens before it, and the entropy there.

    The head runs at the masked positions alone, `chunk_size` of them at a time: no array of B x T x V values exists in
    either pass. The log-probability alone carries a gradient.

    What rows begin with in common runs through the trunk once, with its gradient, where that saves a fifth of the
    padded tokens, the model's caches allow it and no dropout acts (each row draws masks of its own).

    Args:
        model: the policy.
        token_ids: int `[B, T]`, right-padded with any valid id.
        mask: bool or number `[B, T]`, non-zero at the tokens to score; column 0 has nothing before it and must be 0.
        temperature: sampling temperature above 0, a number or `[B, T]`.
        chunk_size: positions per chunk of the head; by default as many as keep a chunk within 2^22 logits, but 128 at
            least; on CUDA 2^25 and 256, on the CPU 2^19 and 16.
        with_gradient: whether a gradient will be taken. It is the same either way: where nothing in the head is
            trained, True computes the head's part of it beside the logits, and the backward pass need not run the
            head again.

    Returns:
        Scores of shape `[B, T]`, float32.

    Raises:
        ValueError: rows differ in length, shapes differ, token_ids are no whole numbers or not in the vocabulary,
            column 0 is masked in, a temperature is not above 0 and finite, or chunk_size is no whole number from 1 on.
    """
    token_ids_B_T, mask_B_T = _array("token_ids", token_ids), _array("mask", mask) != 0
    if token_ids_B_T.ndim != 2 or mask_B_T.shape != token_ids_B_T.shape:
        raise ValueError(
            f"token_ids and mask must have one shape [B, T], got {token_ids_B_T.shape} and {mask_B_T.shape}."
        )
    if token_ids_B_T.size and token_ids_B_T.dtype.kind not in "iu":
        raise ValueError(f"token_ids must be whole numbers, got {token_ids_B_T.dtype}; cast them to an integer type.")
    if mask_B_T[:, :1].any():
        raise ValueError("mask must be 0 in column 0: the first token has no context to be predicted from.")
    temperatures = _array("temperature", temperature, np.float32)
    try:
        temperature_B_T = np.broadcast_to(temperatures, token_ids_B_T.shape)
    except ValueError as error:
        raise ValueError(
            f"temperature must be a number or of token_ids' shape {token_ids_B_T.shape}, got {temperatures.shape}."
        ) from error
    if not ((temperature_B_T[mask_B_T] > 0) & (temperature_B_T[mask_B_T] < np.inf)).all():
        raise ValueError(f"temperature must be above 0 and finite to score tokens, got {temperature}.")
    if chunk_size is not None and (not isinstance(chunk_size, Integral) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}; None chooses one.")

    rows_M, columns_M = np.nonzero(mask_B_T)
    if rows_M.size == 0:
        zeros = mx.zeros(token_ids_B_T.shape)
        return Scores(zeros, zeros, zeros)
    targets_M = mx.array(token_ids_B_T[rows_M, columns_M].astype(np.int32))
    temperature_M = mx.array(temperature_B_T[rows_M, columns_M])

    halves = split_head(model)
    trunk, head = halves if halves is not None else (model, _identity)
    read_rows, read_M = np.unique(rows_M, return_inverse=True)  # the rows with a token to score
    ends = [columns_M[read_M == i].max() for i in range(len(read_rows))]  # the last such token itself is not read
    inputs = [token_ids_B_T[row, :end] for row, end in zip(read_rows, ends, strict=True)]
    reading = plan_reading(inputs, share=shares_prefixes(model))
    hidden_H_D, places_R_W = read(model, trunk, inputs, reading)
    hidden_M_D = hidden_H_D[mx.array(places_R_W[read_M, columns_M - 1])]

    vocabulary = _vocabulary_size(head, hidden_M_D)
    if not (token_ids_B_T.min() >= 0 and token_ids_B_T.max() < vocabulary):
        raise ValueError(
            f"token_ids must be from 0 to {vocabulary - 1}, the model's vocabulary, got {token_ids_B_T.min()} to "
            f"{token_ids_B_T.max()}."
        )
    logits, positions = CPU_CHUNK if mx.default_device().type == mx.cpu else CUDA_CHUNK if on_cuda() else CHUNK
    size = chunk_size or max(positions, logits // vocabulary)
    parameters = _outside_the_blocks(model)
    if with_gradient and halves is not None and not parameters:
        *results, _ = chunks_with_slopes(head, size, targets_M, temperature_M)(hidden_M_D)
    else:
        scorer = row_scorer(model, head, list(parameters))
        results = recomputed_chunks(scorer, size, targets_M, temperature_M)(list(parameters.values()), hidden_M_D)

    places = np.full(token_ids_B_T.shape, rows_M.size, dtype=np.int32)  # unscored tokens read the 0 at the end
    places[rows_M, columns_M] = np.arange(rows_M.size)
    places_B_T, zero = mx.array(places), mx.zeros(1)
    return Scores(*(mx.concatenate([values, zero])[places_B_T] for values in results))


def _array(name: str, values: npt.ArrayLike, dtype: Any = None) -> npt.NDArray[Any]:
    try:
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers, its rows padded to one length; numpy says: {error}") from error


def _identity(logits: mx.array) -> mx.array:
    return logits


def _vocabulary_size(head: Head, hidden_M_D: mx.array) -> int:
    return head(hidden_M_D[:1]).shape[-1]  # lazy: the shape is known without computing anything


def _outside_the_blocks(model: nn.Module) -> dict[str, mx.array]:
    """Trainable parameters the head may read: an adapter on the head or on a tied embedding; mostly none."""
    inside = {id(value) for block in blocks_of(model) for _, value in tree_flatten(block.trainable_parameters())}
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    return {name: value for name, value in trainable.items() if id(value) not in inside}
