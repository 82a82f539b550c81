"""From trajectories to the one batch type.

The policy reads *segments* (rows of token ids, as the model saw them); losses see *trajectories*: row i of every
`[B, T]` array holds the trained tokens of trajectory i, those with a role, over all its segments in order, padded on
the right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxrl.algo import Algorithm, AlgorithmBatch, echo_weights, mask_truncated, reduction_weights
from mlxrl.policy import adapter_replaced, adapters_disabled
from mlxrl.rollout import Role, Segment, Trajectory
from mlxrl.train.scoring import rows_with, score_trajectories


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Trajectories with everything their loss needs; all weights come from the whole batch.

    Args:
        segments: per trajectory, its segments.
        view: what the algorithm sees: rewards, groups, roles, log-probs.
        advantages: float32 `[B, T]`.
        weights: float32 `[B, T]`; the policy loss is `sum(weights * token_loss)`.
        echo_weights: float32 `[B, T]`; the world-model loss is `-sum(echo_weights * logprob)`.
        temperature: sampling temperature the log-probs are taken at.
        full_score: whether an update also scores the rows that cannot move the policy, for what it measures.
        forwards: micro-batches that went through the model to score the batch, "old" and "reference".
    """

    segments: tuple[tuple[Segment, ...], ...]
    view: AlgorithmBatch
    advantages: mx.array
    weights: mx.array
    echo_weights: mx.array
    temperature: float
    full_score: bool
    forwards: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of trajectories, B."""
        return len(self.segments)

    def optimizer_batch(self, rows: Sequence[int], algorithm: Algorithm) -> "TrainBatch":
        """The batch of some trajectories, with weights of its own: one optimizer step's share of a rollout batch.

        Args:
            rows: indices of the trajectories.
            algorithm: whose reduction weighs the tokens.
        """
        view = self.view.take(rows)
        return replace(
            self,
            segments=tuple(self.segments[row] for row in rows),
            view=view,
            advantages=self.advantages[mx.array(list(rows), dtype=mx.int32)],
            weights=_weights(algorithm, view),
            echo_weights=echo_weights(view.echo_mask, view.counted),
        )


def make_batch(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    *,
    rewards: Sequence[Sequence[float | None]],
    reward_weights: Sequence[float],
    temperature: float = 1.0,
    reference: bool = False,
    reference_adapter: Mapping[str, mx.array] | None = None,
    old: bool = False,
    full_score: bool = False,
    echo: bool = True,
    mask_truncated_rows: bool = False,
    pad_token_id: int = 0,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> TrainBatch:
    """Lay out trajectories, score them where the algorithm needs it, and take advantages and weights.

    Only rows that need old or reference log-probs are scored: those that count in the baseline, where the algorithm's
    advantages read them; else those that count in the loss, and for old ones those that can move the policy.

    Args:
        model: the policy.
        trajectories: B trajectories; failed ones stay out of baseline and loss.
        algorithm: the objective.
        rewards: `[B][K]`, a reward per reward function; None abstains.
        reward_weights: `[K]`.
        temperature: sampling temperature.
        reference: score the tokens under the reference, for a KL term.
        reference_adapter: adapter of the reference, as `adapter_parameters` gave it; None is the base model.
        old: score the tokens under the current policy now, for a batch that will be used more than once.
        full_score: see `TrainBatch`.
        echo: whether the batch's updates have a world-model term; without one, the rows that it alone moves are not
            scored.
        mask_truncated_rows: keep truncated trajectories in the baseline but out of the loss.
        pad_token_id: id that fills rows.
        max_tokens: padded tokens of one forward pass.
        max_rows: rows of one forward pass.

    Returns:
        The batch.
    """
    segments = tuple(trajectory.segments for trajectory in trajectories)
    view = trajectory_view(trajectories, rewards, reward_weights)
    roles, in_baseline = view.roles, _weights(algorithm, view) != 0
    if mask_truncated_rows:
        view = replace(view, roles=mask_truncated(roles, view.truncated))

    weights, world_model = _weights(algorithm, view), echo_weights(view.echo_mask, view.counted)
    echoed = (world_model != 0) if echo else mx.zeros(weights.shape, dtype=mx.bool_)
    counted = (weights != 0) | echoed
    forwards = {"old": 0, "reference": 0}

    def logprobs(kind: str, loss_tokens: mx.array) -> mx.array:
        tokens = loss_tokens | in_baseline if kind in algorithm.needs_logprobs else loss_tokens
        limits = {"pad_token_id": pad_token_id, "max_tokens": max_tokens, "max_rows": max_rows}
        scored, forwards[kind] = score_trajectories(
            model, segments, view.roles, rows=rows_with(tokens), temperature=temperature, **limits
        )
        return scored

    if reference or "reference" in algorithm.needs_logprobs:
        with adapters_disabled(model) if reference_adapter is None else adapter_replaced(model, reference_adapter):
            view = replace(view, reference_logprobs=logprobs("reference", counted))
    if "old" in algorithm.needs_logprobs:
        view = replace(view, old_logprobs=logprobs("old", counted))
    advantages = algorithm.advantages(replace(view, roles=roles))  # of what is masked too: it is in the baseline
    if old and view.old_logprobs is None:
        moving = counted if reference or full_score else (weights != 0) & (advantages != 0) | echoed
        view = replace(view, old_logprobs=logprobs("old", moving))
    return TrainBatch(
        segments=segments,
        view=view,
        advantages=advantages,
        weights=weights,
        echo_weights=world_model,
        temperature=temperature,
        full_score=full_score,
        forwards=forwards,
    )


def trajectory_view(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Sequence[float | None]],
    reward_weights: Sequence[float],
) -> AlgorithmBatch:
    """What an algorithm sees of trajectories before any forward pass: rewards, groups, roles, turns, states.

    Args:
        trajectories: B trajectories.
        rewards: `[B][K]`, a reward per reward function; None abstains.
        reward_weights: `[K]`.
    """
    segments = [trajectory.segments for trajectory in trajectories]
    return AlgorithmBatch(
        rewards=rewards,
        reward_weights=reward_weights,
        group_ids=[trajectory.group_id for trajectory in trajectories],
        roles=_padded([_trained(parts, "roles") for parts in segments], np.int32),
        turns=_padded([_trained(parts, "turns") for parts in segments], np.int32),
        turn_rewards=[[turn.reward for turn in trajectory.turns] for trajectory in trajectories],
        state_ids=[[turn.state_id for turn in trajectory.turns] for trajectory in trajectories],
        valid=[not trajectory.failed for trajectory in trajectories],
        truncated=[trajectory.truncated for trajectory in trajectories],
        sampler_logprobs=_padded([_trained(parts, "sampler_logprobs") for parts in segments], np.float32),
    )


def batch_from_trajectories(
    *,
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    group_size: int,
    pad_token_id: int,
    algorithm: Algorithm,
    compute_reference: bool = False,
    temperature: float = 1.0,
    **options: Any,
) -> TrainBatch:
    """The batch of episodes that carry their own rewards.

    Args:
        model: the policy.
        trajectories: from `generate_agentic_trajectories`; a `reward` set on one takes the place of its return.
        group_size: trajectories a group.
        pad_token_id: id that fills rows.
        algorithm: the objective.
        compute_reference: score the tokens under the base model, for a KL term.
        temperature: the sampling temperature.
        **options: further arguments of `make_batch`.

    Raises:
        ValueError: a group does not have group_size members.
    """
    rewards = [t.environment_return if t.reward is None else t.reward for t in trajectories]
    return batch_from_rollouts(
        model=model,
        completions=trajectories,
        rewards=rewards,
        group_size=group_size,
        pad_token_id=pad_token_id,
        algorithm=algorithm,
        compute_reference=compute_reference,
        temperature=temperature,
        **options,
    )


def batch_from_rollouts(
    *,
    model: nn.Module,
    completions: Sequence[Trajectory],
    rewards: Sequence[float | None],
    group_size: int,
    pad_token_id: int,
    algorithm: Algorithm,
    compute_reference: bool = False,
    temperature: float = 1.0,
    **options: Any,
) -> TrainBatch:
    """The batch of completions and a reward each.

    Args:
        model: the policy.
        completions: from `generate_groups`.
        rewards: one a completion; None abstains.
        group_size: completions a group.
        pad_token_id: id that fills rows.
        algorithm: the objective.
        compute_reference: score the tokens under the base model, for a KL term.
        temperature: the sampling temperature.
        **options: further arguments of `make_batch`.

    Raises:
        ValueError: rewards and completions differ in number, or a group does not have group_size members.
    """
    if len(rewards) != len(completions):
        raise ValueError(f"rewards must have one entry a completion, got {len(rewards)} for {len(completions)}.")
    sizes: dict[int, int] = {}
    for completion in completions:
        sizes[completion.group_id] = sizes.get(completion.group_id, 0) + 1
    if wrong := {group: size for group, size in sizes.items() if size != group_size}:
        group, size = next(iter(wrong.items()))
        raise ValueError(f"every group must have group_size = {group_size} trajectories, group {group} has {size}.")
    return make_batch(
        model,
        completions,
        algorithm,
        rewards=[[reward] for reward in rewards],
        reward_weights=[1.0],
        reference=compute_reference,
        temperature=temperature,
        pad_token_id=pad_token_id,
        **options,
    )


def _weights(algorithm: Algorithm, view: AlgorithmBatch) -> mx.array:
    return reduction_weights(algorithm.reduction, view.roles, view.turns, view.counted)


def _trained(segments: Sequence[Segment], name: str) -> npt.NDArray[Any]:
    """One array of the segments at the tokens that have a role, end to end."""
    parts = [getattr(segment, name)[segment.roles != Role.MASKED] for segment in segments]
    return np.concatenate(parts) if parts else np.zeros(0)


def _padded(rows: Sequence[npt.NDArray[Any]], dtype: type) -> mx.array:
    width = max([1, *(len(row) for row in rows)])
    padded = np.zeros((len(rows), width), dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return mx.array(padded)
