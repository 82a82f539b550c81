"""GiGPO: advantages of whole episodes and of single turns taken in the same state."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from mlxrl.algo.advantages import centred_advantages, standardised_advantages, weighted_rewards
from mlxrl.algo.algorithm import TrajectoryLike
from mlxrl.algo.anchors import anchor_ids, anchor_metrics
from mlxrl.algo.base import RewardTable
from mlxrl.algo.batch import AlgorithmBatch
from mlxrl.algo.families import ClippedAlgorithm
from mlxrl.algo.groups import GroupStructure, group_ids_of
from mlxrl.algo.options import option
from mlxrl.algo.returns import discounted_returns
from mlxrl.algo.shaping import action_values, charge_kl, token_kl


@dataclass(frozen=True, kw_only=True)
class GiGPOAlgorithm(ClippedAlgorithm):
    """GiGPO: A[i, k] = A^E_i + omega A^S[i, k], painted on the action tokens of turn k.

    A^E is the episode's reward relative to the task group, A^S the turn's return to go relative to the anchor group:
    the turns of the same task group taken in the same state. What the total reward holds beyond the turn rewards is
    earned in the last turn. Source: arXiv 2505.10978, section 4.

    Attributes:
        omega: weight of the turn's advantage.
        gamma: discount per turn of the return to go.
        normalization: "std" divides both by their group's standard deviation, "center" does not.
        eps: added to that standard deviation.
        similarity: joins states (text) that are at least this similar, up to 1; None compares exactly.
        exclude_repeats: leaves turns in a state their own trajectory has been in before out of the anchor groups.
    """

    name: ClassVar[str] = "gigpo"
    source: ClassVar[str] = "arXiv 2505.10978"

    omega: float = option(1.0, 0)
    gamma: float = option(1.0, 0, 1, "[]")
    normalization: Literal["std", "center"] = "std"
    eps: float = option(1e-6, 0)
    similarity: float | None = option(None, 0, 1, "(]")
    exclude_repeats: bool = False

    def row_advantages(
        self, rewards: RewardTable, reward_weights: Sequence[float], group_ids: Sequence[Hashable]
    ) -> list[float]:
        """Return the episode advantages A^E."""
        return self._relative(weighted_rewards(rewards, reward_weights), group_ids)

    def advantages(self, batch: AlgorithmBatch) -> mx.array:
        """Return A^E + omega A^S of each action token's turn, float32 [B, T]; 0 elsewhere.

        Raises:
            ValueError: an action token belongs to a turn its trajectory does not have.
        """
        totals, rewards, states = batch.total_rewards, _turn_rewards(batch), _turn_states(batch)
        mask = batch.action_mask * mx.array(batch.counted)[:, None]
        _check_turns(batch.turns, mask, [len(row) for row in rewards])
        if self.reward_beta:
            kls, turns = token_kl(batch), action_values(batch.turns, mask)
            totals = charge_kl(totals, kls, self.reward_beta)
            for row, row_kls, row_turns in zip(rewards, kls, turns, strict=True):
                for kl, turn in zip(row_kls, row_turns, strict=False):  # rows that do not count have no turns here
                    row[int(turn)] -= self.reward_beta * kl
        combined = self._combined(totals, rewards, states, batch.group_ids)
        width = max((len(row) for row in combined), default=1)
        table = mx.array([row + [0.0] * (width - len(row)) for row in combined], dtype=mx.float32)
        painted = mx.take_along_axis(table, mx.where(mask != 0, batch.turns, 0), axis=1)
        return mx.where(mask != 0, painted, 0.0)

    def compute_step_advantages(
        self, trajectories: Sequence[TrajectoryLike], group_structure: GroupStructure
    ) -> tuple[float, ...]:
        """Return A^E + omega A^S of every turn, trajectory after trajectory.

        Args:
            trajectories: B objects whose `turns` have a `reward` and a `state_id`, the state before the action.
            group_structure: the group size, or one group id per trajectory.

        Returns:
            One number per turn.

        Raises:
            ValueError: the groups do not fit the trajectories.
        """
        rewards = [[float(turn.reward) for turn in trajectory.turns] for trajectory in trajectories]
        states = [[turn.state_id for turn in trajectory.turns] for trajectory in trajectories]
        totals = [math.fsum(row) for row in rewards]
        combined = self._combined(totals, rewards, states, group_ids_of(group_structure, len(rewards)))
        return tuple(value for row in combined for value in row)

    def step_metrics(self, batch: AlgorithmBatch) -> dict[str, float]:
        """Return anchor_group_size and anchor_share over the turns of the rows that count, as `anchor_metrics`."""
        anchors = self._anchors(_turn_states(batch), batch.group_ids)
        return anchor_metrics([row for row, counted in zip(anchors, batch.counted, strict=True) if counted])

    def _combined(
        self,
        totals: Sequence[float | None],
        rewards: Sequence[Sequence[float]],
        states: Sequence[Sequence[Hashable]],
        group_ids: Sequence[Hashable],
    ) -> list[list[float]]:
        """Return A^E + omega A^S, [B][turns]; 0 in rows that abstain."""
        episode = self._relative(totals, group_ids)
        anchors = self._anchors(states, group_ids)
        returns = [
            [None] * len(row) if total is None else discounted_returns(row, self.gamma)
            for row, total in zip(rewards, totals, strict=True)
        ]
        pooled = [value for row in returns for value in row]
        step = iter(self._relative(pooled, [anchor for row in anchors for anchor in row]))
        return [[base + self.omega * next(step) for _ in row] for base, row in zip(episode, returns, strict=True)]

    def _anchors(self, states: Sequence[Sequence[Hashable]], group_ids: Sequence[Hashable]) -> list[list[Hashable]]:
        return anchor_ids(states, group_ids, similarity=self.similarity, exclude_repeats=self.exclude_repeats)

    def _relative(self, values: Sequence[float | None], group_ids: Sequence[Hashable]) -> list[float]:
        if self.normalization == "center":
            return centred_advantages(values, group_ids)
        return standardised_advantages(values, group_ids, eps=self.eps)


def _turn_count(batch: AlgorithmBatch, row: int) -> int:
    return max(1, len(batch.turn_rewards[row]), len(batch.state_ids[row]))


def _turn_states(batch: AlgorithmBatch) -> list[list[Hashable]]:
    """Return the state of every turn, [B][turns]; None where it is not known."""
    return [list(states) or [None] * _turn_count(batch, row) for row, states in enumerate(batch.state_ids)]


def _turn_rewards(batch: AlgorithmBatch) -> list[list[float]]:
    """Return the reward of every turn, [B][turns], so that each row sums to the trajectory's total reward."""
    table: list[list[float]] = []
    for row, total in enumerate(batch.total_rewards):
        rewards = list(batch.turn_rewards[row]) or [0.0] * _turn_count(batch, row)
        rewards[-1] += (total or 0.0) - math.fsum(rewards)
        table.append(rewards)
    return table


def _check_turns(turns: mx.array, mask: mx.array, counts: Sequence[int]) -> None:
    """Raise ValueError where an action token of a row that counts names a turn that is not there."""
    turns_B_T = mx.where(mask != 0, turns, 0)
    lows: list[int] = mx.min(turns_B_T, axis=1).tolist()  # pyright: ignore
    highs: list[int] = mx.max(turns_B_T, axis=1).tolist()  # pyright: ignore
    for row, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if low < 0 or high >= counts[row]:
            raise ValueError(
                f"turns must lie in [0, {counts[row]}) at the action tokens of row {row}, "
                f"the number of its turns, got {low if low < 0 else high}"
            )
