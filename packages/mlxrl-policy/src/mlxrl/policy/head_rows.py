"""What the head says of rows of hidden states and their targets, a chunk of rows at a time.

In both passes a chunk depends on the one before it (`mx.depends`): left to itself, MLX starts many chunks and holds the
logits of all. On the CPU, where the host allocates ahead, the arrays of about two chunks still exist at once.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxrl.policy.head import Head
from mlxrl.policy.head_kernel import judged_by_kernel
from mlxrl.policy.rows import dequantized_once, on_cuda

Results = tuple[mx.array, mx.array, mx.array]
"""Log-probabilities of the targets, entropies, and 1 where the target is the likeliest choice; float32."""
WithSlopes = tuple[mx.array, mx.array, mx.array, mx.array]
WEIGHTLESS = -1000.0
"""A logit that far below the largest has no weight: its exponential is 0 in float32."""
RowScorer = Callable[[list[mx.array], mx.array, mx.array, mx.array], Results]


def row_scorer(model: nn.Module, head: Head, names: list[str]) -> RowScorer:
    """The head and log-softmax of some rows, as a function of all that a gradient may flow to."""

    def run(parameters: list[mx.array], hidden_C_D: mx.array, targets_C: mx.array, temperature_C: mx.array) -> Results:
        model.update(tree_unflatten(list(zip(names, parameters, strict=True))))
        logprobs_C, entropy_C, is_top_C, _ = judged(head(hidden_C_D), targets_C, temperature_C)
        return logprobs_C, mx.stop_gradient(entropy_C), mx.stop_gradient(is_top_C)

    return run


def judged(logits_C_V: mx.array, targets_C: mx.array, temperature_C: mx.array) -> WithSlopes:
    """What rows of logits say of their targets, and d logprob / d logits = (1[v = target] - softmax) / temperature."""
    logits_C_V = logits_C_V.astype(mx.float32) / temperature_C[:, None]
    shifted_C_V = logits_C_V - mx.stop_gradient(logits_C_V.max(axis=-1, keepdims=True))
    exp_C_V = mx.exp(shifted_C_V)
    total_C = exp_C_V.sum(axis=-1)
    log_total_C = mx.log(total_C)
    target_C = mx.take_along_axis(shifted_C_V, targets_C[:, None], axis=-1)[:, 0]
    # entropy = log total - mean of the shifted logits; a logit of -inf has weight 0 there, not NaN
    mean_C = (exp_C_V * mx.maximum(shifted_C_V, WEIGHTLESS)).sum(axis=-1) / total_C
    is_top_C = (target_C == 0).astype(mx.float32)  # the largest logit was shifted to 0
    is_target_C_V = mx.arange(shifted_C_V.shape[-1]) == targets_C[:, None]
    slope_C_V = (is_target_C_V - exp_C_V / total_C[:, None]) / temperature_C[:, None]
    return target_C - log_total_C, log_total_C - mean_C, is_top_C, slope_C_V


def recomputed_chunks(
    score_rows: RowScorer, size: int, targets_M: mx.array, temperature_M: mx.array
) -> Callable[[list[mx.array], mx.array], Results]:
    """`score_rows` on `size` rows at a time; the backward pass computes each chunk again."""
    cuts = list(range(size, targets_M.size, size))
    targets, temperatures = mx.split(targets_M, cuts), mx.split(temperature_M, cuts)

    @dequantized_once()
    def forward(parameters: list[mx.array], hidden_M_D: mx.array) -> Results:
        results: list[Results] = []
        for hidden_C_D, *about in zip(mx.split(hidden_M_D, cuts), targets, temperatures, strict=True):
            if results:
                (hidden_C_D,) = mx.depends([hidden_C_D], list(results[-1]))
            results.append(score_rows(parameters, hidden_C_D, *about))
        logprobs_M, entropy_M, is_top_M = (mx.concatenate(list(parts)) for parts in zip(*results, strict=True))
        return logprobs_M, entropy_M, is_top_M

    @dequantized_once()
    def backward(
        primals: tuple[list[mx.array], mx.array], cotangents: Results, outputs: Results
    ) -> tuple[list[mx.array], mx.array]:
        parameters, hidden_M_D = primals
        cotangent_M = cotangents[0]  # the others carry no gradient
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


def chunks_with_slopes(
    head: Head, size: int, targets_M: mx.array, temperature_M: mx.array
) -> Callable[[mx.array], WithSlopes]:
    """What a frozen head says of `size` rows at a time, with d logprob / d hidden of each row as a last result.

    Rows do not see each other, so one product with the head's transpose gives the slopes of all rows of a chunk while
    its logits are there, and the backward pass only scales them: the head is never run again. The slopes have the
    hidden states' dtype, as the gradient that any backward pass sends into the trunk.
    """
    cuts = list(range(size, targets_M.size, size))
    is_gpu = mx.default_device().type == mx.DeviceType.gpu
    judge = judged_by_kernel if on_cuda() else _judged_in_few_kernels if is_gpu else judged

    @dequantized_once()
    def forward(hidden_M_D: mx.array) -> WithSlopes:
        results: list[WithSlopes] = []
        chunks = zip(*(mx.split(values, cuts) for values in (hidden_M_D, targets_M, temperature_M)), strict=True)
        for hidden_C_D, targets_C, temperature_C in chunks:
            if results:
                (hidden_C_D,) = mx.depends([hidden_C_D], list(results[-1]))

            def along_slope(
                hidden_C_D: mx.array, targets_C=targets_C, temperature_C=temperature_C
            ) -> tuple[mx.array, Results]:
                logits_C_V = head(hidden_C_D)
                logprobs_C, entropy_C, is_top_C, slope_C_V = judge(
                    mx.stop_gradient(logits_C_V), targets_C, temperature_C
                )
                along = (logits_C_V * slope_C_V.astype(logits_C_V.dtype)).sum()  # d along / d logits is the slope
                return along, (logprobs_C, entropy_C, is_top_C)

            (_, of_rows), slope_C_D = mx.value_and_grad(along_slope)(hidden_C_D)
            results.append((*of_rows, slope_C_D))
        logprobs_M, entropy_M, is_top_M, slope_M_D = (mx.concatenate(list(p)) for p in zip(*results, strict=True))
        return logprobs_M, entropy_M, is_top_M, slope_M_D

    def backward(hidden_M_D: mx.array, cotangents: WithSlopes, outputs: WithSlopes) -> mx.array:
        return (cotangents[0][:, None] * outputs[3]).astype(hidden_M_D.dtype)

    run: Any = mx.custom_function(forward)
    run.vjp(backward)
    return run


_judged_in_few_kernels: Any = mx.compile(judged)
