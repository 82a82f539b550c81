import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxrl.policy import score, split_head


def test_trunk_and_head_make_the_whole(policy, architecture, tokens):
    model = policy(architecture)
    halves = split_head(model)
    assert halves is not None
    trunk, head = halves
    hidden = trunk(mx.array(tokens))
    assert hidden.shape == (3, 12, 64)
    whole = model(mx.array(tokens))
    np.testing.assert_allclose(head(hidden), whole, atol=1e-5)
    np.testing.assert_allclose(head(hidden[1, 4]), whole[1, 4], atol=1e-5)  # any leading shape
    np.testing.assert_allclose(head(hidden.reshape(36, 64)), whole.reshape(36, -1), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_split_too(policy, tokens, bits):
    for architecture in ("qwen3", "llama"):
        model = policy(architecture, bits=bits)
        halves = split_head(model)
        assert halves is not None
        np.testing.assert_allclose(halves[1](halves[0](mx.array(tokens))), model(mx.array(tokens)), atol=1e-5)


def test_splitting_leaves_the_model_as_it_was(policy, tokens):
    model = policy("llama")
    before = np.array(model(mx.array(tokens)))
    names = set(model)
    split_head(model)
    assert set(model) == names
    np.testing.assert_array_equal(model(mx.array(tokens)), before)


def test_halves_follow_weights_that_change(policy, tokens):
    model = policy("llama")
    split_head(model)
    model.lm_head.weight = 2 * model.lm_head.weight
    halves = split_head(model)
    assert halves is not None
    np.testing.assert_allclose(halves[1](halves[0](mx.array(tokens))), model(mx.array(tokens)), atol=1e-5)


# Models that call their trunks in ways of their own.
PECULIAR = {
    "mamba": {  # the trunk's cache has no default
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "state_size": 4,
        "conv_kernel": 4,
        "time_step_rank": 4,
        "use_bias": False,
        "use_conv_bias": False,
    },
    "gptj": {  # the trunk is called by keywords alone
        "vocab_size": 101,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "rotary_dim": 8,
        "layer_norm_epsilon": 1e-5,
    },
    "phixtral": {  # the model makes the trunk's mask
        "num_vocab": 101,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
    },
}


@pytest.fixture(params=PECULIAR)
def peculiar(request):
    module = importlib.import_module(f"mlx_lm.models.{request.param}")
    mx.random.seed(0)
    return module.Model(module.ModelArgs.from_dict({"model_type": request.param, **PECULIAR[request.param]}))


def test_a_trunk_is_called_as_its_own_model_calls_it(peculiar, tokens):
    halves = split_head(peculiar)
    assert halves is not None
    trunk, head = halves
    whole = peculiar(mx.array(tokens))
    assert np.std(np.array(whole)) > 0.1  # wrong logits could not pass for these
    hidden = trunk(mx.array(tokens))
    assert hidden.shape == (3, 12, 64)
    np.testing.assert_allclose(head(hidden), whole, atol=1e-5)
    np.testing.assert_allclose(head(hidden[1, 4]), whole[1, 4], atol=1e-5)


def test_a_model_with_a_trunk_of_its_own_ways_is_scored(peculiar, tokens, mask):
    logits = np.array(peculiar(mx.array(tokens[:, :-1])), dtype=np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0] * mask[:, 1:]
    np.testing.assert_allclose(np.array(score(peculiar, tokens, mask).logprobs)[:, 1:], expected, atol=2e-5)


def read_on(model, tokens):
    """The logits after a trunk has read five tokens, then one, then the rest into one cache."""
    halves = split_head(model)
    assert halves is not None
    trunk, head = halves
    cache, tokens = make_prompt_cache(model), mx.array(tokens)
    return mx.concatenate([head(trunk(part, cache=cache)) for part in mx.split(tokens, [5, 6], axis=1)], axis=1)


def test_a_trunk_reads_on_from_a_cache(policy, architecture, tokens):
    model = policy(architecture)
    np.testing.assert_allclose(read_on(model, tokens), model(mx.array(tokens)), atol=2e-5)


def test_a_trunk_of_its_own_ways_reads_on_from_a_cache(peculiar, tokens):
    np.testing.assert_allclose(read_on(peculiar, tokens), peculiar(mx.array(tokens)), atol=2e-5)


def test_a_trunk_does_not_compute_the_head(policy, tokens):
    model = policy("llama")
    halves = split_head(model)
    assert halves is not None
    # A head so tall that its logits of these 36 tokens would take over 18 MB; what the trunk needs is far less.
    model.lm_head.weight = mx.zeros((2**17, 64))
    mx.eval(model.parameters())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(halves[0](mx.array(tokens)))
    assert mx.get_peak_memory() - before < 2**21


class Wrapped(nn.Module):
    """A language model inside something else, as multimodal models have it."""

    def __init__(self, model, scale):
        super().__init__()
        self.language_model, self.scale = model, scale

    def __call__(self, inputs, cache=None):
        return self.scale * self.language_model(inputs, cache)


def test_a_language_model_inside_a_wrapper_is_found(policy, tokens):
    model = Wrapped(policy("qwen3"), 1.0)
    halves = split_head(model)
    assert halves is not None
    np.testing.assert_allclose(halves[1](halves[0](mx.array(tokens))), model(mx.array(tokens)), atol=1e-5)


def test_halves_that_do_not_make_the_whole_are_not_used(policy):
    assert split_head(Wrapped(policy("qwen3"), 3.0)) is None


class Pair(nn.Module):
    """A trunk that returns more than hidden states."""

    def __init__(self):
        super().__init__()
        self.layers, self.embed = [], nn.Embedding(101, 8)

    def __call__(self, inputs, cache=None):
        return self.embed(inputs), cache


class PairedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Pair(), nn.Linear(8, 101)

    def __call__(self, inputs, cache=None):
        return self.lm_head(self.model(inputs, cache)[0])


def test_a_trunk_that_returns_something_else_makes_no_half():
    assert split_head(PairedHead()) is None


def test_a_model_without_a_named_trunk_has_no_halves():
    assert split_head(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))) is None
