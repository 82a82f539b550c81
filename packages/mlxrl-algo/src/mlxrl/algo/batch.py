"""What an algorithm sees of one optimizer batch."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import mlx.core as mx

from mlxrl.algo._checks import check_finite, check_length, check_rank, check_shape
from mlxrl.algo.advantages import weighted_rewards
from mlxrl.algo.groups import GroupStructure, group_ids_of


class Role(IntEnum):
    """What a token is to the losses."""

    MASKED = 0
    """Not trained: prompt, template, padding, environment text without a world-model loss."""
    ACTION = 1
    """Sampled by the policy and trained by the policy loss, a sampled end-of-sequence token included."""
    ECHO = 2
    """Environment or tool text that the world-model loss predicts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AlgorithmBatch:
    """One optimizer batch of B trajectories, whole ones, with T tokens each, right-padded.

    Attributes:
        rewards: [B][K], one number per reward function; None abstains. They hold everything the trajectory earned:
            where the environment pays, its episode return is one of the columns.
        reward_weights: [K].
        group_ids: [B], the task each trajectory belongs to.
        roles: int [B, T], a `Role` per token.
        turns: int [B, T], the turn each token belongs to; read at action tokens only.
        turn_rewards: [B][turns], what the environment paid in each turn, on the scale of the total reward; [] for a
            trajectory that was paid at its end only.
        state_ids: [B][turns], the state each action was taken in, read before the step; None for an unknown one.
        valid: [B]; False for a failed trajectory, which leaves the baseline and the loss.
        truncated: [B]; True for a trajectory cut off by a limit.
        sampler_logprobs: float32 [B, T], nats, of the distribution really sampled from, or None.
        old_logprobs: float32 [B, T], nats, of the policy when the batch was scored, or None.
        reference_logprobs: float32 [B, T], nats, of the reference policy, or None.

    Raises:
        ValueError: a length or shape does not fit, or a reward or weight is not finite.
    """

    rewards: Sequence[Sequence[float | None]]
    reward_weights: Sequence[float]
    group_ids: Sequence[Hashable]
    roles: mx.array
    turns: mx.array
    turn_rewards: Sequence[Sequence[float]]
    state_ids: Sequence[Sequence[Hashable]]
    valid: Sequence[bool]
    truncated: Sequence[bool]
    sampler_logprobs: mx.array | None = None
    old_logprobs: mx.array | None = None
    reference_logprobs: mx.array | None = None

    def __post_init__(self) -> None:
        check_rank("roles", self.roles, 2)
        rows = self.roles.shape[0]
        for name in ("rewards", "group_ids", "turn_rewards", "state_ids", "valid", "truncated"):
            check_length(name, getattr(self, name), rows, "roles")
        for name in ("turns", "sampler_logprobs", "old_logprobs", "reference_logprobs"):
            array = getattr(self, name)
            if array is not None:
                check_shape(name, array, self.roles.shape, "roles")
        weighted_rewards(self.rewards, self.reward_weights)
        for row, (rewards, states) in enumerate(zip(self.turn_rewards, self.state_ids, strict=True)):
            if rewards and states and len(rewards) != len(states):
                raise ValueError(
                    f"turn_rewards and state_ids must have one entry per turn, got {len(rewards)} and {len(states)} "
                    f"in row {row}"
                )
            for reward in rewards:
                check_finite("turn_rewards", reward, row)

    @classmethod
    def single_turn(
        cls,
        *,
        rewards: Sequence[float | None] | Sequence[Sequence[float | None]],
        group_structure: GroupStructure,
        action_mask: mx.array,
        reward_weights: Sequence[float] | None = None,
        valid: Sequence[bool] | None = None,
        truncated: Sequence[bool] | None = None,
        sampler_logprobs: mx.array | None = None,
        old_logprobs: mx.array | None = None,
        reference_logprobs: mx.array | None = None,
    ) -> Self:
        """Return the batch of single-turn completions.

        Args:
            rewards: [B] or [B][K]; None abstains.
            group_structure: the group size, or one group id per row.
            action_mask: [B, T], 1 at completion tokens.
            reward_weights: [K]; ones if None.
            valid: [B]; all if None.
            truncated: [B]; none if None.
            sampler_logprobs: as the attribute.
            old_logprobs: as the attribute.
            reference_logprobs: as the attribute.

        Returns:
            A batch whose trajectories have one turn, no environment rewards and no known state.

        Raises:
            ValueError: as the class.
        """
        table = [list(row) if isinstance(row, Sequence) else [row] for row in rewards]
        count = len(table)
        weights = [1.0] * len(table[0] if table else []) if reward_weights is None else reward_weights
        return cls(
            rewards=table,
            reward_weights=weights,
            group_ids=group_ids_of(group_structure, count),
            roles=(action_mask != 0).astype(mx.int32),
            turns=mx.zeros(action_mask.shape, dtype=mx.int32),
            turn_rewards=[[] for _ in range(count)],
            state_ids=[[] for _ in range(count)],
            valid=[True] * count if valid is None else valid,
            truncated=[False] * count if truncated is None else truncated,
            sampler_logprobs=sampler_logprobs,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )

    @property
    def action_mask(self) -> mx.array:
        """float32 [B, T], 1 at action tokens."""
        return (self.roles == int(Role.ACTION)).astype(mx.float32)

    @property
    def echo_mask(self) -> mx.array:
        """float32 [B, T], 1 at the tokens of the world-model loss."""
        return (self.roles == int(Role.ECHO)).astype(mx.float32)

    @property
    def total_rewards(self) -> list[float | None]:
        """[B], the weighted sum over the reward functions that did not abstain.

        With no reward function at all (K = 0) it is the undiscounted sum of the turn rewards. None for a row that
        failed or whose functions all abstained.
        """
        totals = weighted_rewards(self.rewards, self.reward_weights)
        if not self.reward_weights:
            totals = [math.fsum(rewards) for rewards in self.turn_rewards]
        return [total if valid else None for total, valid in zip(totals, self.valid, strict=True)]

    @property
    def counted(self) -> list[bool]:
        """[B], the rows that enter baselines and losses: valid ones with a reward."""
        return [total is not None for total in self.total_rewards]

    def take(self, rows: Sequence[int]) -> Self:
        """Return the batch of the given rows, in their order.

        Args:
            rows: indices into B, for instance those that `filter_batch` keeps.

        Returns:
            A batch of len(rows) trajectories.
        """
        lists = ("rewards", "group_ids", "turn_rewards", "state_ids", "valid", "truncated")
        arrays = ("roles", "turns", "sampler_logprobs", "old_logprobs", "reference_logprobs")
        index = mx.array(list(rows), dtype=mx.int32)
        chosen: dict[str, object] = {name: [getattr(self, name)[row] for row in rows] for name in lists}
        for name in arrays:
            array: mx.array | None = getattr(self, name)
            chosen[name] = None if array is None else array[index]
        return replace(self, **chosen)
