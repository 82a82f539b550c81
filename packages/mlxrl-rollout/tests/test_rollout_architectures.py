"""Every architecture of mlx-lm that a toy config can build: the engine is exact on it, or refuses it."""

import pkgutil
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import StepResult
from mlxrl.policy import (
    LoRAConfig,
    ModelError,
    checkpoint_blocks,
    plan_reading,
    score,
    shares_prefixes,
    split_head,
)
from mlxrl.policy.lora import UNTRAINABLE, attach_lora
from mlxrl.policy.testing import character_tokenizer
from mlxrl.rollout import Engine, Role, SamplingConfig, audit, group_requests

from .architecture_configs import VOCAB
from .architectures import CACHE_DIFFERS, REFUSED, ROW_BY_ROW, UNBUILT, UNINITIALISED, WHOLE, architecture_names, build

TEMPERATURE, WIDTH = 0.7, 5
# The end of an action is every eighth token, so that rows leave at different times.
TOKENIZER = TokenizerWrapper(character_tokenizer(), eos_token_ids=list(range(1, VOCAB, 8)))

# What reads every row whole: deepseek_v41 and llama4 have caches of their own kind, gemma3n has no halves, and of
# phi3small a cache says something else than a full forward.
UNSHARED = {"deepseek_v41", "gemma3n", "llama4", "phi3small"}
# Adapters that no gradient reaches: keys and values that are rounded, the index of past tokens to attend to, and a
# router whose weights are 1 where no second expert comes close.
UNREACHED = {
    "afm7": r"\.qkv_proj\.lora_b\.[12]$",
    "deepseek_v32": r"\.indexer\.",
    "glm_moe_dsa": r"\.indexer\.",
    "minimax_m3_vl": r"\.index_[qk]_proj\.",
    "phimoe": r"\.gate\.",
}


@pytest.fixture(params=architecture_names())
def name(request):
    return request.param


def test_every_module_of_mlx_lm_is_built_or_says_why_not():
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    assert modules == {*architecture_names(), *UNBUILT}
    assert not {*architecture_names()} & {*UNBUILT}


def test_a_cache_says_what_a_full_forward_says(name):
    model = build(name)
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=26).tolist()
    expected_L_V = np.array(model(mx.array([tokens]))[0])
    cache, said = make_prompt_cache(model), []
    # a prompt past the windows of 8, an answer, an observation, an answer
    for length in [10] + 3 * [1] + [7] + 6 * [1]:
        read, tokens = tokens[:length], tokens[length:]
        said.append(np.array(model(mx.array([read]), cache=cache)[0]))
    scale = expected_L_V.std(axis=-1).min()
    assert scale > 0.4  # of a uniform distribution every cache would be right
    # a fault that mlx-lm mends leaves the table of those that differ
    same = np.abs(np.concatenate(said) - expected_L_V).max() < 1e-3 * scale
    assert same == (name not in CACHE_DIFFERS)


def test_scores_are_those_of_a_full_forward(name):
    model, tokens_2_L = build(name), np.random.default_rng(0).integers(0, VOCAB, size=(2, 14))
    assert (split_head(model) is None) == (name in WHOLE)
    logits_2_L_V = np.array(model(mx.array(tokens_2_L[:, :-1])), dtype=np.float64)
    logprobs_2_L_V = logits_2_L_V - np.logaddexp.reduce(logits_2_L_V, axis=-1, keepdims=True)
    expected_2_L = np.take_along_axis(logprobs_2_L_V, tokens_2_L[:, 1:, None], axis=-1)[..., 0]
    mask_2_L = np.broadcast_to(np.arange(14) > 0, (2, 14))
    if name in UNINITIALISED:
        with pytest.raises(AttributeError, match="_no_grad"):
            score(model, tokens_2_L, mask_2_L)
        attach_lora(model, LoRAConfig(rank=2))
    scores = score(model, tokens_2_L, mask_2_L)
    assert np.abs(np.array(scores.logprobs)[:, 1:] - expected_2_L).max() < 1e-3


