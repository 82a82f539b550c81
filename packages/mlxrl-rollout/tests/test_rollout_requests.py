"""Rows with settings of their own in one batch."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.env import StopReason, Task
from mlxrl.rollout import Engine, SamplingConfig, derive_key, draw, group_requests, single_turn_environment
from mlxrl.rollout.sampling import drawing

from .comparing import assert_same, engine_of
from .environments import Chatter

DEFAULT = SamplingConfig(temperature=0.9, max_tokens=6)
SETTINGS = [
    DEFAULT,
    SamplingConfig(temperature=0.3, max_tokens=6),
    SamplingConfig(temperature=2.0, max_tokens=3),
    SamplingConfig(temperature=0, max_tokens=5),
    SamplingConfig(top_k=2, max_tokens=8),
    SamplingConfig(top_p=0.5, max_tokens=1),
    SamplingConfig(min_p=0.3, max_tokens=6),
    SamplingConfig(temperature=1.5, top_k=9, top_p=0.9, min_p=0.01, max_tokens=4),
    SamplingConfig(temperature=0.9, max_tokens=9, stop=("a", "e", "i", "o", "u", "1", "7", "X")),
]


def factory(task, seed, member):
    return Chatter(2, task)


def requests_of(**options):
    return group_requests(["Hello", "a longer prompt", "Hello"], factory, group_size=9, **options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("width", [4, 64])
def test_a_row_is_drawn_as_an_engine_of_its_setting_would(lend, architecture, width):
    policy = lend(architecture)
    mixed = [replace(r, sampling=SETTINGS[r.sample_index]) for r in requests_of()]
    together = engine_of(policy, DEFAULT, width=width).rollout(mixed)
    for i, sampling in enumerate(SETTINGS):
        plain = [request for request in requests_of() if request.sample_index == i]
        assert_same(together[i::9], engine_of(policy, sampling).rollout(plain), 1e-5)
    assert max(t.turns[0].span[1] - t.turns[0].span[0] for t in together[2::9]) <= 3


def test_a_request_without_a_setting_takes_the_engines(lend):
    policy = lend("cohere")
    own = engine_of(policy, SETTINGS[1]).rollout(requests_of(sampling=DEFAULT))
    assert_same(own, engine_of(policy, DEFAULT).rollout(requests_of()), 1e-5)
    others = engine_of(policy, SETTINGS[1]).rollout(requests_of())
    assert [t.completion_ids for t in others] != [t.completion_ids for t in own]


def test_the_likeliest_tokens_are_taken_beside_rows_that_draw(lend):
    model, tokenizer = lend("cohere")
    requests = group_requests([Task("Hello")], single_turn_environment, group_size=6)
    greedy = SamplingConfig(temperature=0, max_tokens=6)
    mixed = [replace(r, sampling=greedy if r.sample_index % 2 else None) for r in requests]
    trajectories = Engine(model, tokenizer, DEFAULT).rollout(mixed)
    assert len({tuple(t.completion_ids) for t in trajectories[1::2]}) == 1
    assert len({tuple(t.completion_ids) for t in trajectories[::2]}) == 3
    segment = trajectories[1].segments[0]
    logits_T_V = model(mx.array(segment.token_ids[None]))[0]
    likeliest_T = np.array(mx.argmax(logits_T_V, axis=-1))
    np.testing.assert_array_equal(segment.token_ids[-6:], likeliest_T[-7:-1])  # the logits before a token tell it


def test_limits_of_rows_are_their_own(scripted):
    policy = scripted({"<|assistant|>": "g", "g": "o"})
    requests = group_requests([Task("hi")], single_turn_environment, group_size=4)
    limits = [1, 2, 3, 9]
    mixed = [replace(r, sampling=SamplingConfig(max_tokens=limits[r.sample_index])) for r in requests]
    trajectories = engine_of(policy, DEFAULT).rollout(mixed)
    assert [t.num_sampled for t in trajectories] == [1, 2, 3, 3]
    assert [t.turns[0].action_cut for t in trajectories] == [True, True, False, False]
    assert [t.stop_reason for t in trajectories] == [StopReason.length] * 2 + [StopReason.stop] * 2


def test_stop_texts_of_rows_are_their_own(scripted):
    policy = scripted({"<|assistant|>": "g", "g": "o", "o": "!"})
    requests = group_requests([Task("hi")], single_turn_environment, group_size=4)
    stops = [("g",), ("o", "!"), ("go!",), ("no",)]
    mixed = [replace(r, sampling=SamplingConfig(stop=stops[r.sample_index])) for r in requests]
    trajectories = engine_of(policy, DEFAULT).rollout(mixed)
    assert [t.completion for t in trajectories] == ["g", "go", "go!", "go!"]
    assert [t.num_sampled for t in trajectories] == [1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.sampled_from(SETTINGS), min_size=1, max_size=12))
def test_rows_of_mixed_settings_are_drawn_like_each_alone(chosen):
    count = len(chosen)
    logits = mx.random.normal((count, 40), key=mx.random.key(count))
    keys = [derive_key(i) for i in range(count)]
    halves = mx.array([[key & 0xFFFFFFFF, key >> 32] for key in keys], dtype=mx.uint32)
    positions = mx.arange(count).astype(mx.uint32)
    tokens, logprobs = drawing(chosen)(logits, halves, positions)
    for i, config in enumerate(chosen):
        row = slice(i, i + 1)
        token, logprob = draw(logits[row], halves[row], positions[row], config)
        assert tokens[i].item() == token.item()
        np.testing.assert_allclose(logprobs[i], logprob[0], atol=1e-6)
