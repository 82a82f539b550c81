"""What named algorithms share: a preset of advantage, ratio, surrogate and reduction, each a method to replace."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from mlxrl.algo import advantages as estimators
from mlxrl.algo._arrays import keep, paint
from mlxrl.algo._checks import check_rank, check_shape
from mlxrl.algo.algorithm import LossOutput
from mlxrl.algo.batch import AlgorithmBatch
from mlxrl.algo.filters import informative_rows
from mlxrl.algo.groups import GroupStructure, group_ids_of
from mlxrl.algo.kl import KLEstimator, KLPlacement, kl_penalty
from mlxrl.algo.options import check_options, option, option_error
from mlxrl.algo.ratios import token_ratio
from mlxrl.algo.reductions import REDUCTIONS, TOKEN_MEAN, Reduction, reduction_weights
from mlxrl.algo.shaping import charge_kl, token_kl
from mlxrl.algo.surrogates import is_clipped, unclipped_surrogate

RewardTable = Sequence[Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientAlgorithm:
    """A policy-gradient algorithm with centred advantages, token ratios and the unclipped surrogate.

    Subclasses are frozen dataclasses whose fields are their options; they replace any of `row_advantages`, `ratio`,
    `surrogate` and `clipped`.

    Attributes:
        reduction: how token losses become one loss; a name of `REDUCTIONS` is accepted for it.
        max_tokens: the constant of sequence_max_tokens, in tokens.
        reward_beta: weight of the k1 KL charged inside the reward; 0 asks for no log-probs.
        dynamic_sampling: train only on groups whose task rewards differ. DAPO, arXiv 2503.14476, equation 11.
    """

    name: ClassVar[str]
    formula: ClassVar[str] = "-rho A"
    """The token loss, for the table of algorithms."""
    source: ClassVar[str] = ""
    """The paper."""
    kl_estimator: ClassVar[KLEstimator] = "k3"
    """The estimator that the paper puts into the loss."""
    kl_placement: ClassVar[KLPlacement] = "loss"
    """Where the paper charges the KL."""
    minimum_group_size: ClassVar[int] = 1
    """The smallest group size that a run may be configured with."""

    reduction: Reduction = TOKEN_MEAN
    max_tokens: int | None = option(None, 1)
    reward_beta: float = option(0.0, 0)
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        chosen: object = self.reduction
        if isinstance(chosen, str):
            if chosen not in REDUCTIONS:
                raise option_error(type(self), "reduction", f"one of {', '.join(REDUCTIONS)}", chosen)
            object.__setattr__(self, "reduction", Reduction(chosen))
        check_options(self)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", self.reduction.max_tokens)
        elif self.reduction.name != "sequence_max_tokens":
            must = f"left out unless reduction is sequence_max_tokens (it is {self.reduction.name})"
            raise option_error(type(self), "max_tokens", must, self.max_tokens)
        else:
            object.__setattr__(self, "reduction", Reduction(self.reduction.name, self.max_tokens))

    @property
    def needs_logprobs(self) -> frozenset[str]:
        """The log-probs that `advantages` reads: both for a KL in the reward, else none."""
        return frozenset({"old", "reference"}) if self.reward_beta else frozenset()

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return one advantage per trajectory, on the host.

        Args:
            rewards: [B][K]; None abstains, and a row of None takes no part.
            reward_weights: [K].
            group_ids: [B].

        Returns:
            [B].
        """
        return estimators.centred_advantages(estimators.weighted_rewards(rewards, reward_weights), group_ids)

    def advantages(self, batch: AlgorithmBatch) -> mx.array:
        """Return the trajectory's advantage painted on its action tokens.

        Args:
            batch: B trajectories.

        Returns:
            float32 [B, T], 0 at other tokens and in rows that failed or abstained.

        Raises:
            ValueError: log-probs that `needs_logprobs` names are missing.
        """
        if self.reward_beta or not batch.reward_weights:
            totals = batch.total_rewards
            if self.reward_beta:
                totals = charge_kl(totals, token_kl(batch), self.reward_beta)
            rewards: RewardTable = [[total] for total in totals]
            weights: Sequence[float] = [1.0]
        else:
            rewards = [
                row if valid else [None] * len(row) for row, valid in zip(batch.rewards, batch.valid, strict=True)
            ]
            weights = batch.reward_weights
        return paint(self.row_advantages(rewards, weights, batch.group_ids), batch.action_mask)

    def ratio(self, logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
        """Return the ratio [B, T] that the surrogate acts on; `old` None is on-policy."""
        return token_ratio(logp, old, mask)

    def surrogate(self, ratio: mx.array, adv: mx.array, logp: mx.array) -> mx.array:
        """Return the token loss [B, T] from the ratio, the advantage and the log-prob, all 0 or 1 where masked."""
        return unclipped_surrogate(ratio, adv)

    def clipped(self, ratio: mx.array, adv: mx.array) -> mx.array:
        """Return bool [B, T], True where the surrogate is flat; without clips nowhere."""
        return is_clipped(ratio, adv, None, None)

    def token_loss(
        self, logp: mx.array, old: mx.array | None, ref: mx.array | None, adv: mx.array, mask: mx.array
    ) -> mx.array:
        """Return the surrogate of every token, neither masked nor reduced.

        Args:
            logp: [B, T], nats, of the current policy.
            old: [B, T], nats, of the policy that scored the batch; None means stop_gradient(logp), exactly.
            ref: [B, T], nats, of the reference policy; a pure surrogate does not read it.
            adv: [B, T].
            mask: [B, T], non-zero at action tokens; whatever stands elsewhere has no effect.

        Returns:
            [B, T] in at least float32.

        Raises:
            ValueError: the shapes differ.
        """
        check_shape("adv", adv, logp.shape, "logp")
        return self.surrogate(self.ratio(logp, old, mask), mx.stop_gradient(keep(adv, mask)), keep(logp, mask))

    def filter_batch(self, batch: AlgorithmBatch, group_structure: GroupStructure | None = None) -> list[int] | None:
        """Return the rows to train on, or None for all of them; `batch` holds the task rewards, before any shaping."""
        if not self.dynamic_sampling:
            return None
        return informative_rows(batch.total_rewards, batch.group_ids if group_structure is None else group_structure)

    def compute_advantages(
        self, rewards: mx.array | Sequence[float | None], group_structure: GroupStructure
    ) -> mx.array:
        """Return one advantage per completion.

        Args:
            rewards: [B]; None abstains.
            group_structure: the group size, or one group id per row.

        Returns:
            float32 [B].

        Raises:
            ValueError: the group size is below the algorithm's minimum, or the groups do not fit the rows.
        """
        values: list[float | None] = rewards.tolist() if isinstance(rewards, mx.array) else list(rewards)  # pyright: ignore
        if isinstance(group_structure, int) and group_structure < self.minimum_group_size:
            raise ValueError(
                f"{self.name}: group_structure must be at least {self.minimum_group_size}, got {group_structure}"
            )
        group_ids = group_ids_of(group_structure, len(values))
        return mx.array(self.row_advantages([[value] for value in values], [1.0], group_ids), dtype=mx.float32)

    def compute_loss(
        self,
        *,
        policy_logprobs: mx.array,
        old_policy_logprobs: mx.array | None,
        advantages: mx.array,
        reference_logprobs: mx.array | None = None,
        completion_mask: mx.array | None = None,
        action_mask: mx.array | None = None,
        beta: float = 0.0,
        kl_estimator: KLEstimator | None = None,
        weights: mx.array | None = None,
    ) -> LossOutput:
        """Return the loss of a batch, sum(w * (l + beta * kl)), with its parts.

        Args:
            policy_logprobs: [B, T], nats, of the current policy.
            old_policy_logprobs: [B, T], nats, of the policy that scored the batch; None for on-policy.
            advantages: [B] or [B, T].
            reference_logprobs: [B, T], nats; needed when beta is not 0.
            completion_mask: [B, T], 1 at trained tokens; give this or `action_mask`.
            action_mask: the same under its multi-turn name.
            beta: weight of the KL in the loss.
            kl_estimator: "k1", "k2" or "k3"; the algorithm's own if None.
            weights: [B, T], of `reduction_weights` over the whole batch when this is a part of it (and under
                mx.compile, which cannot count tokens); None takes those of the given rows.

        Returns:
            The loss and its parts.

        Raises:
            ValueError: the shapes differ, not exactly one mask is given, or beta is set without a reference.
        """
        masks = [mask for mask in (completion_mask, action_mask) if mask is not None]
        if len(masks) != 1:
            raise ValueError(f"exactly one of completion_mask and action_mask must be given, got {len(masks)}")
        if beta and reference_logprobs is None:
            raise ValueError(f"reference_logprobs must be given when beta is not 0, got None with beta {beta}")
        (mask,) = masks
        check_rank("policy_logprobs", policy_logprobs, 2)
        check_shape("the mask", mask, policy_logprobs.shape, "policy_logprobs")
        if advantages.ndim == 1:
            check_shape("advantages", advantages, policy_logprobs.shape[:1], "the rows of policy_logprobs")
            advantages = mx.broadcast_to(advantages[:, None], policy_logprobs.shape)
        if weights is None:
            weights = reduction_weights(self.reduction, mask)
        check_shape("weights", weights, policy_logprobs.shape, "policy_logprobs")

        token_loss = self.token_loss(policy_logprobs, old_policy_logprobs, reference_logprobs, advantages, mask)
        policy_gradient_loss = mx.sum(weights * token_loss)
        loss, kl = policy_gradient_loss, mx.zeros_like(policy_gradient_loss)
        if reference_logprobs is not None:
            estimator = kl_estimator or self.kl_estimator
            kl = mx.sum(weights * kl_penalty(policy_logprobs, reference_logprobs, estimator, mask=mask))
        if beta:
            loss = policy_gradient_loss + beta * kl
        ratio = mx.stop_gradient(self.ratio(policy_logprobs, old_policy_logprobs, mask))
        count = mx.maximum(mx.sum(mask != 0), 1)
        return LossOutput(
            loss=loss,
            policy_gradient_loss=mx.stop_gradient(policy_gradient_loss),
            kl=mx.stop_gradient(kl),
            mean_ratio=mx.sum(keep(ratio, mask)) / count,
            clip_fraction=mx.sum(self.clipped(ratio, advantages) & (mask != 0)) / count,
        )
