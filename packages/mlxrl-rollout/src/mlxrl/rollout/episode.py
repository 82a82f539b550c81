"""One episode on the host: the tokens so far, and the environment it is played in."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mlxrl.env import Environment, Message, StepResult, StopReason, SyncEnv, as_messages
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.environment_calls import EnvironmentFailedError, asked, checked_state_id, own_copy
from mlxrl.rollout.sampling import SamplingConfig, is_whole
from mlxrl.rollout.trajectory import Role, Segment, Trajectory, Turn

Context = Literal["transcript", "turn"]

# Characters a token of the room that is left, beyond which a text is not encoded to its end.
FLOOD = 16
SHARED = (
    "the factory returned one environment for several episodes, which would play in one another's; "
    "return a new one for each call"
)


@dataclass(frozen=True)
class RolloutRequest:
    """An episode to play.

    Args:
        task: the task, carried through to the trajectory.
        make: builds the environment; called once, by the engine.
        group_id: the group the trajectory belongs to.
        sample_index: the place within the group.
        key: 64-bit random key of the row.
        sampling: how this row's tokens are drawn; None: as the engine draws.

    Raises:
        ValueError: key is no whole number from 0 to 2^64 - 1, or sampling no SamplingConfig.
    """

    task: Any
    make: Callable[[], Environment]
    group_id: int
    sample_index: int
    key: int
    sampling: SamplingConfig | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.key) or not 0 <= self.key < 2**64:
            raise ValueError(f"key must be a whole number from 0 to 2^64 - 1, got {self.key}; `derive_key` makes one.")
        object.__setattr__(self, "key", int(self.key))
        if self.sampling is not None and not isinstance(self.sampling, SamplingConfig):
            raise ValueError(f"sampling must be a SamplingConfig, or None for the engine's, got {self.sampling!r}.")


@dataclass(frozen=True)
class EpisodeLimits:
    """What every episode of an engine keeps to; `Engine` documents each."""

    sampling: SamplingConfig
    max_prompt_len: int | None = None
    max_turns: int | None = None
    max_observation_len: int | None = None
    max_context: int | None = None
    context: Context = "transcript"
    echo: bool = False


@dataclass(frozen=True)
class Reply:
    """What the environment says: at first without, later with the result of a step."""

    observation: str | Sequence[Message]
    state_id: Hashable
    result: StepResult | None = None


@dataclass
class SegmentBuilder:
    """A segment while it grows: parallel lists, a place per token."""

    token_ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)

    def extend(
        self, token_ids: Sequence[int], roles: Sequence[Role], turn: int, logprobs: Sequence[float] | None = None
    ) -> None:
        """Add tokens of one turn."""
        self.token_ids += token_ids
        self.roles += roles
        self.turns += [turn] * len(token_ids)
        self.sampler_logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs

    def build(self) -> Segment:
        """The finished arrays."""
        return Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            roles=np.array(self.roles, dtype=np.int8),
            turns=np.array(self.turns, dtype=np.int32),
            sampler_logprobs=np.array(self.sampler_logprobs, dtype=np.float32),
        )


class Episode:
    """Plays one request: `consult` asks the environment, `receive` takes its reply, `push` the model's tokens.

    User code runs in `consult` and `close` alone, so that it may run in another thread, raise or hang.

    Args:
        request: what to play.
        encoder: of the model's tokenizer.
        limits: what it keeps to.
        players: who plays in an environment, by its id; the same for all episodes of a rollout.
    """

    def __init__(
        self,
        request: RolloutRequest,
        encoder: ChatEncoder,
        limits: EpisodeLimits,
        players: "dict[int, tuple[Environment, Episode]] | None" = None,
    ):
        self.request, self.encoder, self.limits = request, encoder, limits
        self.close_error: str | None = None
        """What went wrong when the environment was closed."""
        self._players = {} if players is None else players
        self._shares_environment = False
        self.sampling = request.sampling or limits.sampling
        self.max_draws = 0
        """Most tokens of this turn's action."""
        self._ends, self._stops = encoder.eos_ids, self.sampling.stop
        self._num_drawn_before = 0
        self._environment: SyncEnv | None = None
        self._max_turns = 1
        self._messages: list[Message] = []
        self._segment = SegmentBuilder()
        self._segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._action: list[int] = []
        self._logprobs: list[float] = []
        self._action_text = ""
        self._action_cut = False
        self._stop_reason: StopReason | None = None
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the episode is over."""
        return self._stop_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the current segment: what the model's next token is conditioned on."""
        return [*self._segment.token_ids, *self._action]

    @property
    def num_drawn(self) -> int:
        """Tokens of all actions so far."""
        return self._num_drawn_before + len(self._action)

    @property
    def most_tokens(self) -> int:
        """Tokens of the current segment when this turn's action is as long as it may be."""
        return len(self._segment.token_ids) + self.max_draws

    @property
    def on_last_turn(self) -> bool:
        """Whether the episode is over after this turn, whatever the environment says."""
        return len(self._turns) + 1 >= self._max_turns

    @property
    def starts_afresh(self) -> bool:
        """Whether each turn is a segment of its own, read from its start."""
        return self.limits.context == "turn" or self.encoder.rewrites_history

    def consult(self) -> Reply:
        """Ask the environment: for its first observation, later for its answer to the action.

        Raises:
            EnvironmentFailedError: it raised, or returned what it must not.
        """
        if self._environment is None:
            self._environment = environment = asked("make", self._make)
            observation = asked("reset", environment.reset)
            return Reply(observation, asked("state_id", lambda: checked_state_id(environment, observation)))
        environment = self._environment
        result = asked("step", lambda: own_copy(environment.step(self._action_text)))
        if self._is_over(result):
            return Reply(result.observation, None, result)
        try:
            state_id = asked("state_id", lambda: checked_state_id(environment, result.observation))
        except EnvironmentFailedError as fault:
            fault.result = result
            raise
        return Reply(result.observation, state_id, result)

    def close(self) -> None:
        """Close the environment, if one was made; twice is once. Not while `consult` runs.

        Raises:
            EnvironmentFailedError: it raised.
        """
        if self._environment is not None:
            asked("close", self._environment.close)

    def receive(self, reply: Reply | EnvironmentFailedError) -> None:
        """Take what `consult` gave; afterwards the episode is finished, and to be closed, or the model is to speak."""
        result = reply.result
        is_over = result is not None and self._is_over(result)
        if self._action:
            self._end_turn(result)
        if isinstance(reply, EnvironmentFailedError):
            self._fail(StopReason.env_error, str(reply))
        elif result is not None and is_over:
            self._stop_reason = self._why_over(result)
        else:
            self._show(reply)

    def time_out(self, seconds: float) -> None:
        """The environment did not answer in time: the episode fails."""
        if self._action:
            self._end_turn(None)
        self._fail(StopReason.timeout, f"the environment took longer than {seconds:g} s")

    def push(self, token: int, logprob: float) -> bool:
        """Record a sampled token; returns whether it ends the action."""
        self._action.append(token)
        self._logprobs.append(logprob)
        if token in self._ends or (self._stops and self._says_stop()):
            self._action_cut = False
            return True
        self._action_cut = len(self._action) >= self.max_draws
        return self._action_cut

    def end_action(self) -> None:
        """The action is complete: from now on the environment can be consulted about it."""
        self._action_text = self.encoder.text(self._action)

    def trajectory(self, policy_version: int) -> Trajectory:
        """The record of the finished episode."""
        assert self._stop_reason is not None
        if self._shares_environment:
            self._fail(StopReason.env_error, str(EnvironmentFailedError("make", ValueError(SHARED))))
        segments = [*self._segments, self._segment.build()] if self._segment.token_ids else self._segments
        return Trajectory(
            task=self.request.task,
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            segments=tuple(segments),
            turns=tuple(self._turns),
            stop_reason=self._stop_reason,
            policy_version=policy_version,
            max_turns=self._max_turns,
            error=self._error,
            close_error=self.close_error,
        )

    def _make(self) -> SyncEnv:
        environment = self.request.make()
        _, player = self._players.setdefault(id(environment), (environment, self))
        if player is not self:
            player._shares_environment = self._shares_environment = True
            raise ValueError(SHARED)
        most = environment.max_turns
        if isinstance(most, bool) or not hasattr(most, "__index__") or most < 1:
            raise ValueError(f"max_turns must be a whole number of at least 1, got {most!r}")
        self._max_turns = min(int(most), self.limits.max_turns or int(most))
        return SyncEnv(environment, self._max_turns)

    def _says_stop(self) -> bool:
        """Whether the action's end spells a stop text; each token adds a byte or more, so that a tail is enough.

        Tokens of single bytes are no text where a tail begins inside a character, so other tails are tried then; what
        one of them says counts if the whole action says it.
        """
        longest = max(len(text.encode()) for text in self.sampling.stop)
        for beyond in (4, 3, 2, 1):
            tail = self.encoder.text(self._action[-longest - beyond :])
            if any(text in tail for text in self.sampling.stop):
                action = self.encoder.text(self._action)
                return any(text in action for text in self.sampling.stop)
            if "\ufffd" not in tail:
                return False
        return False

    def _show(self, reply: Reply) -> None:
        """Put the observation before the model: encode it, and see that it fits."""
        first, messages = not self._turns, as_messages(reply.observation)
        self._messages += messages
        most = None if first else self._most_content(messages)
        try:
            if first or self.limits.context == "turn":
                encoded = self.encoder.opening(reply.observation, max_content=most)
            elif self.encoder.rewrites_history:
                encoded = self.encoder.conversation(self._messages, max_content=most)
            else:
                after_eos = self._segment.token_ids[-1] in self.encoder.eos_ids
                encoded = self.encoder.observation(reply.observation, after_eos=after_eos, max_content=most)
            if (first or self.starts_afresh) and not encoded.token_ids:
                raise ValueError("it has no tokens, and the model needs one to go on from")
        except Exception as error:  # templates and tokenizers refuse what they cannot encode each in their own way
            self._fail(
                StopReason.env_error, str(EnvironmentFailedError("the prompt" if first else "the observation", error))
            )
            return
        if not first and self.starts_afresh:
            self._segments.append(self._segment.build())
            self._segment = SegmentBuilder()
        length = len(self._segment.token_ids) + len(encoded.token_ids)
        for name, limit in (("max_prompt_len", self.limits.max_prompt_len), ("max_context", self.limits.max_context)):
            if first and limit is not None and length > limit:
                self._fail(StopReason.context, f"the prompt has {length} tokens, {name} is {limit}")
                return
        room = self.sampling.max_tokens if self.limits.max_context is None else self.limits.max_context - length
        if room < 1:
            self._stop_reason = StopReason.context
            return
        echoed = self.limits.echo and not first and not self.starts_afresh
        roles = [Role.ECHO if echoed and is_content else Role.MASKED for is_content in encoded.content]
        self._segment.extend(encoded.token_ids, roles, len(self._turns))
        self._reply, self._observation_cut = reply, encoded.cut
        self.max_draws = min(self.sampling.max_tokens, room)

    def _most_content(self, messages: Sequence[Message]) -> int | None:
        """Most tokens of an observation that are kept or, of one that cannot fit into the context, that show it."""
        most, context = self.limits.max_observation_len, self.limits.max_context
        if context is None:
            return most
        left = context - (0 if self.starts_afresh else len(self._segment.token_ids))
        if sum(len(message["content"]) for message in messages) <= FLOOD * left:
            return most
        return 2 * left if most is None else min(most, 2 * left)

    def _end_turn(self, result: StepResult | None) -> None:
        """Record the turn; a result of None: the environment did not answer as it should."""
        self._segment.extend(self._action, [Role.ACTION] * len(self._action), len(self._turns), self._logprobs)
        end = len(self._segment.token_ids)
        self._turns.append(
            Turn(
                observation=self._reply.observation,
                state_id=self._reply.state_id,
                segment=len(self._segments),
                span=(end - len(self._action), end),
                action=self._action_text,
                reward=0.0 if result is None else result.reward,
                info={} if result is None else result.info,
                observation_cut=self._observation_cut,
                action_cut=self._action_cut,
            )
        )
        self._messages.append({"role": "assistant", "content": self._action_text})
        self._num_drawn_before += len(self._action)
        self._action, self._logprobs = [], []

    def _is_over(self, result: StepResult) -> bool:
        return result.terminated or result.truncated or self.on_last_turn

    def _why_over(self, result: StepResult) -> StopReason:
        if self._max_turns == 1 and self._action_cut:
            return StopReason.length if self.max_draws == self.sampling.max_tokens else StopReason.context
        if not result.terminated:
            return StopReason.max_turns
        return StopReason.stop if self._max_turns == 1 else StopReason.env_done

    def _fail(self, reason: StopReason, error: str) -> None:
        self._stop_reason, self._error = reason, error
