"""One optimizer step: the gradient of `sum(w * l)` over micro-batches, and the step along it."""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxrl.algo import Algorithm, Correction, KLEstimator, kl_penalty
from mlxrl.policy import checkpoint_blocks, dropout_active, shares_prefixes
from mlxrl.rollout import Role
from mlxrl.train.batch import TrainBatch
from mlxrl.train.metrics import Metrics
from mlxrl.train.scoring import check_limit, cut_micro_batches, rows_with, score_micro_batch

LARGEST_NORM = 2.0**64
"""Of a gradient: float32 does not hold the square of a larger one."""


class Objective(NamedTuple):
    """What is minimised over a batch: the algorithm's loss, a KL to the base, a world-model term."""

    algorithm: Algorithm
    beta: float = 0.0
    kl_estimator: KLEstimator | None = None
    echo_alpha: float = 0.0
    correction: Correction | None = None


Number = TypeVar("Number", mx.array, float)


class _Sums(NamedTuple, Generic[Number]):
    """Sums over the tokens of a micro-batch, besides the loss; of ACTION tokens, divided by their count at the end."""

    policy_loss: Number
    kl: Number
    echo_loss: Number
    echo_accuracy: Number
    tokens: Number
    ratio: Number
    clipped: Number
    entropy: Number
    difference: Number
    largest_difference: Number


def optimizer_step(
    *,
    model: nn.Module,
    optimizer: optim.Optimizer,
    batch: TrainBatch,
    algorithm: Algorithm,
    beta: float = 0.0,
    pad_token_id: int = 0,
    use_checkpoint: bool | None = None,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    max_grad_norm: float | None = None,
    kl_estimator: KLEstimator | None = None,
    echo_alpha: float = 0.0,
    correction: Correction | None = None,
) -> Metrics:
    """Take one optimizer step on a batch.

    The gradient is that of the whole batch for any micro-batch size, token budget or order. A batch whose loss has no
    gradient (all advantages 0, no KL, no world-model term) takes no step, and neither does a gradient that is not
    finite; `skipped` says so, and `nonfinite` of the latter.

    Args:
        model: the policy.
        optimizer: of mlx.optimizers, with its learning rate set.
        batch: from `batch_from_rollouts`, `batch_from_trajectories` or `make_batch`.
        algorithm: the objective, the one the batch was made with.
        beta: weight of the KL in the loss; the batch needs reference log-probs when it is not 0.
        pad_token_id: id that fills rows.
        use_checkpoint: recompute activations in the backward pass or not; None leaves the model as it is.
        micro_batch_size: most rows of a forward and backward pass.
        max_tokens: most padded tokens of a forward and backward pass; those that rows share count once.
        max_grad_norm: clip the gradient to this global norm; None and 0 do not clip, and then a gradient whose norm is
            beyond float32 counts as not finite, for an optimizer squares it.
        kl_estimator: estimator of the KL; None is the algorithm's own.
        echo_alpha: weight of the world-model term.
        correction: multiplies the policy loss where the sampler is not the policy; None corrects nothing.

    Returns:
        loss, policy_loss, kl, grad_norm, ratio, clip_ratio, entropy, sampling_logp_difference/mean and /max,
        scored_rows, scored_share (of the rows that count in the loss), forwards/score (micro-batches that went through
        the model), skipped, nonfinite, and with echo_alpha loss_echo and echo_accuracy (share of the ECHO tokens
        that were the likeliest); ratio, clip_ratio, entropy and sampling_logp_difference are over the ACTION tokens of
        the scored rows, NaN where there are none.

    Raises:
        ValueError: an argument is out of its range, the batch has no reference log-probs though beta is not 0, or the
            model has nothing to train, as within `adapters_disabled`.
    """
    check_limit("micro_batch_size", micro_batch_size)
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm must be a number of at least 0, got {max_grad_norm}; 0 does not clip.")
    if use_checkpoint is not None:
        checkpoint_blocks(model, enabled=use_checkpoint)
    objective = Objective(algorithm, beta, kl_estimator, echo_alpha, correction)
    gradient, metrics = batch_gradient(
        model, batch, objective, pad_token_id=pad_token_id, max_tokens=max_tokens, max_rows=micro_batch_size
    )
    metrics |= {"grad_norm": 0.0, "skipped": 1.0, "nonfinite": 0.0}
    if gradient is None:
        return metrics
    gradient, metrics["grad_norm"] = _clipped(gradient, max_grad_norm or math.inf)
    if not math.isfinite(metrics["grad_norm"]):
        metrics["nonfinite"] = 1.0
        return metrics
    optimizer.update(model, gradient)
    mx.eval(model.trainable_parameters(), optimizer.state)  # the step is taken
    metrics["skipped"] = 0.0
    return metrics


