from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.rollout import SamplingConfig, derive_key, derive_seed, draw

NUM_DRAWS = 20_000


def keys_of(*seeds):
    keys = [derive_key(*seed) for seed in seeds]
    return mx.array([[key & 0xFFFFFFFF, key >> 32] for key in keys], dtype=mx.uint32)


def drawn(logits, config, *, keys=None, positions=None):
    """Tokens and log-probabilities of one row of logits under many keys."""
    keys = keys_of(*((0, i) for i in range(NUM_DRAWS))) if keys is None else keys
    count = keys.shape[0]
    positions = mx.zeros(count, dtype=mx.uint32) if positions is None else positions
    tokens, logprobs = draw(mx.broadcast_to(mx.array(logits), (count, len(logits))), keys, positions, config)
    return np.array(tokens), np.array(logprobs)


def softmax(logits):
    exp = np.exp(logits - np.max(logits))
    return exp / exp.sum()


def oracle(logits, config):
    """Probabilities after temperature, top-k, top-p and min-p in this order, from the definitions, in float64."""
    scaled = np.asarray(logits, dtype=np.float64) / config.temperature
    kept = np.argsort(-scaled)
    if config.top_k:
        kept = kept[: config.top_k]
    probabilities = softmax(scaled[kept])
    enough = int(np.argmax(np.cumsum(probabilities) >= config.top_p)) + 1 if config.top_p < 1 else len(kept)
    kept = kept[:enough]
    kept = kept[np.exp(scaled[kept] - scaled.max()) >= config.min_p]
    result = np.zeros(len(scaled))
    result[kept] = softmax(scaled[kept])
    return result


LOGITS = [2.0, 1.1, 0.4, 0.0, -0.7, -1.5, -2.2, -4.0]
CONFIGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.5),
    SamplingConfig(temperature=2.0),
    SamplingConfig(top_k=3),
    SamplingConfig(top_k=1),
    SamplingConfig(top_k=99),
    SamplingConfig(top_p=0.8),
    SamplingConfig(top_p=1e-6),
    SamplingConfig(min_p=0.2),
    SamplingConfig(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
]


def assert_drawn_from(tokens, probabilities):
    # A count of n draws at probability p has standard deviation sqrt(p (1 - p) n); past five of them lies less than
    # one in a million of the seeds, and a probability of 0 allows no draw at all.
    frequency = np.bincount(tokens, minlength=len(probabilities)) / len(tokens)
    allowed = 5 * np.sqrt(probabilities * (1 - probabilities) / len(tokens))
    assert (np.abs(frequency - probabilities) <= allowed).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_are_drawn_from_the_filtered_distribution_and_know_their_probability(config):
    probabilities = oracle(LOGITS, config)
    tokens, logprobs = drawn(LOGITS, config)
    assert_drawn_from(tokens, probabilities)
    np.testing.assert_allclose(logprobs, np.log(probabilities[tokens]), atol=1e-6)
    # renormalised: the probabilities of the kept tokens sum to 1
    each = {token: np.exp(logprob) for token, logprob in zip(tokens, logprobs, strict=True)}
    if all(probabilities[probabilities > 0] > 0.005):  # then every kept token was drawn
        assert sum(each.values()) == pytest.approx(1, abs=1e-6)


def test_the_positions_of_one_key_are_as_random_as_many_keys():
    positions = mx.arange(NUM_DRAWS).astype(mx.uint32)
    keys = mx.broadcast_to(keys_of((3,)), (NUM_DRAWS, 2))
    tokens, _ = drawn(LOGITS, SamplingConfig(), keys=keys, positions=positions)
    assert_drawn_from(tokens, softmax(np.array(LOGITS)))
    # and neighbours know nothing of each other: pairs have the product of the probabilities
    pairs = tokens[::2] * len(LOGITS) + tokens[1::2]
    assert_drawn_from(pairs, np.outer(softmax(np.array(LOGITS)), softmax(np.array(LOGITS))).ravel())


@settings(max_examples=30, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=4, max_size=30, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.13, 0.51, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.31]),
)
def test_only_kept_tokens_are_drawn_whatever_the_filters(logits, temperature, top_k, top_p, min_p):
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = [value / 8 for value in logits]
    keys = keys_of(*((1, i) for i in range(64)))
    tokens, logprobs = drawn(scaled, config, keys=keys)
    probabilities = oracle(scaled, config)
    assert (probabilities[tokens] > 0).all()
    np.testing.assert_allclose(logprobs, np.log(probabilities[tokens]), atol=1e-5)


