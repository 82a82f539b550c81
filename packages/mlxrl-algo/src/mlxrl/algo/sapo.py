"""SAPO: a smooth gate in place of the clip."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxrl.algo.families import GroupRelativeAlgorithm
from mlxrl.algo.options import option
from mlxrl.algo.reductions import SEQUENCE_MEAN, Reduction
from mlxrl.algo.surrogates import sapo_surrogate


@dataclass(frozen=True, kw_only=True)
class SAPOAlgorithm(GroupRelativeAlgorithm):
    """SAPO: each token's weight falls off smoothly as its ratio leaves 1. Source: arXiv 2511.20347.

    Attributes:
        tau_positive: temperature of the gate where A > 0.
        tau_negative: temperature elsewhere, higher so that those tokens fade sooner.
    """

    name: ClassVar[str] = "sapo"
    formula: ClassVar[str] = "-(4/tau) sigmoid(tau (rho-1)) A"
    source: ClassVar[str] = "arXiv 2511.20347"

    tau_positive: float = option(1.0, 0, ends="()")
    tau_negative: float = option(1.05, 0, ends="()")
    reduction: Reduction = SEQUENCE_MEAN

    def surrogate(self, ratio: mx.array, adv: mx.array, logp: mx.array) -> mx.array:
        """Return the SAPO surrogate [B, T]."""
        return sapo_surrogate(ratio, adv, tau_positive=self.tau_positive, tau_negative=self.tau_negative)
