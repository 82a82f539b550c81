"""GMPO: the geometric mean of clipped token ratios."""

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxrl.algo._arrays import keep
from mlxrl.algo._checks import check_shape
from mlxrl.algo.families import GroupRelativeAlgorithm
from mlxrl.algo.options import option
from mlxrl.algo.ratios import log_ratio
from mlxrl.algo.reductions import SEQUENCE_MEAN, Reduction
from mlxrl.algo.surrogates import gmpo_surrogate


@dataclass(frozen=True, kw_only=True)
class GMPOAlgorithm(GroupRelativeAlgorithm):
    """GMPO: token log-ratios are clipped on the side their advantage pushes to, then averaged.

    Source: arXiv 2507.20673.

    Attributes:
        clip_low: distance of the lower bound of the log-ratio from 0, nats.
        clip_high: distance of the upper bound of the log-ratio from 0, nats.
    """

    name: ClassVar[str] = "gmpo"
    formula: ClassVar[str] = "-A exp(mean_t clip(d, -lo, hi)), clipped by sign(A)"
    source: ClassVar[str] = "arXiv 2507.20673"

    clip_low: float = option(0.4, 0, ends="()")
    clip_high: float = option(0.4, 0, ends="()")
    reduction: Reduction = SEQUENCE_MEAN

    def token_loss(
        self, logp: mx.array, old: mx.array | None, ref: mx.array | None, adv: mx.array, mask: mx.array
    ) -> mx.array:
        """Return the GMPO surrogate [B, T]; arguments and errors as for every algorithm."""
        check_shape("adv", adv, logp.shape, "logp")
        kept = mx.stop_gradient(keep(adv, mask))
        d = log_ratio(logp, old, mask)
        return gmpo_surrogate(d, kept, mask, clip_low=self.clip_low, clip_high=self.clip_high)

    def clipped(self, ratio: mx.array, adv: mx.array) -> mx.array:
        """Return bool [B, T], True where the log of the token's ratio is clipped."""
        upper, lower = math.exp(self.clip_high), math.exp(-self.clip_low)
        return ((adv > 0) & (ratio > upper)) | ((adv < 0) & (ratio < lower))
