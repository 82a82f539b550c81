from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.policy import LoRAConfig, load_policy_with_lora, score, split_head


def oracle(logits, targets, temperature=1.0):
    """Log-probability and entropy in float64 from the definitions."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    logprobs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
    entropy = -(np.exp(logprobs) * np.maximum(logprobs, -1e30)).sum(axis=-1)  # 0 log 0 = 0
    return np.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy


def oracle_rows(model, tokens, mask, temperature=1.0):
    """The oracle on the whole model's logits, shifted so that a token is predicted by those before it."""
    logits = np.array(model(mx.array(tokens[:, :-1])).astype(mx.float32))
    values = oracle(logits, tokens[:, 1:], temperature)
    return tuple(np.pad(value, ((0, 0), (1, 0))) * mask for value in values)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_those_of_the_whole_models_logits(policy, architecture, tokens, mask, temperature):
    model = policy(architecture)
    scores = score(model, tokens, mask, temperature=temperature)
    logprobs, entropy = oracle_rows(model, tokens, mask, temperature)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)
    assert scores.logprobs.dtype == scores.entropy.dtype == mx.float32


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("chunk_size", [3, None])
def test_first_choices_are_those_of_the_whole_models_logits(
    policy, architecture, tokens, mask, chunk_size, with_gradient
):
    model = policy(architecture)
    likeliest = np.array(model(mx.array(tokens[:, :-1]))).argmax(axis=-1)
    tokens = tokens.copy()
    tokens[0, -1] = likeliest[0, -1]  # last, so that nothing else of the row changes
    mask = mask.copy()
    mask[0, -1] = True
    scores = score(model, tokens, mask, temperature=0.7, chunk_size=chunk_size, with_gradient=with_gradient)
    expected = (tokens[:, 1:] == likeliest) & mask[:, 1:]
    np.testing.assert_array_equal(np.array(scores.is_top)[:, 1:], expected)
    assert scores.is_top.dtype == mx.float32
    assert 1 <= expected.sum() < mask.sum()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])  # a tied and an untied head
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_heads_score_as_the_model_does(policy, tokens, mask, architecture, bits):
    model = policy(architecture, bits=bits)
    logprobs, entropy = oracle_rows(model, tokens, mask)
    scores = score(model, tokens, mask)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_arithmetic_is_float32_whatever_the_models_dtype(policy, tokens, mask, dtype):
    model = policy("llama")
    model.set_dtype(dtype)
    tokens, mask = tokens[1:, :8], mask[1:, :8]  # short, for 16 bits are slow on the CPU
    rows, columns = np.nonzero(mask)
    halves = split_head(model)
    assert halves is not None
    trunk, head = halves
    hidden = trunk(mx.array(tokens[:, :-1]))[mx.array(rows), mx.array(columns - 1)]
    logits = head(hidden)  # the very logits that score sees, in the model's dtype
    assert logits.dtype == dtype
    logprobs, entropy = oracle(np.array(logits.astype(mx.float32)), tokens[rows, columns], 0.7)
    scores = score(model, tokens, mask, temperature=0.7)
    assert scores.logprobs.dtype == scores.entropy.dtype == mx.float32
    assert np.abs(np.array(scores.logprobs)[mask] - logprobs).max() < 1e-5
    assert np.abs(np.array(scores.entropy)[mask] - entropy).max() < 1e-5


def test_a_temperature_can_be_given_per_token(policy, tokens, mask):
    model = policy("qwen3")
    temperature = np.random.default_rng(1).uniform(0.5, 2, tokens.shape)
    logits = np.array(model(mx.array(tokens[:, :-1])))
    logprobs, _ = oracle(logits, tokens[:, 1:], temperature[:, 1:, None])
    scores = score(model, tokens, mask, temperature=temperature)
    np.testing.assert_allclose(np.array(scores.logprobs)[:, 1:], logprobs * mask[:, 1:], atol=2e-5)


class Doctored(nn.Module):
    """A model whose logits are changed after its head, so that no half of it can be told apart."""

    def __init__(self, model, change):
        super().__init__()
        self.inner, self.change = model, change

    def __call__(self, inputs, cache=None):
        return self.change(self.inner(inputs, cache))

    @property
    def layers(self):
        return self.inner.layers


