"""The one engine: requests in, trajectories out."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.rollout.audit import rows_are_independent
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.decoder import DecodeBatch, prefill
from mlxrl.rollout.episode import Context, Episode, EpisodeLimits, RolloutRequest
from mlxrl.rollout.sampling import SamplingConfig
from mlxrl.rollout.trajectory import Trajectory


@dataclass
class RolloutStats:
    """What the last rollout cost."""

    decode_forwards: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0


class Engine:
    """Plays episodes in batches: rows share forward passes, leave when they end, and make room for the next.

    Each distinct prompt is read once and its cache forked to the rows that start with it; a row keeps its cache over
    turns and reads only what is new. A row draws from its own key, so what it draws does not depend on the others.

    Args:
        model: the policy, in evaluation mode.
        tokenizer: mlx-lm's tokenizer of the model.
        sampling: temperature, filters and tokens per action.
        width: most rows that decode at once; 1 for a model whose rows mix when they are batched.
        max_prompt_len: most tokens of a first prompt; a longer one fails its row and is never cut. None: no limit.
        max_turns: most turns of an episode, if the environment allows more. None: the environment's own limit.
        max_observation_len: most tokens of a later observation's text; the rest is cut and the turn says so. None: all.
        context: "transcript" (the model sees all turns so far) or "turn" (each turn's prompt is its observation alone).
        echo: whether the words of later observations get the role ECHO.
        use_chat_template: see `ChatEncoder`.
        template_kwargs: see `ChatEncoder`.

    Raises:
        ValueError: a number is below 1, context is unknown, or a chat template is asked for that the tokenizer does
            not have.
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
        context: Context = "transcript",
        echo: bool = False,
        use_chat_template: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        limits = {"max_prompt_len": max_prompt_len, "max_turns": max_turns, "max_observation_len": max_observation_len}
        for name, value in {"width": width, **limits}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if context not in ("transcript", "turn"):
            raise ValueError(f"context must be 'transcript' or 'turn', got {context!r}.")
        self.model, self.sampling = model, sampling
        self.width = width if width == 1 or rows_are_independent(model) else 1
        self.encoder = ChatEncoder(tokenizer, use_chat_template=use_chat_template, template_kwargs=template_kwargs)
        self.limits = EpisodeLimits(sampling=sampling, context=context, echo=echo, **limits)
        self.stats = RolloutStats()
        self._readers: Counter[tuple[int, ...]] = Counter()
        self._shared: dict[tuple[int, ...], list[Any]] = {}

    def rollout(self, requests: Sequence[RolloutRequest], *, policy_version: int = 0) -> list[Trajectory]:
        """Play every request to its end.

        Args:
            requests: the episodes; rows that start with the same prompt share its reading.
            policy_version: recorded in the trajectories.

        Returns:
            A trajectory per request, in their order. An environment that raises costs its row only: see
            `Trajectory.error`.
        """
        self.stats = RolloutStats()
        episodes = [Episode(request, self.encoder, self.limits) for request in requests]
        waiting = deque(episode for episode in episodes if not episode.finished)
        self._readers = Counter(tuple(episode.pending) for episode in waiting)
        self._shared = {}  # the weights may have changed since: nothing that was read before is used again
        batch, playing = DecodeBatch(self.model, self.sampling), []
        while waiting or playing:
            joining = [waiting.popleft() for _ in range(min(len(waiting), self.width - len(playing)))]
            if joining:
                self._join(batch, joining)
                playing += joining
            tokens, logprobs = batch.step()
            staying, continuing = [], []
            for row, (episode, token, logprob) in enumerate(zip(playing, tokens, logprobs, strict=True)):
                if not episode.push(token, logprob):
                    staying.append(row)
                    continue
                episode.end_turn()
                if not episode.finished:
                    if self.limits.context == "transcript":
                        episode.cache = batch.extract(row)
                    else:
                        self._readers[tuple(episode.pending)] += 1
                    continuing.append(episode)
            batch.keep(staying)
            waiting.extendleft(reversed(continuing))  # before those that have not begun: `width` rows hold a cache
            playing = [playing[row] for row in staying]
        self.stats.decode_forwards = batch.num_forwards
        self.stats.sampled_tokens = sum(episode.num_drawn for episode in episodes)
        return [episode.trajectory(policy_version) for episode in episodes]

    def _join(self, batch: DecodeBatch, episodes: Sequence[Episode]) -> None:
        caches = []
        for episode in episodes:
            if episode.cache is not None:
                caches.append(self._prefill(episode.pending, episode.cache))
                episode.cache = None  # the batch holds it now
            else:
                caches.append(self._read_once(tuple(episode.pending)))
        batch.join(
            caches,
            inputs=[episode.pending[-1] for episode in episodes],
            keys=[episode.request.key for episode in episodes],
            positions=[episode.num_drawn for episode in episodes],
        )

    def _read_once(self, prompt: tuple[int, ...]) -> list[Any]:
        """The cache of a prompt, kept from the first row that starts with it to the last."""
        cache = self._shared.pop(prompt, None) or self._prefill(prompt)
        self._readers[prompt] -= 1
        if self._readers[prompt]:
            self._shared[prompt] = cache
        return cache

    def _prefill(self, token_ids: Sequence[int], cache: list[Any] | None = None) -> list[Any]:
        if len(token_ids) > 1:
            self.stats.prefill_forwards += 1
            self.stats.prefill_tokens += len(token_ids) - 1
        return prefill(self.model, token_ids, cache)