@pytest.fixture(scope="module")
def alike():
    """Three rows on each of two prompts of 26 tokens; scored are what follows, and a token of the prompts."""
    rng, prompt, lengths = np.random.default_rng(0), 26, (40, 35, 37, 29, 27, 40)
    tokens_6_L = rng.integers(5, VOCAB, size=(6, 40))
    tokens_6_L[2:, :prompt] = np.tile(tokens_6_L[:2, :prompt], (2, 1))
    mask_6_L = (np.arange(40) >= prompt) & (np.arange(40) < np.array(lengths)[:, None])
    mask_6_L[:, 12] = True
    reading = plan_reading([row[: length - 1] for row, length in zip(tokens_6_L, lengths, strict=True)])
    assert (len(reading.stems), reading.depth) == (2, prompt)
    return tokens_6_L, mask_6_L, rng.normal(size=(6, 39)) * mask_6_L[:, 1:]


def test_what_rows_share_is_read_once_with_the_scores_and_gradients_of_whole_rows(name, alike):
    tokens_6_L, mask_6_L, weights_6_L = alike
    model = build(name)
    if name not in UNTRAINABLE:
        attach_lora(model, LoRAConfig(rank=2))
        values: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
        drawn = [(path, 0.1 * mx.random.normal(value.shape)) for path, value in values.items()]
        model.update(tree_unflatten(drawn))
    assert shares_prefixes(model) == (name not in UNSHARED)
    if name in UNSHARED:
        return

    def shared():
        return score(model, tokens_6_L, mask_6_L, with_gradient=True).logprobs[:, 1:]

    def whole():
        logits_6_L_V = model(mx.array(tokens_6_L[:, :-1])).astype(mx.float32)
        logprobs_6_L_V = logits_6_L_V - mx.logsumexp(logits_6_L_V, axis=-1, keepdims=True)
        return mx.take_along_axis(logprobs_6_L_V, mx.array(tokens_6_L[:, 1:, None]), axis=-1)[..., 0]

    def gradient(logprobs):
        _, tree = nn.value_and_grad(model, lambda: (mx.array(weights_6_L.astype(np.float32)) * logprobs()).sum())()
        return np.concatenate([np.array(leaf).ravel() for _, leaf in tree_flatten(tree)])

    assert np.abs(np.array(shared() - whole()))[mask_6_L[:, 1:]].max() < 1e-3
    if name not in UNTRAINABLE:
        expected = gradient(whole)
        for checkpointing in (False, True):  # which may end the sharing
            checkpoint_blocks(model, enabled=checkpointing)
            assert np.linalg.norm(gradient(shared) - expected) < 1e-5 * np.linalg.norm(expected)


def update(model):
    """A step along the policy gradient of four rows, two on each of two prompts; returns gradient and loss function."""
    tokens_4_L = np.random.default_rng(0).integers(5, VOCAB, size=(4, 14))
    tokens_4_L[[1, 3], :8] = tokens_4_L[[0, 2], :8]
    advantages_4_1 = mx.array([[1.0], [-1.0], [0.5], [-0.5]])
    mask_4_L = np.broadcast_to(np.arange(14) >= 8, (4, 14))

    def loss():
        return -(advantages_4_1 * score(model, tokens_4_L, mask_4_L, with_gradient=True).logprobs).mean()

    value, gradient = nn.value_and_grad(model, loss)()
    mx.eval(value, gradient)
    optim.SGD(1e-2).update(model, gradient)
    mx.eval(model.trainable_parameters())
    return dict(tree_flatten(gradient)), value.item(), loss


