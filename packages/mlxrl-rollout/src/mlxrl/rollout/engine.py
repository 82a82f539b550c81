"""The one engine: requests in, trajectories out."""

import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Environment
from mlxrl.policy import MergedPolicy, context_length, decoding, flatten_quantized_rows, on_cuda
from mlxrl.rollout.audit import audit
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.episode import Context, Episode, EpisodeLimits, RolloutRequest
from mlxrl.rollout.play import Play, RolloutStats, Room
from mlxrl.rollout.sampling import SamplingConfig, is_whole
from mlxrl.rollout.trajectory import Trajectory

# On CUDA a step costs almost the same for fewer rows, and moving rows costs several steps: rows wait for one another.
CUDA_REGROUP_SHARE = 0.25

Weights = Literal["shared", "merged"]


class Engine:
    """Plays episodes in batches: rows share forward passes, leave when they end, and make room for the next.

    Each distinct prompt is read once and its cache forked to the rows that start with it; a row keeps its cache over
    turns and reads only what is new, or all again after an observation of no tokens. A row draws from its own key, so
    what it draws does not depend on the others.

    On its first use for a model a few tokens are played in each of the engine's ways and compared with plain passes
    (`mlxrl.rollout.audit`); a model whose rows mix in a batch is played row by row, with a warning.

    An engine belongs to the thread that made it, as MLX's streams do. All environments of a rollout are made and reset
    before its first token; not so where `deterministic` is false, and there a prompt is read again where rows that
    start with it come later than others have left.

    Args:
        model: the policy, in evaluation mode.
        tokenizer: mlx-lm's tokenizer of the model.
        sampling: temperature, filters, tokens per action and stop texts; a request may bring its own.
        width: most rows that hold a cache at once.
        max_prompt_len: most tokens of a first prompt; a longer one fails its row and is never cut. None: no limit.
        max_turns: most turns of an episode, if the environment allows more. None: the environment's own limit.
        max_observation_len: most tokens of a later observation's text; the rest is cut and the turn says so. None: all.
        max_context: most tokens of a transcript; an action is cut there, and an episode without room for an
            observation ends. None: what the model was made for, if its `args` tell (`context_length`).
        context: "transcript" (the model sees all turns so far) or "turn" (each turn's prompt is its observation alone).
        echo: whether the words of later observations get the role ECHO.
        use_chat_template: see `ChatEncoder`.
        template_kwargs: see `ChatEncoder`.
        deterministic: rows go on at points that the tokens alone decide, and wait there for their environments; False:
            as soon as these answer.
        env_timeout: seconds an environment has for an answer, after which its row fails. None: no bound, and
            environments run in the caller's thread.
        cache_bytes: most bytes of what the rows and the prompts that others wait for have read, at their longest; rows
            wait where they would not fit, but one and its prompt always do. Buffers grow by 256 tokens, and while rows
            change places old and new ones exist. None: no bound.
        weights: what is sampled from: "shared" (the model itself, the adapter beside its base) or "merged" (a
            dense copy with the adapter merged into it, float16 of a 16-bit model, renewed whenever the adapter has
            changed).

    Raises:
        ValueError: an option is not what it may be, the model is in training mode or cannot be played token by token,
            or a chat template is asked for that the tokenizer does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        sampling: SamplingConfig,
        *,
        width: int = 64,
        max_prompt_len: int | None = None,
        max_turns: int | None = None,
        max_observation_len: int | None = None,
        max_context: int | None = None,
        context: Context = "transcript",
        echo: bool = False,
        use_chat_template: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
        deterministic: bool = True,
        env_timeout: float | None = 60.0,
        cache_bytes: int | None = None,
        weights: Weights = "shared",
    ):
        if max_context is None:
            max_context = context_length(getattr(getattr(model, "args", None), "__dict__", {}))
        limits = {
            "max_prompt_len": max_prompt_len,
            "max_turns": max_turns,
            "max_observation_len": max_observation_len,
            "max_context": max_context,
        }
        for name, value in {"width": width, "cache_bytes": cache_bytes, **limits}.items():
            if value is not None and (not is_whole(value) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        limits = {name: None if value is None else int(value) for name, value in limits.items()}
        if not isinstance(sampling, SamplingConfig):
            raise ValueError(f"sampling must be a SamplingConfig, got {sampling!r}.")
        for name, flag in {"deterministic": deterministic, "echo": echo}.items():
            if not isinstance(flag, bool | np.bool_):
                raise ValueError(f"{name} must be true or false, got {flag!r}.")
        if not isinstance(use_chat_template, bool | np.bool_ | None):
            raise ValueError(f"use_chat_template must be true, false or None, got {use_chat_template!r}.")
        is_number = isinstance(env_timeout, Real) and not isinstance(env_timeout, bool)
        if env_timeout is not None and not (is_number and env_timeout > 0):
            raise ValueError(f"env_timeout must be above 0 seconds, or None for no bound, got {env_timeout!r}.")
        if context not in ("transcript", "turn"):
            raise ValueError(f"context must be 'transcript' or 'turn', got {context!r}.")
        _refuse_training(model)
        if on_cuda():
            flatten_quantized_rows(model)
        verdict = audit(model)
        name = getattr(getattr(model, "args", None), "model_type", type(model).__module__.rsplit(".", 1)[-1])
        if verdict.row_bytes is None:
            raise ValueError(f"a {name} model cannot be sampled from token by token: {verdict.reason}; use another.")
        if not verdict.batched:
            warnings.warn(f"a {name} model is played row by row: {verdict.reason.rstrip('.')}.", stacklevel=2)
        self.model = model
        self.encoder = ChatEncoder(tokenizer, use_chat_template=use_chat_template, template_kwargs=template_kwargs)
        self.limits = EpisodeLimits(sampling=sampling, context=context, echo=echo, **limits)
        self.room = Room(
            width=int(width) if verdict.batched else 1,
            ragged=verdict.ragged,
            row_bytes=verdict.row_bytes,
            regroup_share=CUDA_REGROUP_SHARE if on_cuda() else 0.0,
            cache_bytes=cache_bytes,
        )
        self.deterministic, self.env_timeout = deterministic, env_timeout
        self._merged: MergedPolicy | None = None
        self.weights = weights
        self.stats = RolloutStats()

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are drawn where a request does not say."""
        return self.limits.sampling

    @property
    def weights(self) -> Weights:
        """What is sampled from; may be set between rollouts, and "shared" drops the merged copy."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        if weights not in ("shared", "merged"):
            raise ValueError(f"weights must be 'shared' or 'merged', got {weights!r}.")
        self._weights: Weights = weights
        if weights == "shared":
            self._merged = None

    @property
    def width(self) -> int:
        """Most rows that hold a cache at once; 1 for a model whose rows mix when they are batched."""
        return self.room.width

    def rollout(self, requests: Sequence[RolloutRequest], *, policy_version: int = 0) -> list[Trajectory]:
        """Play every request to its end.

        Args:
            requests: the episodes; rows that start with the same prompt share its reading.
            policy_version: recorded in the trajectories.

        Returns:
            A trajectory per request, in their order. An environment that raises or hangs costs its row only, and one
            that a factory gave to several episodes costs theirs: see `Trajectory.error`.

        Raises:
            ValueError: the model is in training mode.
        """
        _refuse_training(self.model)
        players: dict[int, tuple[Environment, Episode]] = {}
        episodes = [Episode(request, self.encoder, self.limits, players) for request in requests]
        model = self._sampled_from()
        play = Play(model, episodes, self.room, deterministic=self.deterministic, env_timeout=self.env_timeout)
        self.stats = play.stats
        with decoding(model):
            play.run()
        return [episode.trajectory(policy_version) for episode in episodes]

    def _sampled_from(self) -> nn.Module:
        if self.weights == "shared":
            return self.model
        if self._merged is None:
            self._merged = MergedPolicy(self.model)
        else:
            self._merged.renew()
        return self._merged.model


def _refuse_training(model: nn.Module) -> None:
    if model.training:
        raise ValueError("the model is in training mode, in which dropout acts; call model.eval() first.")
