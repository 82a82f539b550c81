"""Estimators of the divergence from the reference policy, per token."""

from typing import Literal

import mlx.core as mx

from mlxrl.algo._arrays import EXP_LIMIT, keep, promote
from mlxrl.algo._checks import check_shape

KLEstimator = Literal["k1", "k2", "k3"]
KLPlacement = Literal["loss", "reward"]


def kl_k1(logp: mx.array, ref: mx.array) -> mx.array:
    """Return k1 = D with D = log pi - log ref.

    Unbiased for KL(pi || ref) under samples of pi, but its on-policy gradient is 0 on average: meant for the reward.
    Source: Schulman, "Approximating KL Divergence", 2020.

    Args:
        logp: [B, T], nats, of the current policy.
        ref: [B, T], nats, of the reference policy.

    Returns:
        [B, T], nats.
    """
    return promote(logp) - promote(ref)


def kl_k2(logp: mx.array, ref: mx.array) -> mx.array:
    """Return k2 = D^2 / 2 with D = log pi - log ref.

    Its on-policy gradient is that of KL(pi || ref). Source: Schulman, "Approximating KL Divergence", 2020.

    Args:
        logp: [B, T], nats, of the current policy.
        ref: [B, T], nats, of the reference policy.

    Returns:
        [B, T], nats squared.
    """
    return mx.square(kl_k1(logp, ref)) / 2


def kl_k3(logp: mx.array, ref: mx.array) -> mx.array:
    """Return k3 = exp(-D) + D - 1 with D = log pi - log ref; exp's argument is clamped to [-20, 20].

    Never negative, unbiased for KL(pi || ref); its on-policy gradient is that of KL(ref || pi).
    Source: GRPO, arXiv 2402.03300, equation 4.

    Args:
        logp: [B, T], nats, of the current policy.
        ref: [B, T], nats, of the reference policy.

    Returns:
        [B, T], nats.
    """
    d = kl_k1(logp, ref)
    return mx.expm1(mx.clip(-d, -EXP_LIMIT, EXP_LIMIT)) + d  # expm1: no cancellation near D = 0


_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_penalty(
    logp: mx.array,
    ref: mx.array,
    estimator: KLEstimator = "k3",
    *,
    mask: mx.array | None = None,
    ratio: mx.array | None = None,
) -> mx.array:
    """Return the KL term of each token, which a caller adds to the token loss as beta * kl.

    kl[i, t] = k(logp, ref), times the ratio when one is given (off-policy, arXiv 2512.02556, section 3.1).

    Args:
        logp: [B, T], nats, of the current policy.
        ref: [B, T], nats, of the reference policy; no gradient flows into it.
        estimator: "k1", "k2" or "k3".
        mask: [B, T], non-zero where tokens count; elsewhere the term is 0 whatever stands there. None keeps all.
        ratio: [B, T], pi / old with its gradient, to weigh samples of an older policy; None leaves them as they are.

    Returns:
        [B, T] in at least float32.

    Raises:
        ValueError: the estimator is unknown or the shapes differ.
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(_ESTIMATORS)}, got {estimator!r}")
    check_shape("ref", ref, logp.shape, "logp")
    if mask is not None:
        check_shape("mask", mask, logp.shape, "logp")
        logp, ref = keep(logp, mask), keep(ref, mask)
    kl = _ESTIMATORS[estimator](logp, mx.stop_gradient(ref))
    return kl if ratio is None else ratio * kl
