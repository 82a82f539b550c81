"""REINFORCE++: a token-level KL in the reward and one baseline for the whole batch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxrl.algo.advantages import centred_advantages, weighted_rewards
from mlxrl.algo.base import RewardTable
from mlxrl.algo.batch import AlgorithmBatch
from mlxrl.algo.families import ClippedAlgorithm
from mlxrl.algo.kl import KLEstimator, KLPlacement
from mlxrl.algo.options import option, option_error
from mlxrl.algo.returns import paint_tokens, reinforcepp_returns, whitened
from mlxrl.algo.shaping import action_values, token_kl


@dataclass(frozen=True, kw_only=True)
class REINFORCEPPAlgorithm(ClippedAlgorithm):
    """REINFORCE++: returns to go whitened over all action tokens of the batch, clipped at 0.2.

    Source: arXiv 2501.03262. It needs no groups; with `baseline` it takes the group's mean off first, and its KL
    belongs in the loss as k2. Whitening is relative to the batch: a group of equal rewards has advantage 0 only when
    the whole batch is equal.

    Attributes:
        baseline: take the group's mean off before whitening.
        eps: added to the standard deviation.
    """

    name: ClassVar[str] = "reinforce++"
    source: ClassVar[str] = "arXiv 2501.03262"
    kl_estimator: ClassVar[KLEstimator] = "k2"
    kl_placement: ClassVar[KLPlacement] = "reward"

    baseline: bool = False
    eps: float = option(1e-6, 0)
    clip_low: float | None = option(0.2, 0, 1, "(]")
    clip_high: float | None = option(0.2, 0, ends="()")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline and self.reward_beta:
            raise option_error(
                type(self), "reward_beta", "0 with baseline, whose KL belongs in the loss", self.reward_beta
            )

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return the rewards whitened over the batch, every trajectory counted once."""
        bases = self._bases(weighted_rewards(rewards, reward_weights), group_ids)
        whites = whitened([[] if base is None else [base] for base in bases], self.eps)
        return [row[0] if row else 0.0 for row in whites]

    def advantages(self, batch: AlgorithmBatch) -> mx.array:
        """Return the whitened return to go of every action token, float32 [B, T]; 0 elsewhere."""
        mask = batch.action_mask
        kls = token_kl(batch) if self.reward_beta else action_values(mx.zeros(mask.shape), mask)
        bases = self._bases(batch.total_rewards, batch.group_ids)
        return paint_tokens(whitened(reinforcepp_returns(bases, kls, self.reward_beta), self.eps), mask)

    def _bases(self, totals: list[float | None], group_ids: Sequence[Hashable]) -> list[float | None]:
        """Return the rewards, with `baseline` less their group's mean; None abstains."""
        if not self.baseline:
            return totals
        centred = centred_advantages(totals, group_ids)
        return [None if total is None else base for total, base in zip(totals, centred, strict=True)]