def test_a_model_without_a_separable_head_is_scored_from_its_own_logits(policy, tokens, mask):
    model = Doctored(policy("qwen3"), lambda logits: 2 * logits)
    assert split_head(model) is None
    logprobs, entropy = oracle_rows(model, tokens, mask)
    scores = score(model, tokens, mask, chunk_size=2)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)


def test_a_logit_of_minus_infinity_makes_no_nan(policy, tokens, mask):
    banned = mx.arange(101) < 5
    model = Doctored(policy("qwen3"), lambda logits: mx.where(banned, -mx.inf, logits))
    logprobs, entropy = oracle_rows(model, tokens, mask)  # the ids of `tokens` are all from 5 on

    def total():
        scores = score(model, tokens, mask)
        return scores.logprobs.sum(), scores

    (_, scores), gradient = nn.value_and_grad(model, total)()
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=2e-5)
    largest: Any = mx.abs(gradient["inner"]["model"]["layers"][0]["self_attn"]["q_proj"]["lora_a"]).max().item()
    assert 0 < largest < np.inf


def test_the_entropy_of_a_uniform_and_of_a_certain_choice(policy, tokens, mask):
    uniform = Doctored(policy("qwen3"), lambda logits: 0 * logits)
    scores = score(uniform, tokens, mask)
    np.testing.assert_allclose(np.array(scores.entropy)[mask], np.log(101), rtol=1e-6)
    np.testing.assert_allclose(np.array(scores.logprobs)[mask], -np.log(101), rtol=1e-6)
    assert np.array(scores.is_top)[mask].all()  # nothing is likelier
    certain = Doctored(policy("qwen3"), lambda logits: 0 * logits + 1e4 * (mx.arange(101) == 7))
    scores = score(certain, tokens, mask)
    assert mx.abs(scores.entropy).max() == 0
    np.testing.assert_array_equal(scores.is_top, (tokens == 7) & mask)


def test_tokens_that_are_not_scored_are_zero(policy, tokens, mask):
    scores = score(policy("qwen3"), tokens, mask)
    assert not np.array(scores.logprobs)[~mask].any()
    assert not np.array(scores.entropy)[~mask].any()
    assert not np.array(scores.is_top)[~mask].any()
    assert np.array(scores.logprobs)[mask].all()


def test_nothing_to_score_is_all_zeros(policy, tokens):
    scores = score(policy("qwen3"), tokens, np.zeros_like(tokens))
    assert scores.logprobs.shape == scores.entropy.shape == tokens.shape
    assert not mx.any(scores.logprobs)


@pytest.fixture(scope="module")
def shared(folders):
    return {name: load_policy_with_lora(folders(name), LoRAConfig(rank=2))[0] for name in ("qwen3", "qwen3_5")}


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(["qwen3", "qwen3_5"]),
    lengths=st.lists(st.integers(2, 10), min_size=1, max_size=3),
    extra=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_what_stands_behind_a_rows_end_changes_nothing(shared, name, lengths, extra, seed):
    rng = np.random.default_rng(seed)
    width = max(lengths)
    tokens, mask = np.zeros((len(lengths), width), dtype=int), np.zeros((len(lengths), width))
    for row, length in enumerate(lengths):
        tokens[row, :length] = rng.integers(0, 101, length)
        mask[row, 1:length] = 1
    garbage = np.pad(tokens, ((0, 0), (0, extra)))
    for row, length in enumerate(lengths):
        garbage[row, length:] = rng.integers(0, 101, width + extra - length)
    padded_mask = np.pad(mask, ((0, 0), (0, extra)))
    plain = score(shared[name], tokens, mask)
    padded = score(shared[name], garbage, padded_mask)
    for one, other in zip(plain, padded, strict=True):
        np.testing.assert_allclose(np.array(other)[:, :width], one, atol=1e-5)
        assert not np.array(other)[:, width:].any()
    # and a row alone has the scores it has among others
    alone = score(shared[name], tokens[:1, : lengths[0]], mask[:1, : lengths[0]])
    np.testing.assert_allclose(alone.logprobs[0], plain.logprobs[0, : lengths[0]], atol=1e-5)


