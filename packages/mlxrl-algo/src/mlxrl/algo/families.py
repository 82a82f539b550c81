"""Two families of named algorithms: group-relative advantages and clipped surrogates."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from mlxrl.algo import advantages as estimators
from mlxrl.algo.base import PolicyGradientAlgorithm, RewardTable
from mlxrl.algo.options import option, option_error
from mlxrl.algo.surrogates import clipped_surrogate, is_clipped


@dataclass(frozen=True, kw_only=True)
class GroupRelativeAlgorithm(PolicyGradientAlgorithm):
    """An algorithm whose advantage is relative to the group, in one of the ways of `mlxrl.algo.advantages`.

    Attributes:
        advantage: which estimator; "gdpo" normalises several rewards one by one.
        eps: added to the standard deviation of "standardised" and "gdpo".
        ddof: 0 for their population standard deviation, 1 for the sample's.
    """

    advantage: Literal["standardised", "centred", "leave_one_out", "maxrl", "gdpo"] = "standardised"
    eps: float = option(1e-6, 0)
    ddof: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage == "gdpo" and self.reward_beta:
            raise option_error(
                type(self), "reward_beta", "0 with advantage gdpo, which normalises each reward alone", self.reward_beta
            )

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return one advantage per trajectory by the chosen estimator, on the host."""
        if self.advantage == "gdpo":
            return estimators.gdpo_advantages(rewards, reward_weights, group_ids, eps=self.eps, ddof=self.ddof)
        totals = estimators.weighted_rewards(rewards, reward_weights)
        if self.advantage == "standardised":
            return estimators.standardised_advantages(totals, group_ids, eps=self.eps, ddof=self.ddof)
        plain = {
            "centred": estimators.centred_advantages,
            "leave_one_out": estimators.leave_one_out_advantages,
            "maxrl": estimators.maxrl_advantages,
        }
        return plain[self.advantage](totals, group_ids)


@dataclass(frozen=True, kw_only=True)
class ClippedAlgorithm(PolicyGradientAlgorithm):
    """An algorithm with PPO's clipped surrogate.

    Attributes:
        clip_low: distance of the lower bound of the ratio from 1; None leaves that side open.
        clip_high: distance of the upper bound of the ratio from 1; None leaves that side open.
    """

    formula: ClassVar[str] = "-min(rho A, clip(rho, 1-lo, 1+hi) A)"

    clip_low: float | None = option(None, 0, 1, "(]")
    clip_high: float | None = option(None, 0, ends="()")

    def surrogate(self, ratio: mx.array, adv: mx.array, logp: mx.array) -> mx.array:
        """Return the clipped surrogate [B, T]."""
        return clipped_surrogate(ratio, adv, clip_low=self.clip_low, clip_high=self.clip_high)

    def clipped(self, ratio: mx.array, adv: mx.array) -> mx.array:
        """Return bool [B, T], True where a clip makes the surrogate flat."""
        return is_clipped(ratio, adv, self.clip_low, self.clip_high)
