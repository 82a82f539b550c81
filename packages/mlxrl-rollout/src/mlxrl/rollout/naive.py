"""The plainest possible rollout, to hold the engine against: one row, no cache, no batch."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Environment
from mlxrl.rollout.chat import ChatEncoder
from mlxrl.rollout.environment_calls import EnvironmentFailedError
from mlxrl.rollout.episode import Episode, EpisodeLimits, RolloutRequest
from mlxrl.rollout.sampling import draw
from mlxrl.rollout.trajectory import Trajectory


def naive_rollout(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: Sequence[RolloutRequest],
    limits: EpisodeLimits,
    *,
    use_chat_template: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Trajectory]:
    """Play requests one after the other, reading the whole text again for every token.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        requests: the episodes.
        limits: sampling and lengths, as an engine's `limits`.
        use_chat_template: see `ChatEncoder`.
        template_kwargs: see `ChatEncoder`.

    Returns:
        Trajectories equal to `Engine.rollout` on the same requests, up to float rounding.
    """
    encoder = ChatEncoder(tokenizer, use_chat_template=use_chat_template, template_kwargs=template_kwargs)
    players: dict[int, tuple[Environment, Episode]] = {}
    episodes = [Episode(request, encoder, limits, players) for request in requests]
    for episode in episodes:
        _play(model, episode)
    return [episode.trajectory(policy_version=0) for episode in episodes]


def _play(model: nn.Module, episode: Episode) -> None:
    key = episode.request.key
    key_1_2 = mx.array([[key & 0xFFFFFFFF, key >> 32]], dtype=mx.uint32)
    _ask(episode)
    while not episode.finished:
        ended = False
        while not ended:
            logits_1_V = model(mx.array([episode.token_ids]))[:, -1]
            token_1, logprob_1 = draw(
                logits_1_V, key_1_2, mx.array([episode.num_drawn], dtype=mx.uint32), episode.sampling
            )
            token: Any = token_1.item()
            logprob: Any = logprob_1.item()
            ended = episode.push(token, logprob)
        episode.end_action()
        _ask(episode)
    try:
        episode.close()
    except EnvironmentFailedError as fault:
        episode.close_error = str(fault)


def _ask(episode: Episode) -> None:
    try:
        episode.receive(episode.consult())
    except EnvironmentFailedError as fault:
        episode.receive(fault)
