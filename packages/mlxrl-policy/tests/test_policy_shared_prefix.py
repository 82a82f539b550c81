"""Rows that begin alike are read once up to where they part, and nothing of it shows in scores or gradients."""

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxrl.policy import checkpoint_blocks, dropout_active, plan_reading, score, shares_prefixes, split_head


@pytest.fixture(scope="module")
def groups():
    """Two prompts of 20 and 22 tokens with completions of 4, 9, 2 and 7, 1, 8: rows and what is scored of them."""
    rng = np.random.default_rng(4)
    rows, starts = [], []
    for length, completions in ((20, (4, 9, 2)), (22, (7, 1, 8))):
        prompt = rng.integers(5, 100, length)
        for completion in completions:
            rows.append(np.concatenate([prompt, rng.integers(5, 100, completion)]))
            starts.append(length)
    width = max(len(row) for row in rows)
    tokens, mask = np.zeros((6, width), dtype=int), np.zeros((6, width), dtype=bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = row
        mask[i, start : len(row)] = True
    mask[:, 12] = True  # a trained token within the prompts, as multi-turn rows have them in what they share
    return tokens, mask


def plain_logprobs(model, tokens):
    logits = model(mx.array(tokens[:, :-1]))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(logprobs, mx.array(tokens[:, 1:, None]), axis=-1)[..., 0]


def gradient(model, logprobs):
    weights = mx.array(np.random.default_rng(3).normal(size=(6, 64)).astype(np.float32))

    def loss():
        values = logprobs()
        return (weights[:, : values.shape[1]] * values).sum()

    value, tree = nn.value_and_grad(model, loss)()
    return value.item(), np.concatenate([np.array(leaf).ravel() for _, leaf in tree_flatten(tree)])


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


class CountedEmbedding(nn.Module):
    """An embedding that counts the tokens and the passes that go through it."""

    read: Any

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        object.__setattr__(self, "read", Counter())  # nothing of the module's tree

    def __call__(self, token_ids):
        self.read.update(tokens=token_ids.size, passes=1)
        return self.embedding(token_ids)

    def as_linear(self, hidden):
        return self.embedding.as_linear(hidden)


def read_by(model, run):
    """Tokens and passes of the trunk in a run."""
    counted = CountedEmbedding(model.model.embed_tokens)
    model.model.embed_tokens = counted
    try:
        run()
    finally:
        model.model.embed_tokens = counted.embedding
    return counted.read


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_rows_read_alone(policy, groups, architecture, recompute, with_gradient):
    tokens, mask = groups  # longer than gemma3_text's window of 16
    model = policy(architecture, grad_checkpoint=recompute)
    assert shares_prefixes(model)
    value, expected = gradient(model, lambda: plain_logprobs(model, tokens) * mask[:, 1:])
    for chunk_size in (5, None):
        options = {"chunk_size": chunk_size, "with_gradient": with_gradient}
        got_value, got = gradient(model, lambda options=options: score(model, tokens, mask, **options).logprobs[:, 1:])
        assert got_value == pytest.approx(value, rel=1e-5, abs=1e-4)
        assert distance(got, expected) < 5e-6


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_shares_too(policy, groups, bits):
    tokens, mask = groups
    model = policy("qwen3", bits=bits)
    assert shares_prefixes(model)
    _, expected = gradient(model, lambda: plain_logprobs(model, tokens) * mask[:, 1:])
    _, got = gradient(model, lambda: score(model, tokens, mask, with_gradient=True).logprobs[:, 1:])
    assert distance(got, expected) < 5e-6


def test_scores_are_those_of_rows_read_alone(policy, groups, architecture):
    tokens, mask = groups
    model = policy(architecture)
    together = score(model, tokens, mask)
    for row in range(6):
        alone = score(model, tokens[row : row + 1], mask[row : row + 1])
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one[row], other[0], atol=1e-5)


def test_a_shared_prompt_runs_once(policy, groups):
    tokens, mask = groups
    model = policy("qwen3")
    shares_prefixes(model)
    # One prompt: what is read ends before the last token, so 20 + 8 tokens at most. The prompt once, then 3 rows of 8.
    assert read_by(model, lambda: score(model, tokens[:3], mask[:3])) == {"tokens": 20 + 3 * 8, "passes": 2}
    # Two: 20 tokens of both, then what is left of up to 29, that is 9 tokens of 6 rows.
    assert read_by(model, lambda: score(model, tokens, mask)) == {"tokens": 2 * 20 + 6 * 9, "passes": 2}


