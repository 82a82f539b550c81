"""The contract between an algorithm and whoever trains with it."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from mlxrl.algo.batch import AlgorithmBatch
from mlxrl.algo.groups import GroupStructure
from mlxrl.algo.kl import KLEstimator, KLPlacement
from mlxrl.algo.reductions import Reduction


class LossOutput(NamedTuple):
    """The loss of a batch and what it is made of, scalars all.

    Attributes:
        loss: policy_gradient_loss + beta * kl; the only one with a gradient.
        policy_gradient_loss: sum(w * l) of the surrogate.
        kl: sum(w * k) of the KL term, 0 without reference log-probs.
        mean_ratio: mean over action tokens of the ratio.
        clip_fraction: share of action tokens where the surrogate is flat.
    """

    loss: mx.array
    policy_gradient_loss: mx.array
    kl: mx.array
    mean_ratio: mx.array
    clip_fraction: mx.array


@runtime_checkable
class Algorithm(Protocol):
    """Turns a batch into advantages and log-probs into token losses.

    A trainer computes `advantages(batch)` and `reduction_weights(algorithm.reduction, ...)` once on the whole batch,
    then sums w * (token_loss + beta * kl_penalty) over micro-batches split in any way.
    """

    name: ClassVar[str]
    """The name it is registered under."""

    minimum_group_size: ClassVar[int]
    """The smallest group size that a run may be configured with."""
    kl_estimator: ClassVar[KLEstimator]
    """The KL estimator that its paper puts into the loss, a trainer's default."""
    kl_placement: ClassVar[KLPlacement]
    """Where its paper charges the KL, a trainer's default: in the loss, or in the reward (option `reward_beta`)."""

    @property
    def reduction(self) -> Reduction:
        """How its token losses become one loss."""
        ...

    @property
    def needs_logprobs(self) -> frozenset[str]:
        """The log-probs that `advantages` reads from the batch: any of "old" and "reference"."""
        ...

    def advantages(self, batch: AlgorithmBatch) -> mx.array:
        """Return float32 [B, T], 0 at tokens that are no actions and in rows that failed or abstained."""
        ...

    def token_loss(
        self, logp: mx.array, old: mx.array | None, ref: mx.array | None, adv: mx.array, mask: mx.array
    ) -> mx.array:
        """Return the surrogate [B, T], neither masked nor reduced; `old` None means stop_gradient(logp)."""
        ...

    def ratio(self, logp: mx.array, old: mx.array | None, mask: mx.array) -> mx.array:
        """Return the ratio [B, T] that the surrogate acts on."""
        ...

    def clipped(self, ratio: mx.array, adv: mx.array) -> mx.array:
        """Return bool [B, T], True where the surrogate is flat."""
        ...

    def filter_batch(self, batch: AlgorithmBatch, group_structure: GroupStructure | None = None) -> list[int] | None:
        """Return the rows to keep, or None to keep all; called on task rewards, before any shaping."""
        ...

    def compute_advantages(
        self, rewards: mx.array | Sequence[float | None], group_structure: GroupStructure
    ) -> mx.array:
        """Return float32 [B], one advantage per completion, for a trainer that has rewards and no batch object."""
        ...

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
        """Return sum(w * (token_loss + beta * kl)) with its parts, for a trainer that reduces nothing itself."""
        ...


class TurnLike(Protocol):
    """What a turn must have to be given an advantage."""

    @property
    def reward(self) -> float:
        """What the environment paid for the turn."""
        ...

    @property
    def state_id(self) -> Hashable:
        """The state the action was taken in."""
        ...


class TrajectoryLike(Protocol):
    """What a trajectory must have for its turns to be given advantages."""

    @property
    def turns(self) -> Sequence[TurnLike]:
        """The turns, in order."""
        ...


@runtime_checkable
class TrajectoryAlgorithm(Algorithm, Protocol):
    """An algorithm that tells the turns of a trajectory apart and so needs turn rewards and state ids."""

    def compute_step_advantages(
        self, trajectories: Sequence[TrajectoryLike], group_structure: GroupStructure
    ) -> tuple[float, ...]:
        """Return one advantage per turn, trajectory after trajectory."""
        ...

    def step_metrics(self, batch: AlgorithmBatch) -> dict[str, float]:
        """Return numbers about the turns of a batch, for logging."""
        ...
