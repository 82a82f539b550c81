"""Log-probabilities and entropies of given tokens under the policy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy.head import Head, blocks_of, split_head

# Logits that one chunk of the head may hold: 2^26 float32 values are 256 MiB, whatever the vocabulary.
CHUNK_LOGITS = 2**26


class Scores(NamedTuple):
    """Per-token results, float32 `[B, T]`, 0 where the mask is 0."""

    logprobs: mx.array
    entropy: mx.array


def score(
    model: nn.Module,
    token_ids: npt.ArrayLike,
    mask: npt.ArrayLike,
    *,
    temperature: float | npt.ArrayLike = 1.0,
    chunk_size: int | None = None,
) -> Scores:
    """log softmax(logits / temperature) of each masked token given the tokens before it, and the entropy there.

    The head runs at the masked positions alone, `chunk_size` of them at a time, and each chunk is computed again in
    the backward pass: no array of B x T x V values exists in either pass. The entropy carries no gradient.

    Args:
        model: the policy.
        token_ids: int `[B, T]`, right-padded with any valid id.
        mask: bool or number `[B, T]`, non-zero at the tokens to score; column 0 has nothing before it and must be 0.
        temperature: sampling temperature above 0, a number or `[B, T]`.
        chunk_size: positions per chunk of the head; by default as many as keep a chunk within 2^26 logits.

    Returns:
        Scores of shape `[B, T]`, float32.

    Raises:
        ValueError: shapes differ, column 0 is masked in, a temperature is not above 0 and finite, or chunk_size is
            below 1.
    """
    token_ids_B_T, mask_B_T = np.asarray(token_ids), np.asarray(mask) != 0
    if token_ids_B_T.ndim != 2 or mask_B_T.shape != token_ids_B_T.shape:
        raise ValueError(
            f"token_ids and mask must have one shape [B, T], got {token_ids_B_T.shape} and {mask_B_T.shape}."
        )
    if mask_B_T[:, :1].any():
        raise ValueError("mask must be 0 in column 0: the first token has no context to be predicted from.")
    temperature_B_T = np.broadcast_to(np.asarray(temperature, dtype=np.float32), token_ids_B_T.shape)
    if not ((temperature_B_T[mask_B_T] > 0) & (temperature_B_T[mask_B_T] < np.inf)).all():
        raise ValueError(f"temperature must be above 0 and finite to score tokens, got {temperature}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; None chooses one.")

    rows_M, columns_M = np.nonzero(mask_B_T)
    if rows_M.size == 0:
        zeros = mx.zeros(token_ids_B_T.shape)
        return Scores(zeros, zeros)
    targets_M = mx.array(token_ids_B_T[rows_M, columns_M].astype(np.int32))
    temperature_M = mx.array(temperature_B_T[rows_M, columns_M])
    flat_M = mx.array((rows_M * (token_ids_B_T.shape[1] - 1) + columns_M - 1).astype(np.int32))

    inputs_B_T = mx.array(token_ids_B_T[:, :-1].astype(np.int32))
    halves = split_head(model)
    trunk, head = halves if halves is not None else (model, _identity)
    hidden_M_D = trunk(inputs_B_T).flatten(0, 1)[flat_M]
    size = chunk_size or max(1, CHUNK_LOGITS // _vocabulary_size(head, hidden_M_D))
    parameters = _outside_the_blocks(model)
    run = _in_chunks(_row_scorer(model, head, list(parameters)), size, targets_M, temperature_M)
    logprobs_M, entropy_M = run(list(parameters.values()), hidden_M_D)

    places = np.full(token_ids_B_T.shape, rows_M.size, dtype=np.int32)  # unscored tokens read the 0 at the end
    places[rows_M, columns_M] = np.arange(rows_M.size)
    places_B_T, zero = mx.array(places), mx.zeros(1)
    return Scores(*(mx.concatenate([values, zero])[places_B_T] for values in (logprobs_M, entropy_M)))


def _identity(logits: mx.array) -> mx.array:
    return logits


def _vocabulary_size(head: Head, hidden_M_D: mx.array) -> int:
    return head(hidden_M_D[:1]).shape[-1]  # lazy: the shape is known without computing anything


def _outside_the_blocks(model: nn.Module) -> dict[str, mx.array]:
    """Trainable parameters the head may read: an adapter on the head or on a tied embedding; mostly none."""
    inside = {id(value) for block in blocks_of(model) for _, value in tree_flatten(block.trainable_parameters())}
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    return {name: value for name, value in trainable.items() if id(value) not in inside}


RowScorer = Callable[[list[mx.array], mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def _row_scorer(model: nn.Module, head: Head, names: list[str]) -> RowScorer:
    """The head and log-softmax of some rows, as a function of all that a gradient may flow to."""

    def run(
        parameters: list[mx.array], hidden_C_D: mx.array, targets_C: mx.array, temperature_C: mx.array
    ) -> tuple[mx.array, mx.array]:
        model.update(tree_unflatten(list(zip(names, parameters, strict=True))))
        logits_C_V = head(hidden_C_D).astype(mx.float32) / temperature_C[:, None]
        shifted_C_V = logits_C_V - mx.stop_gradient(logits_C_V.max(axis=-1, keepdims=True))
        exp_C_V = mx.exp(shifted_C_V)
        total_C = exp_C_V.sum(axis=-1)
        log_total_C = mx.log(total_C)
        logprobs_C = mx.take_along_axis(shifted_C_V, targets_C[:, None], axis=-1)[:, 0] - log_total_C
        # entropy = log total - mean of the shifted logits; a logit of -inf has weight 0 there, not NaN
        mean_C = mx.where(exp_C_V > 0, exp_C_V * shifted_C_V, 0).sum(axis=-1) / total_C
        return logprobs_C, log_total_C - mean_C

    return run


def _in_chunks(
    score_rows: RowScorer, size: int, targets_M: mx.array, temperature_M: mx.array
) -> Callable[[list[mx.array], mx.array], tuple[mx.array, mx.array]]:
    """`score_rows` on `size` rows at a time; the backward pass computes each chunk again.

    In both passes a chunk waits for the one before it (`mx.depends`): left to itself, MLX starts many chunks and holds
    the logits of all.
    """
    cuts = list(range(size, targets_M.size, size))
    targets, temperatures = mx.split(targets_M, cuts), mx.split(temperature_M, cuts)

    def forward(parameters: list[mx.array], hidden_M_D: mx.array) -> tuple[mx.array, mx.array]:
        results: list[tuple[mx.array, mx.array]] = []
        for hidden_C_D, *about in zip(mx.split(hidden_M_D, cuts), targets, temperatures, strict=True):
            if results:
                (hidden_C_D,) = mx.depends([hidden_C_D], list(results[-1]))
            results.append(score_rows(parameters, hidden_C_D, *about))
        logprobs, entropies = ([result[i] for result in results] for i in (0, 1))
        return mx.concatenate(logprobs), mx.concatenate(entropies)

    def backward(
        primals: tuple[list[mx.array], mx.array],
        cotangents: tuple[mx.array, mx.array],
        outputs: tuple[mx.array, mx.array],
    ) -> tuple[list[mx.array], mx.array]:
        parameters, hidden_M_D = primals
        cotangent_M = cotangents[0]  # the entropy carries no gradient
        sums, slopes = [mx.zeros_like(value) for value in parameters], []
        chunks = zip(
            *(mx.split(values, cuts) for values in (hidden_M_D, cotangent_M)), targets, temperatures, strict=True
        )
        for hidden_C_D, cotangent_C, targets_C, temperature_C in chunks:

            def logprobs(*inputs: mx.array, targets_C=targets_C, temperature_C=temperature_C) -> mx.array:
                return score_rows(list(inputs[:-1]), inputs[-1], targets_C, temperature_C)[0]

            if slopes:
                hidden_C_D, cotangent_C = mx.depends([hidden_C_D, cotangent_C], [*sums, slopes[-1]])
            _, (*gradients, slope_C_D) = mx.vjp(logprobs, [*parameters, hidden_C_D], [cotangent_C])
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            slopes.append(slope_C_D)
        return sums, mx.concatenate(slopes)

    run: Any = mx.custom_function(forward)
    run.vjp(backward)
    return run