def test_an_update_reaches_every_adapter_and_lowers_the_loss(name):
    model = build(name)
    if name in UNTRAINABLE:
        with pytest.raises(ModelError, match=f"mlx-lm cannot train the architecture {name}: "):
            attach_lora(model, LoRAConfig(rank=2))
        return
    attach_lora(model, LoRAConfig(rank=2))
    before: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    gradient, loss, loss_again = update(model)
    assert gradient.keys() == before.keys()
    assert all(np.isfinite(np.array(value)).all() for value in gradient.values())
    # lora_b starts at 0: the first step moves it alone
    unreached = {path for path, value in gradient.items() if "lora_b" in path.split(".") and not mx.any(value)}
    assert all(re.search(UNREACHED.get(name, "none"), path) for path in unreached)
    after: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    moved = {path for path, value in after.items() if not mx.array_equal(value, before[path])}
    assert moved == {path for path in after if "lora_b" in path.split(".")} - unreached
    assert loss_again().item() < loss


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_a_known_fault_of_gradients_is_still_there(name, monkeypatch):
    # a fault that mlx-lm mends leaves the table
    monkeypatch.delitem(UNTRAINABLE, name)
    model = build(name)
    attach_lora(model, LoRAConfig(rank=2))
    with pytest.raises(ValueError, match="Cannot calculate VJP with respect to indices"):
        update(model)


class Questions:
    """Asks its questions one after the other."""

    max_turns = 2

    def __init__(self, *questions):
        self.questions = list(questions)

    def reset(self):
        return self.questions.pop(0)

    def step(self, action):
        over = not self.questions
        return StepResult("" if over else self.questions.pop(0), 0.0, terminated=over)

    def state_id(self, observation):
        return observation


# Prompts of 1 to 24 tokens, some past the windows of 8 and some not; two turns, the second of 1 to 12 tokens.
ONE_TURN = [("a",), ("Why",), ("Tell me what",), ("Is there more to be said?",)]
TWO_TURNS = [("Hi", "Why do so"), ("Count to ten", "?"), ("b", "and twelve..")]


def test_the_engine_is_exact_or_refuses(name):
    model, sampling = build(name), SamplingConfig(temperature=TEMPERATURE, max_tokens=8)
    if name in REFUSED:
        with pytest.raises(ValueError, match=name):
            Engine(model, TOKENIZER, sampling, width=WIDTH)
        return
    engine = Engine(model, TOKENIZER, sampling, width=WIDTH, use_chat_template=False)
    assert engine.width == (1 if name in ROW_BY_ROW else WIDTH)
    assert largest_distance(engine) < 1e-3


def test_what_the_audit_knows_is_what_it_says():
    assert audit.REFUSED.keys() <= REFUSED
    assert audit.ROW_BY_ROW.keys() <= ROW_BY_ROW


@pytest.mark.parametrize("name", audit.ROW_BY_ROW)
def test_a_known_fault_of_batches_is_still_there(name, monkeypatch):
    # a fault that mlx-lm mends leaves the audit's table
    monkeypatch.delitem(audit.ROW_BY_ROW, name)
    model, sampling = build(name), SamplingConfig(temperature=TEMPERATURE, max_tokens=8)
    engine = Engine(model, TOKENIZER, sampling, width=WIDTH, use_chat_template=False)
    assert engine.width == 1 or not largest_distance(engine) <= 1e-2


def largest_distance(engine):
    """The largest difference between what was recorded of any token and what a full forward says of it."""
    distances = []
    for episodes in (ONE_TURN, TWO_TURNS):
        requests = group_requests(episodes, lambda task, seed, member: Questions(*task), group_size=2)
        for trajectory in engine.rollout(requests):
            assert trajectory.error is None
            assert len(trajectory.turns) == len(trajectory.task)
            (segment,) = trajectory.segments
            distances.append(distance(engine.model, segment))
    return np.max(distances)  # max may pass over a NaN


def distance(model, segment):
    """The largest difference between what was recorded and what a full forward says of the tokens."""
    logits_L_V = model(mx.array(segment.token_ids)[None])[0].astype(mx.float32) / TEMPERATURE
    logprobs_L_V = np.array(logits_L_V - mx.logsumexp(logits_L_V, axis=-1, keepdims=True))
    (sampled,) = np.nonzero(segment.roles == Role.ACTION)
    assert len(sampled) > 0
    expected = logprobs_L_V[sampled - 1, segment.token_ids[sampled]]
    return np.abs(expected - segment.sampler_logprobs[sampled]).max()
