"""The record of an episode: token ids are the record, text is a view."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxrl.env import Message, StopReason


class Role(IntEnum):
    """What a token is to the loss."""

    MASKED = 0
    """Context: prompt, template, observation. Not trained."""
    ACTION = 1
    """Sampled by the policy, the end-of-sequence token included. Trained with the policy loss."""
    ECHO = 2
    """Environment text that the world-model term predicts."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens that the model saw as one sequence.

    Args:
        token_ids: int32 `[T]`.
        roles: int8 `[T]`, a `Role` per token.
        turns: int32 `[T]`, the turn each token belongs to; an observation belongs to the turn that answers it.
        sampler_logprobs: float32 `[T]`, log-probability under the distribution sampled from; 0 off the ACTION tokens.
    """

    token_ids: npt.NDArray[np.int32]
    roles: npt.NDArray[np.int8]
    turns: npt.NDArray[np.int32]
    sampler_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Turn:
    """One observation and the action taken on it.

    Args:
        observation: what the model was shown.
        state_id: the environment's name for the state, asked before the action.
        segment: index of the segment that holds the action.
        span: start and end of the action's tokens in that segment.
        action: the action as text, without its end-of-sequence token.
        reward: what the environment gave for the action.
        info: what else the environment told.
        observation_cut: whether the observation was cut to the allowed length.
        action_cut: whether a limit of tokens, the action's or the context's, ended the action.
    """

    observation: str | Sequence[Message]
    state_id: Hashable
    segment: int
    span: tuple[int, int]
    action: str
    reward: float = 0.0
    info: Mapping[str, object] = field(default_factory=dict)
    observation_cut: bool = False
    action_cut: bool = False


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode of one task; a completion of a plain prompt is a trajectory of one turn.

    Args:
        task: what was played, as the caller gave it.
        group_id: the group that shares the task's baseline, given by the caller.
        sample_index: the place within the group.
        segments: the tokens; one segment while the transcript only grows, one a turn where each has its own prompt.
        turns: the turns in order.
        stop_reason: why the episode ended.
        policy_version: version of the weights that sampled it.
        max_turns: most turns it could have had, by its environment's limit or the engine's.
        error: why the episode failed; None when it did not. A failed trajectory is out of loss and baseline.
        close_error: what went wrong when its environment was closed; the episode stands.
        reward: total reward, environment and reward functions together; None before scoring or when all abstain.
        reward_parts: the same by name.
    """

    task: Any
    group_id: int
    sample_index: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    policy_version: int = 0
    max_turns: int = 1
    error: str | None = None
    close_error: str | None = None
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the environment or its rewards broke."""
        return self.error is not None

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended the episode or an action of it."""
        ended_by_limit = self.stop_reason in (StopReason.length, StopReason.context)
        return ended_by_limit or any(turn.action_cut for turn in self.turns)

    @property
    def environment_return(self) -> float:
        """Undiscounted sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def completion(self) -> str:
        """The actions as text, a line each."""
        return "\n".join(turn.action for turn in self.turns)

    @property
    def completion_ids(self) -> list[int]:
        """The sampled token ids of all turns, end-of-sequence tokens included."""
        return [int(token) for s in self.segments for token in s.token_ids[s.roles == Role.ACTION]]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(int((segment.roles == Role.ACTION).sum()) for segment in self.segments)
