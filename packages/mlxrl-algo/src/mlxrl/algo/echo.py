"""ECHO: a world-model loss on the environment's tokens beside the policy loss.

The tokens are those of role ECHO; they have no ratio, no KL and no clip, and a denominator of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxrl.algo._arrays import keep, promote
from mlxrl.algo._checks import check_length, check_rank, check_shape


def echo_weights(
    mask: mx.array,
    valid: Sequence[bool] | None = None,
    *,
    per_sequence: bool = False,
    total: int | None = None,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Return the weights w with ECHO loss = sum(w * NLL) over the batch.

    1 / N_echo at every ECHO token of the batch or, per sequence, 1 / (B_echo n_i) with B_echo the trajectories that
    have ECHO tokens. Source: ECHO, arXiv 2605.24517.

    Args:
        mask: [B, T], non-zero at ECHO tokens.
        valid: [B]; False leaves a failed trajectory out. None keeps all.
        per_sequence: average within each trajectory first.
        total: N_echo, or per sequence B_echo, to use instead of this batch's own, for instance summed over ranks.
        dtype: of the weights.

    Returns:
        [B, T], to be multiplied by alpha.

    Raises:
        ValueError: the shapes differ.
    """
    check_rank("mask", mask, 2)
    counted = mask != 0
    if valid is not None:
        check_length("valid", valid, mask.shape[0], "mask")
        counted = counted & mx.array(list(valid), dtype=mx.bool_)[:, None]
    lengths: list[int] = mx.sum(counted, axis=1).tolist()  # pyright: ignore
    if total is None:
        total = sum(length > 0 for length in lengths) if per_sequence else sum(lengths)
    rows = [1 / (total * (length if per_sequence else 1)) if length else 0.0 for length in lengths]
    return mx.where(counted, mx.array(rows, dtype=dtype)[:, None], mx.zeros((), dtype=dtype))


def echo_loss(logp: mx.array, mask: mx.array, per_sequence: bool = False) -> mx.array:
    """Return the mean negative log-likelihood of the ECHO tokens.

    -sum m log pi / N_echo, or per sequence -(1 / B_echo) sum_i (1 / n_i) sum_t m log pi.
    Source: ECHO, arXiv 2605.24517.

    Args:
        logp: [B, T], nats, at temperature 1 whatever the sampling temperature.
        mask: [B, T], non-zero at ECHO tokens.
        per_sequence: average within each trajectory first.

    Returns:
        A scalar, nats per token, to be multiplied by alpha; 0 without ECHO tokens.

    Raises:
        ValueError: the shapes differ.
    """
    check_shape("mask", mask, logp.shape, "logp")
    weights = echo_weights(mask, per_sequence=per_sequence, dtype=promote(logp).dtype)
    return -mx.sum(weights * keep(logp, mask))


@dataclass(frozen=True)
class EchoSchedule:
    """The weight of the ECHO loss at each optimizer step.

    constant: alpha. linear_taper_to_zero: alpha * max(0, 1 - step / taper_steps). Source: ECHO, arXiv 2605.24517.

    Attributes:
        alpha: weight at step 0, at least 0; 0.005 to 0.05 is usual.
        schedule: "constant" or "linear_taper_to_zero".
        taper_steps: steps until the weight is 0; needed by linear_taper_to_zero alone.

    Raises:
        ValueError: alpha is negative or not finite, the schedule is unknown, or taper_steps does not fit it.
    """

    alpha: float
    schedule: Literal["constant", "linear_taper_to_zero"] = "constant"
    taper_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha must be a finite number of at least 0, got {self.alpha}")
        if self.schedule not in ("constant", "linear_taper_to_zero"):
            raise ValueError(f"schedule must be constant or linear_taper_to_zero, got {self.schedule!r}")
        if self.schedule == "linear_taper_to_zero" and (self.taper_steps is None or self.taper_steps < 1):
            raise ValueError(f"taper_steps must be at least 1 for linear_taper_to_zero, got {self.taper_steps}")
        if self.schedule == "constant" and self.taper_steps is not None:
            raise ValueError(f"taper_steps has no effect on the constant schedule, got {self.taper_steps}")

    def __call__(self, step: int) -> float:
        """Return the weight at an optimizer step, the first being 0."""
        if self.taper_steps is None:
            return self.alpha
        return self.alpha * max(0.0, 1 - step / self.taper_steps)
