"""Dr. GRPO: GRPO without the two biases of its normalisers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlxrl.algo.advantages import centred_advantages, standardised_advantages, weighted_rewards
from mlxrl.algo.base import RewardTable
from mlxrl.algo.families import ClippedAlgorithm
from mlxrl.algo.options import option
from mlxrl.algo.reductions import SEQUENCE_MAX_TOKENS, Reduction


@dataclass(frozen=True, kw_only=True)
class DrGRPOAlgorithm(ClippedAlgorithm):
    """Dr. GRPO: centred rewards, and token sums divided by a constant instead of the trajectory's own length.

    Source: arXiv 2503.20783, section 3.2.

    Attributes:
        normalize: divide by the group's standard deviation after all.
        eps: added to that standard deviation.
        reduction: sequence_max_tokens, whose constant is `max_tokens`, or another.
    """

    name: ClassVar[str] = "dr-grpo"
    source: ClassVar[str] = "arXiv 2503.20783"

    normalize: bool = False
    eps: float = option(1e-6, 0)
    reduction: Reduction = SEQUENCE_MAX_TOKENS

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return the centred, or with `normalize` standardised, rewards."""
        totals = weighted_rewards(rewards, reward_weights)
        if self.normalize:
            return standardised_advantages(totals, group_ids, eps=self.eps)
        return centred_advantages(totals, group_ids)
