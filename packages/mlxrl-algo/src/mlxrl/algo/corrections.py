"""Corrections for a sampler whose distribution differs from the scored policy's.

Weights are constants to multiply the reduction weights by; the denominators stay, masked tokens included.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxrl.algo.ratios import geometric_ratio, sequence_ratio, token_ratio

CorrectionLevel = Literal["token", "sequence", "geometric"]

_LEVELS = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}


def sampler_ratio(old: mx.array, sampler: mx.array, mask: mx.array, level: CorrectionLevel = "token") -> mx.array:
    """Return the ratio of the scored policy to the distribution really sampled from.

    token w_t = exp(log old - log mu); sequence prod_t w_t; geometric exp(mean_t log w_t).
    Source: Espeholt et al., IMPALA, arXiv 1802.01561 (token); GSPO, arXiv 2507.18071 (geometric).

    Args:
        old: [B, T], nats, of the policy when the batch was scored.
        sampler: [B, T], nats, of the distribution sampled from, filtered and renormalised.
        mask: [B, T], non-zero at action tokens.
        level: "token", "sequence" or "geometric".

    Returns:
        [B, T], a constant; 1 at masked positions on token level.

    Raises:
        ValueError: the level is unknown or the shapes differ.
    """
    if level not in _LEVELS:
        raise ValueError(f"level must be one of {', '.join(_LEVELS)}, got {level!r}")
    return mx.stop_gradient(_LEVELS[level](old, sampler, mask))


def truncated_weights(ratio: mx.array, *, cap: float = 2.0) -> mx.array:
    """Return truncated importance sampling, TIS: min(w, C).

    Source: Ionides 2008, "Truncated importance sampling".

    Args:
        ratio: [B, T], w of `sampler_ratio`.
        cap: C, above 0.

    Returns:
        [B, T], a constant.

    Raises:
        ValueError: the cap is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    return mx.stop_gradient(mx.minimum(ratio, cap))


def masked_weights(ratio: mx.array, *, low: float = 0.5, high: float = 2.0) -> mx.array:
    """Return masked importance sampling, MIS: w inside [low, high], 0 outside.

    Args:
        ratio: [B, T], w of `sampler_ratio`.
        low: the lower end of the band, at least 0.
        high: the upper end of the band, above `low`.

    Returns:
        [B, T], a constant.

    Raises:
        ValueError: the band is empty.
    """
    if not 0 <= low < high:
        raise ValueError(f"low and high must satisfy 0 <= low < high, got {low} and {high}")
    return mx.stop_gradient(mx.where((ratio >= low) & (ratio <= high), ratio, 0.0))


@dataclass(frozen=True)
class Correction:
    """What each token's loss is multiplied by, where the sampler is not the policy that is trained.

    Attributes:
        kind: "tis" truncates the ratio at `cap`; "mis" drops tokens whose ratio lies outside `band`.
        level: ratio of the token, of the sequence, or the geometric mean over the sequence.
        cap: C of "tis".
        band: lower and upper end of "mis".

    Raises:
        ValueError: kind or level is unknown, the cap is not positive, or the band is empty.
    """

    kind: Literal["tis", "mis"]
    level: CorrectionLevel = "token"
    cap: float = 2.0
    band: tuple[float, float] = (0.5, 2.0)

    def __post_init__(self) -> None:
        if self.kind not in ("tis", "mis"):
            raise ValueError(f"kind must be tis or mis, got {self.kind!r}")
        one = mx.zeros((1, 1))
        self(one, one, one)  # the functions check level, cap and band

    def __call__(self, old: mx.array, sampler: mx.array, mask: mx.array) -> mx.array:
        """Return the weights [B, T], constants; arguments as for `sampler_ratio`."""
        ratio = sampler_ratio(old, sampler, mask, self.level)
        if self.kind == "tis":
            return truncated_weights(ratio, cap=self.cap)
        return masked_weights(ratio, low=self.band[0], high=self.band[1])
