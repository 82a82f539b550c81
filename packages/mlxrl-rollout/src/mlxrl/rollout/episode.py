"""One row on the host: the tokens so far, and the environment it plays in."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mlxrl.env import Environment, Message, StepResult, StopReason, as_messages, as_step_result
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.sampling import SamplingConfig
from mlxrl.rollout.trajectory import Role, Segment, Trajectory, Turn

Context = Literal["transcript", "turn"]


@dataclass(frozen=True)
class RolloutRequest:
    """An episode to play.

    Args:
        task: the task, carried through to the trajectory.
        make: builds the environment; called once, by the engine.
        group_id: the group the trajectory belongs to.
        sample_index: the place within the group.
        key: 64-bit random key of the row.
    """

    task: Any
    make: Callable[[], Environment]
    group_id: int
    sample_index: int
    key: int


@dataclass(frozen=True)
class EpisodeLimits:
    """What every episode of an engine keeps to; `Engine` documents each."""

    sampling: SamplingConfig
    max_prompt_len: int | None = None
    max_turns: int | None = None
    max_observation_len: int | None = None
    context: Context = "transcript"
    echo: bool = False


@dataclass
class SegmentBuilder:
    """A segment while it grows: parallel lists, a place per token."""

    token_ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)

    def append(self, token: int, role: Role, turn: int, logprob: float = 0.0) -> None:
        """Add one token."""
        self.token_ids.append(token)
        self.roles.append(role)
        self.turns.append(turn)
        self.sampler_logprobs.append(logprob)

    def build(self) -> Segment:
        """The finished arrays."""
        return Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            roles=np.array(self.roles, dtype=np.int8),
            turns=np.array(self.turns, dtype=np.int32),
            sampler_logprobs=np.array(self.sampler_logprobs, dtype=np.float32),
        )


class Episode:
    """Plays one request.

    `pending` holds the tokens that the model has yet to read before it may speak; `cache` the row's own key-value
    cache between turns, None where the row must be read from its start.
    """

    def __init__(self, request: RolloutRequest, encoder: ChatEncoder, limits: EpisodeLimits):
        self.request, self.encoder, self.limits = request, encoder, limits
        self.pending: list[int] = []
        self.cache: list[Any] | None = None
        self.num_drawn = 0
        self._segment = SegmentBuilder()
        self._segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._action: list[int] = []
        self._stop_reason: StopReason | None = None
        self._error: str | None = None
        self._start()

    @property
    def finished(self) -> bool:
        """Whether the episode is over."""
        return self._stop_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the current segment: what the model's next token is conditioned on."""
        return self._segment.token_ids

    def push(self, token: int, logprob: float) -> bool:
        """Record a sampled token; returns whether it ends the action."""
        self._segment.append(token, Role.ACTION, len(self._turns), logprob)
        self._action.append(token)
        self.num_drawn += 1
        return token in self.encoder.eos_ids or len(self._action) >= self.limits.sampling.max_tokens

    def end_turn(self) -> None:
        """Hand the action to the environment; afterwards the episode is finished or has tokens pending."""
        text = self.encoder.text(self._action)
        try:
            result = as_step_result(self._environment.step(text))
        except Exception as error:  # a user's environment may raise anything: the row fails, the run goes on
            self._record_turn(text, reward=0.0, info={})
            self._fail("step", error)
            return
        self._record_turn(text, reward=result.reward, info=dict(result.info))
        if result.terminated or result.truncated or len(self._turns) >= self._max_turns:
            self._stop_reason = self._why_over(result)
        else:
            self._continue_with(result.observation)

    def trajectory(self, policy_version: int) -> Trajectory:
        """The record of the finished episode."""
        assert self._stop_reason is not None
        segments = [*self._segments, self._segment.build()] if self._segment.token_ids else self._segments
        return Trajectory(
            task=self.request.task,
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            segments=tuple(segments),
            turns=tuple(self._turns),
            stop_reason=self._stop_reason,
            policy_version=policy_version,
            error=self._error,
        )

    def _start(self) -> None:
        where = "make"
        try:
            self._environment = self.request.make()
            most = self._environment.max_turns
            if not isinstance(most, int) or most < 1:
                raise ValueError(f"max_turns must be a whole number of at least 1, got {most!r}")
            self._max_turns = min(most, self.limits.max_turns or most)
            where = "reset"
            observation = self._environment.reset()
            messages = as_messages(observation)
            where = "state_id"
            state_id = self._ask_state(observation)
            where = "the prompt"
            prompt = self.encoder.prompt(messages)
            if not prompt:
                raise ValueError("it has no tokens, and the model needs one to go on from")
        except Exception as error:  # likewise
            self._fail(where, error)
            return
        limit = self.limits.max_prompt_len
        if limit is not None and len(prompt) > limit:
            self._stop_reason = StopReason.context
            self._error = f"the prompt has {len(prompt)} tokens, max_prompt_len is {limit}"
            return
        self._show(observation, state_id)
        self._read(prompt)

    def _continue_with(self, observation: str | Sequence[Message]) -> None:
        where, most = "state_id", self.limits.max_observation_len
        try:
            state_id = self._ask_state(observation)
            where = "the observation"
            if self.limits.context == "turn":
                encoded = self.encoder.opening(observation, max_content=most)
                if not encoded.token_ids:
                    raise ValueError("it has no tokens, and the model needs one to go on from")
            else:
                encoded = self.encoder.observation(observation, after_eos=self._action_ended, max_content=most)
        except Exception as error:  # likewise
            self._fail(where, error)
            return
        if self.limits.context == "turn":
            self._segments.append(self._segment.build())
            self._segment = SegmentBuilder()
            self._show(observation, state_id, cut=encoded.cut)
            self._read(encoded.token_ids)
            return
        last_sampled = self._segment.token_ids[-1]  # the model has not read its own last token yet
        self._show(observation, state_id, cut=encoded.cut)
        self._read(encoded.token_ids, encoded.content)
        self.pending = [last_sampled, *self.pending]

    def _show(self, observation: str | Sequence[Message], state_id: Hashable, *, cut: bool = False) -> None:
        self._observation, self._state_id, self._cut, self._action = observation, state_id, cut, []

    def _read(self, token_ids: list[int], content: list[bool] | None = None) -> None:
        for i, token in enumerate(token_ids):
            is_echo = self.limits.echo and content is not None and content[i]
            self._segment.append(token, Role.ECHO if is_echo else Role.MASKED, len(self._turns))
        self.pending = token_ids

    def _record_turn(self, text: str, *, reward: float, info: dict[str, object]) -> None:
        end = len(self._segment.token_ids)
        turn = Turn(
            observation=self._observation,
            state_id=self._state_id,
            segment=len(self._segments),
            span=(end - len(self._action), end),
            action=text,
            reward=reward,
            info=info,
            observation_cut=self._cut,
            action_cut=not self._action_ended,
        )
        self._turns.append(turn)

    @property
    def _action_ended(self) -> bool:
        return self._action[-1] in self.encoder.eos_ids

    def _ask_state(self, observation: str | Sequence[Message]) -> Hashable:
        state_id = self._environment.state_id(observation)
        hash(state_id)  # an unhashable id fails here, in the environment's name
        return state_id

    def _why_over(self, result: StepResult) -> StopReason:
        if self._max_turns == 1:
            return StopReason.stop if self._action_ended else StopReason.length
        return StopReason.env_done if result.terminated else StopReason.max_turns

    def _fail(self, where: str, error: Exception) -> None:
        self._stop_reason = StopReason.env_error
        self._error = f"{where} of the environment raised {type(error).__name__}: {error}"
