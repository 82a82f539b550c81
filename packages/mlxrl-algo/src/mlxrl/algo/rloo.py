"""RLOO: REINFORCE with a leave-one-out baseline."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlxrl.algo.advantages import leave_one_out_advantages, weighted_rewards
from mlxrl.algo.base import RewardTable
from mlxrl.algo.families import ClippedAlgorithm
from mlxrl.algo.kl import KLPlacement
from mlxrl.algo.reductions import SEQUENCE_SUM, Reduction


@dataclass(frozen=True, kw_only=True)
class RLOOAlgorithm(ClippedAlgorithm):
    """RLOO: the reward less the mean of the group's others, unclipped until clips are set.

    With one update per batch its gradient is that of REINFORCE. Its KL belongs in the reward: `reward_beta`.
    Source: arXiv 2402.14740.
    """

    name: ClassVar[str] = "rloo"
    formula: ClassVar[str] = "-rho A"
    source: ClassVar[str] = "arXiv 2402.14740"
    kl_placement: ClassVar[KLPlacement] = "reward"
    minimum_group_size: ClassVar[int] = 2

    reduction: Reduction = SEQUENCE_SUM

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return the leave-one-out advantages."""
        return leave_one_out_advantages(weighted_rewards(rewards, reward_weights), group_ids)