def _clipped(gradient: Any, most: float) -> tuple[Any, float]:
    """A gradient clipped to a global norm, and the norm that it had."""
    clipped, norm = optim.clip_grad_norm(gradient, most)
    if not mx.isinf(norm) or most >= LARGEST_NORM:
        return clipped, float(norm)
    leaves: Any = tree_flatten(gradient)
    largest = [float(mx.abs(values).max()) for _, values in leaves]
    if not all(map(math.isfinite, largest)):
        return clipped, float(norm)
    unit = max(largest)  # in units of which squares do not overflow
    scaled = tree_map(lambda values: values / unit, gradient)
    length = float(optim.clip_grad_norm(scaled, math.inf)[1])
    return tree_map(lambda values: values * (most / length), scaled), unit * length


def skipped_step() -> Metrics:
    """The metrics of `optimizer_step` where there was no batch to step on."""
    scored = {"scored_rows": 0.0, "scored_share": 0.0, "forwards/score": 0.0}
    return {"loss": 0.0, **scored, **_means([]), "grad_norm": 0.0, "skipped": 1.0, "nonfinite": 0.0}


def optimizer_step_trajectory(
    *,
    model: nn.Module,
    optimizer: optim.Optimizer,
    batch: TrainBatch,
    algorithm: Algorithm,
    beta: float = 0.0,
    pad_token_id: int = 0,
    **options: Any,
) -> Metrics:
    """`optimizer_step` under its multi-turn name: there is one batch type and one step."""
    return optimizer_step(
        model=model,
        optimizer=optimizer,
        batch=batch,
        algorithm=algorithm,
        beta=beta,
        pad_token_id=pad_token_id,
        **options,
    )