def test_a_row_draws_the_same_beside_others_as_alone():
    logits = mx.random.normal((5, 50), key=mx.random.key(0))
    keys, positions = keys_of(*((0, i) for i in range(5))), mx.arange(5).astype(mx.uint32)
    config = SamplingConfig(temperature=0.7, top_p=0.9)
    together = draw(logits, keys, positions, config)
    for row in range(5):
        alone = draw(logits[row : row + 1], keys[row : row + 1], positions[row : row + 1], config)
        assert alone[0].item() == together[0][row].item()
        assert alone[1].item() == together[1][row].item()


def test_temperature_zero_takes_the_likeliest_and_tells_its_probability_at_temperature_one():
    tokens, logprobs = drawn(LOGITS, SamplingConfig(temperature=0), keys=keys_of((1,), (2,)))
    assert tokens.tolist() == [0, 0]
    np.testing.assert_allclose(logprobs, np.log(softmax(np.array(LOGITS))[0]), atol=1e-6)


def test_sixteen_bit_logits_are_drawn_in_float32():
    logits = mx.random.normal((4, 1000), key=mx.random.key(1)).astype(mx.bfloat16)
    keys, positions = keys_of(*((0, i) for i in range(4))), mx.zeros(4, dtype=mx.uint32)
    tokens, logprobs = draw(logits, keys, positions, SamplingConfig(temperature=0.7))
    assert logprobs.dtype == mx.float32
    assert tokens.dtype == mx.int32
    exact = np.array(logits.astype(mx.float32)).astype(np.float64) / 0.7
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(4), np.array(tokens)], atol=1e-5)


def test_a_logit_of_minus_infinity_is_never_drawn():
    tokens, logprobs = drawn([0.0, -np.inf, 0.0], SamplingConfig(top_p=0.9))
    assert set(tokens) == {0, 2}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("max_tokens", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any):
    options: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} must be .* got {value}"):
        SamplingConfig(**options)


@pytest.mark.parametrize("top_p", [1e-46, 1e-6])
def test_the_likeliest_token_stays_however_small_the_nucleus(top_p):
    tokens, logprobs = drawn([0.0, 2.0, 1.0], SamplingConfig(top_p=top_p))
    assert set(tokens) == {1}
    np.testing.assert_array_equal(logprobs, 0)


def test_numbers_of_any_kind_are_floats():
    values: dict[str, Any] = {"temperature": Fraction(7, 10), "top_p": np.float32(0.5), "min_p": 0}
    config = SamplingConfig(**values)
    assert config == SamplingConfig(temperature=0.7, top_p=0.5, min_p=0.0)
    assert all(type(value) is float for value in (config.temperature, config.top_p, config.min_p))


@pytest.mark.parametrize(("field", "value"), [("temperature", "1"), ("top_p", None), ("min_p", True)])
def test_a_value_that_is_no_number_is_refused_by_name(field: str, value: Any):
    options: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} must be a number, got {value!r}"):
        SamplingConfig(**options)


def test_full_support_means_that_sampler_and_scorer_see_one_distribution():
    assert SamplingConfig(temperature=0.7).full_support
    narrowed = (SamplingConfig(top_k=5), SamplingConfig(top_p=0.9), SamplingConfig(min_p=0.1))
    assert not any(config.full_support for config in (*narrowed, SamplingConfig(temperature=0)))


def test_keys_differ_where_anything_differs_and_agree_where_nothing_does():
    parts = [
        (seed, step, group, sample)
        for seed in range(3)
        for step in range(4)
        for group in range(4)
        for sample in range(4)
    ]
    keys = [derive_key(*part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert len({key & 0xFFFFFFFF for key in keys}) == len(parts)  # each half on its own
    assert len({key >> 32 for key in keys}) == len(parts)
    assert keys == [derive_key(*part) for part in parts]
    assert all(0 <= derive_seed(*part) < 2**31 for part in parts)
    assert derive_key(1, 23) != derive_key(12, 3)
    assert derive_key(-1, 0) != derive_key(1, 0)