def test_recomputed_blocks_run_both_passes_again(policy, groups):
    tokens, mask = groups
    model = policy("qwen3", grad_checkpoint=True)
    shares_prefixes(model)

    class CountedMLP(type(model.layers[0].mlp)):
        calls = 0

        def __call__(self, hidden):
            CountedMLP.calls += 1
            return super().__call__(hidden)

    model.layers[0].mlp.__class__ = CountedMLP
    gradient(model, lambda: score(model, tokens, mask).logprobs)
    assert CountedMLP.calls == 4
    checkpoint_blocks(model, enabled=False)
    shares_prefixes(model)
    CountedMLP.calls = 0
    gradient(model, lambda: score(model, tokens, mask).logprobs)
    assert CountedMLP.calls == 2


def test_rows_that_share_little_are_read_in_one_pass(policy, tokens):
    model = policy("qwen3")
    shares_prefixes(model)
    alike = tokens.copy()
    alike[:, :2] = 7  # 2 of 11 tokens: 2 + 3 * 9 = 29 of 33, less than a fifth saved
    mask = np.zeros_like(tokens)
    mask[:, 5:] = 1
    assert read_by(model, lambda: score(model, alike, mask)) == {"tokens": 33, "passes": 1}


def test_rows_share_nothing_while_dropout_acts(policy, groups):
    tokens, mask = groups
    model = policy("qwen3", dropout=0.5)
    assert shares_prefixes(model)
    with dropout_active(model):
        assert not shares_prefixes(model)
        assert read_by(model, lambda: score(model, tokens, mask))["passes"] == 1
    still = policy("qwen3")
    with dropout_active(still):
        assert shares_prefixes(still)  # a dropout of 0 draws nothing


class Forgetful(nn.Module):
    """An attention that reads nothing of a cache."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def __call__(self, hidden, mask=None, cache=None):
        return self.attention(hidden, "causal", None)


def test_a_model_whose_caches_say_something_else_is_read_row_by_row(policy, groups):
    tokens, mask = groups
    model = policy("qwen3")
    model.layers[1].self_attn = Forgetful(model.layers[1].self_attn)
    assert split_head(model) is not None
    assert not shares_prefixes(model)
    expected = np.array(plain_logprobs(model, tokens)) * mask[:, 1:]
    np.testing.assert_allclose(np.array(score(model, tokens, mask).logprobs)[:, 1:], expected, atol=2e-5)


def test_a_kind_of_cache_that_is_not_known_is_not_shared(policy):
    class Peculiar(type(policy("qwen3"))):
        def make_cache(self):
            return [object() for _ in self.layers]

    model = policy("qwen3")
    model.__class__ = Peculiar
    assert not shares_prefixes(model)


rows_that_begin_alike = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(rows_that_begin_alike)
def test_every_token_is_read_behind_its_own_beginning_and_no_plan_is_dearer_than_rows_alone(drawn):
    rows = []
    for prompt, length, completion, seed in drawn:
        begins = np.full(length, prompt)
        rows.append(np.concatenate([begins, np.random.default_rng(seed).integers(0, 3, completion)]))
    reading = plan_reading(rows)
    width = max(len(row) for row in rows)
    assert reading.tokens <= len(rows) * width
    assert reading.width == width
    # a row's stem begins as the row does, up to the depth or to where the row ends
    for row, stem in zip(rows, reading.stem_of, strict=True):
        length = min(len(row), reading.depth)
        np.testing.assert_array_equal(rows[reading.stems[stem]][:length], row[:length])
    # what is longer goes on, in the order of the stems
    assert sorted(reading.tails) == [i for i, row in enumerate(rows) if len(row) > reading.depth]
    assert [reading.stem_of[i] for i in reading.tails] == sorted(reading.stem_of[i] for i in reading.tails)
    # and no other depth would have done with fewer tokens, unless so few are saved that one pass is better
    fewest = min(
        len({tuple(row[:depth]) if len(row) >= depth else i for i, row in enumerate(rows)}) * depth
        + sum(len(row) > depth for row in rows) * (width - depth)
        for depth in range(1, width + 1)
    )
    assert reading.tokens == (fewest if fewest <= 0.8 * len(rows) * width else len(rows) * width)


def test_rows_that_may_not_share_are_read_whole():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])]
    reading = plan_reading(rows, share=False)
    assert (reading.depth, reading.stems, reading.tails, reading.tokens) == (4, [0, 1], [], 8)
    assert plan_reading(rows).tokens == 3 + 2