def batch_gradient(
    model: nn.Module,
    batch: TrainBatch,
    objective: Objective,
    *,
    pad_token_id: int = 0,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> tuple[dict[str, Any] | None, Metrics]:
    """The gradient of the batch's loss with respect to the adapter, summed over micro-batches.

    Rows that cannot move the policy (advantage 0 on every token, no KL, no world-model token) still count in the
    denominators. They are not run, unless `batch.full_score` has them measured, without a gradient.

    Args:
        model: the policy.
        batch: the whole optimizer batch.
        objective: what is minimised.
        pad_token_id: id that fills rows.
        max_tokens: padded tokens of a micro-batch; those that rows share count once.
        max_rows: rows of a micro-batch.

    Returns:
        The gradient as a tree like `model.trainable_parameters()`, or None where no row can move the policy, and the
        metrics of `optimizer_step` less the step's own.

    Raises:
        ValueError: as `optimizer_step`.
    """
    for name, value in (("beta", objective.beta), ("echo_alpha", objective.echo_alpha)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")
    parameters = model.trainable_parameters()
    if not tree_flatten(parameters):
        raise ValueError("model has nothing to train; attach an adapter, and take steps outside adapters_disabled.")
    if objective.beta and batch.view.reference_logprobs is None:
        raise ValueError(
            f"beta = {objective.beta} needs reference log-probs; make the batch with compute_reference=True."
        )
    counted, moving = counted_rows(batch, objective), moving_rows(batch, objective)
    resting = sorted({*counted} - {*moving}) if batch.full_score else []

    def cut_up(rows: list[int]) -> list[list[int]]:
        share = shares_prefixes(model)
        return cut_micro_batches(batch.segments, rows, max_tokens=max_tokens, max_rows=max_rows, share=share)

    gradient, loss = None, 0.0
    sums: list[_Sums[float]] = []
    with dropout_active(model):
        cuts = cut_up(moving)
        for cut in cuts:
            micro_loss = _micro_batch_loss(model, batch, cut, objective, pad_token_id)
            (value, *parts), micro_gradient = nn.value_and_grad(model, micro_loss)()
            gradient = micro_gradient if gradient is None else tree_map(mx.add, gradient, micro_gradient)
            mx.eval(gradient, value, parts)  # one micro-batch's activations at a time
            loss += value.item()
            sums.append(_Sums[float](*(part.item() for part in parts)))
    model.update(parameters)  # the arrays themselves, not the ones the gradient was traced through
    for cut in (measured := cut_up(resting)):
        parts: list[Any] = list(_micro_batch_loss(model, batch, cut, objective, pad_token_id, with_gradient=False)())
        mx.eval(parts)  # one micro-batch's activations at a time
        sums.append(_Sums[float](*(part.item() for part in parts[1:])))
    scored = float(sum(map(len, cuts + measured)))
    metrics = {
        "loss": loss,
        "scored_rows": scored,
        "scored_share": scored / len(counted) if counted else 0.0,
        "forwards/score": float(len(cuts + measured)),
        **_means(sums),
    }
    if objective.echo_alpha:
        metrics["loss_echo"] = sum(part.echo_loss for part in sums)
        metrics["echo_accuracy"] = sum(part.echo_accuracy for part in sums)
    return gradient, metrics


def counted_rows(batch: TrainBatch, objective: Objective) -> list[int]:
    """Indices of the trajectories that count in the loss."""
    counts_B_T = batch.weights != 0
    return rows_with(counts_B_T | (batch.echo_weights != 0) if objective.echo_alpha else counts_B_T)


def moving_rows(batch: TrainBatch, objective: Objective) -> list[int]:
    """Indices of the trajectories whose loss has a gradient."""
    moves_B_T = batch.weights != 0 if objective.beta else (batch.weights != 0) & (batch.advantages != 0)
    return rows_with(moves_B_T | (batch.echo_weights != 0) if objective.echo_alpha else moves_B_T)


def _micro_batch_loss(
    model: nn.Module,
    batch: TrainBatch,
    rows: list[int],
    objective: Objective,
    pad_token_id: int,
    *,
    with_gradient: bool = True,
) -> Callable[[], tuple[mx.array, ...]]:
    """The share of some trajectories in the batch's loss, as a function of the model's parameters."""
    index = mx.array(rows, dtype=mx.int32)
    view, algorithm = batch.view, objective.algorithm
    roles, advantages, weights = view.roles[index], batch.advantages[index], batch.weights[index]
    assert view.sampler_logprobs is not None  # every trajectory has them
    sampler = view.sampler_logprobs[index]
    old, reference = (
        None if values is None else values[index] for values in (view.old_logprobs, view.reference_logprobs)
    )
    mask = (roles == int(Role.ACTION)).astype(mx.float32)

    def loss() -> tuple[mx.array, ...]:
        logprobs, entropy, is_top = score_micro_batch(
            model,
            [batch.segments[row] for row in rows],
            roles.shape[1],
            temperature=batch.temperature,
            pad_token_id=pad_token_id,
            with_gradient=with_gradient,
        )
        corrected = weights
        if objective.correction is not None:
            # without old log-probs the policy that scored the batch is the one at hand
            corrected = weights * objective.correction(logprobs if old is None else old, sampler, mask)
        policy_loss = (corrected * algorithm.token_loss(logprobs, old, reference, advantages, mask)).sum()
        total, kl, echo_loss, echo_accuracy = policy_loss, mx.zeros(()), mx.zeros(()), mx.zeros(())
        if objective.beta and reference is not None:
            estimator = objective.kl_estimator or algorithm.kl_estimator
            kl = (weights * kl_penalty(logprobs, reference, estimator, mask=mask)).sum()
            total = total + objective.beta * kl
        if objective.echo_alpha:
            echo_loss = -(batch.echo_weights[index] * logprobs).sum()
            echo_accuracy = (batch.echo_weights[index] * is_top).sum()
            total = total + objective.echo_alpha * echo_loss
        ratio = algorithm.ratio(logprobs, old, mask)
        difference = mx.abs(logprobs - sampler) * mask
        sums = _Sums(
            policy_loss=policy_loss,
            kl=kl,
            echo_loss=echo_loss,
            echo_accuracy=echo_accuracy,
            tokens=mask.sum(),
            ratio=(ratio * mask).sum(),
            clipped=(algorithm.clipped(ratio, advantages) * mask).sum(),
            entropy=(entropy * mask).sum(),
            difference=difference.sum(),
            largest_difference=difference.max(),
        )
        return total, *(mx.stop_gradient(value) for value in sums)

    return loss


def _means(sums: list[_Sums[float]]) -> Metrics:
    tokens = sum(part.tokens for part in sums)

    def mean(name: str) -> float:
        return sum(getattr(part, name) for part in sums) / tokens if tokens else math.nan  # of nothing

    return {
        "policy_loss": sum(part.policy_loss for part in sums),
        "kl": sum(part.kl for part in sums),
        "ratio": mean("ratio"),
        "clip_ratio": mean("clipped"),
        "entropy": mean("entropy"),
        "sampling_logp_difference/mean": mean("difference"),
        "sampling_logp_difference/max": float(np.max([part.largest_difference for part in sums] or [math.nan])),
    }
