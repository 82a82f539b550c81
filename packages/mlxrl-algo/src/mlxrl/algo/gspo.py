"""GSPO: one length-normalised ratio for the whole trajectory."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from mlxrl.algo.families import ClippedAlgorithm, GroupRelativeAlgorithm
from mlxrl.algo.options import option
from mlxrl.algo.ratios import geometric_ratio, geometric_token_ratio
from mlxrl.algo.reductions import SEQUENCE_MEAN, Reduction


@dataclass(frozen=True, kw_only=True)
class GSPOAlgorithm(ClippedAlgorithm, GroupRelativeAlgorithm):
    """GSPO: the geometric ratio of the trajectory, clipped within a few ten-thousandths of 1.

    Source: arXiv 2507.18071, equations 5 and 7; importance "token" is equations 13 and 14.

    Attributes:
        importance: "sequence", or "token" for advantages that differ along a trajectory.
    """

    name: ClassVar[str] = "gspo"
    formula: ClassVar[str] = "-min(s A, clip(s, 1-lo, 1+hi) A), s = exp(mean_t d)"
    source: ClassVar[str] = "arXiv 2507.18071"

    importance: Literal["sequence", "token"] = "sequence"
    clip_low: float | None = option(3e-4, 0, 1, "(]")
    clip_high: float | None = option(4e-4, 0, ends="()")
    reduction: Reduction = SEQUENCE_MEAN

    def ratio(self, logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
        """Return the trajectory's ratio [B, T] at each of its tokens."""
        return (geometric_ratio if self.importance == "sequence" else geometric_token_ratio)(logp, old, mask)