def test_shapes_that_differ_are_refused_with_both(policy, tokens, mask):
    with pytest.raises(ValueError, match=r"one shape \[B, T\], got \(3, 12\) and \(3, 11\)"):
        score(policy("qwen3"), tokens, mask[:, :-1])
    with pytest.raises(ValueError, match=r"got \(12,\) and \(12,\)"):
        score(policy("qwen3"), tokens[0], mask[0])


def test_a_first_token_cannot_be_scored(policy, tokens, mask):
    with pytest.raises(ValueError, match="column 0"):
        score(policy("qwen3"), tokens, np.ones_like(mask))


@pytest.mark.parametrize(("token", "span"), [(9999, "1 to 9999"), (101, "1 to 101"), (-1, "-1 to 1")])
def test_a_token_outside_the_vocabulary_is_refused(policy, token, span):
    with pytest.raises(ValueError, match=f"token_ids must be from 0 to 100, the model's vocabulary, got {span}"):
        score(policy("qwen3"), [[1, token]], [[0, 1]])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_gives_no_distribution_is_refused(policy, tokens, mask, temperature):
    with pytest.raises(ValueError, match=f"temperature must be .* got {temperature}"):
        score(policy("qwen3"), tokens, mask, temperature=temperature)


def test_a_temperature_of_another_shape_is_refused_with_both(policy, tokens, mask):
    with pytest.raises(ValueError, match=r"temperature must be a number or of token_ids' shape \(3, 12\), got \(5,\)"):
        score(policy("qwen3"), tokens, mask, temperature=np.ones(5))


def test_rows_of_different_length_are_refused_by_name(policy):
    with pytest.raises(ValueError, match="token_ids must be numbers, its rows padded to one length"):
        score(policy("qwen3"), [[5, 6, 7], [5, 6]], [[0, 1, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match="mask must be numbers, its rows padded to one length"):
        score(policy("qwen3"), [[5, 6, 7], [5, 6, 0]], [[0, 1, 1], [0, 1]])
    with pytest.raises(ValueError, match="temperature must be numbers"):
        score(policy("qwen3"), [[5, 6]], [[0, 1]], temperature="hot")


def test_token_ids_that_are_no_whole_numbers_are_refused(policy):
    with pytest.raises(ValueError, match="token_ids must be whole numbers, got float64; cast them"):
        score(policy("qwen3"), [[5.0, 6.7]], [[0, 1]])


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5])
def test_a_chunk_holds_at_least_one_position(policy, tokens, mask, chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size must be a whole number of at least 1, got {chunk_size}"):
        score(policy("qwen3"), tokens, mask, chunk_size=chunk_size)


def test_an_empty_batch_has_empty_scores(policy):
    assert score(policy("qwen3"), np.zeros((2, 0)), np.zeros((2, 0))).logprobs.shape == (2, 0)


class ThreeLogits(nn.Module):
    """A model whose logits are always 2, 1, 0; it has no trunk to tell apart."""

    def __init__(self):
        super().__init__()
        self.layers = []

    def __call__(self, inputs, cache=None):
        return mx.broadcast_to(mx.array([2.0, 1.0, 0.0]), (*inputs.shape, 3))


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # e^(20/7) = 17.411708 and e^(10/7) = 4.172734, so the total is 22.584442: log(17.411708 / 22.584442), ...
        (0.7, [-0.260118403, -1.688689831, -3.117261260]),
        # the total is e^2 + e + 1 = 11.107338, and log 11.107338 = 2.407606
        (1.0, [-0.407605964, -1.407605964, -2.407605964]),
    ],
)
def test_a_score_is_the_log_softmax_at_the_sampling_temperature(temperature, expected):
    scores = score(ThreeLogits(), [[0, 0], [0, 1], [0, 2]], [[0, 1]] * 3, temperature=temperature)
    np.testing.assert_allclose(np.array(scores.logprobs)[:, 1], expected, atol=1e-6)
