"""CISPO: REINFORCE with a capped importance weight."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxrl.algo.families import GroupRelativeAlgorithm
from mlxrl.algo.options import option
from mlxrl.algo.surrogates import cispo_surrogate


@dataclass(frozen=True, kw_only=True)
class CISPOAlgorithm(GroupRelativeAlgorithm):
    """CISPO: the weight is capped, the gradient of the token never dropped.

    Source: arXiv 2506.13585, equation 4, with the absolute cap of arXiv 2510.13786.

    Attributes:
        cap: the largest importance weight.
    """

    name: ClassVar[str] = "cispo"
    formula: ClassVar[str] = "-sg(min(rho, cap)) A log pi"
    source: ClassVar[str] = "arXiv 2506.13585"

    cap: float = option(5.0, 0, ends="()")

    def surrogate(self, ratio: mx.array, adv: mx.array, logp: mx.array) -> mx.array:
        """Return the CISPO surrogate [B, T]."""
        return cispo_surrogate(ratio, adv, logp, cap=self.cap)

    def clipped(self, ratio: mx.array, adv: mx.array) -> mx.array:
        """Return bool [B, T], True where the weight is capped (the gradient stays)."""
        return mx.broadcast_to(ratio > self.cap, adv.shape)
