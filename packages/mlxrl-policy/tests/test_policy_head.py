import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrl.policy import split_head


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


def test_a_model_without_a_named_trunk_has_no_halves():
    assert split_head(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))) is None
