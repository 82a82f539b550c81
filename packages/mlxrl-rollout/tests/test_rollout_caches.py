"""The rows' caches against each row's own history, and the plan by which texts are read."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList

from mlxrl.rollout import SamplingConfig, decoder, group_requests
from mlxrl.rollout.caches import RowsKVCache, WindowRowsKVCache, join, new_cache, select
from mlxrl.rollout.decoder import reading_plan

from .comparing import assert_same, engine_of
from .environments import Chatter

HEADS, WIDTH = 2, 4


class Histories:
    """Rows in one cache of one layer, and beside it what each of them has read, to attend to plainly."""

    def __init__(self, cache, num_rows, window=None):
        self.cache, self.window = [cache], window
        self.seen = [np.zeros((2, HEADS, 0, WIDTH), dtype=np.float32)] * num_rows

    def read(self, lengths, seed):
        """Each row reads so many tokens; what each of these attends to is what the row's own history says."""
        (layer,) = self.cache
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        shape = (3, len(lengths), HEADS, longest, WIDTH)
        queries, keys, values = mx.random.normal(shape, key=mx.random.key(seed))
        if any(padding):
            layer.prepare(lengths=lengths, right_padding=padding)
        mask = layer.make_mask(longest, window_size=self.window)
        fetched = layer.update_and_fetch(keys, values)
        attended = mx.fast.scaled_dot_product_attention(queries, *fetched, scale=1.0, mask=mask)
        if any(padding):
            layer.finalize()
        new = np.array(mx.stack([keys, values]))
        for row, length in enumerate(lengths):
            self.seen[row] = np.concatenate([self.seen[row], new[:, row, :, :length]], axis=2)
            expected = attend(np.array(queries[row, :, :length]), *self.seen[row], window=self.window)
            np.testing.assert_allclose(attended[row, :, :length], expected, atol=1e-5)

    def select(self, rows, *, with_room=False):
        chosen = Histories(select(self.cache, rows, with_room=with_room)[0], 0, self.window)
        chosen.seen = [self.seen[row] for row in rows]
        return chosen

    def join(self, other):
        self.cache = join([self.cache, other.cache])
        self.seen = [*self.seen, *other.seen]


def attend(queries, keys, values, *, window):
    """Attention of the last tokens to what is before them, at most `window` tokens with themselves."""
    attended = np.zeros_like(queries)
    num_new, num_seen = queries.shape[1], keys.shape[1]
    for i in range(num_new):
        end = num_seen - num_new + i + 1
        seen = slice(max(0, end - (window or end)), end)
        weights = np.exp(np.einsum("hw,htw->ht", queries[:, i], keys[:, seen]))
        attended[:, i] = np.einsum("ht,htw->hw", weights, values[:, seen]) / weights.sum(axis=1, keepdims=True)
    return attended


def rows_cache(num_rows):
    return Histories(RowsKVCache([0] * num_rows), num_rows)


def window_cache(num_rows):
    return Histories(WindowRowsKVCache(5, [0] * num_rows), num_rows, window=5)


def mlx_lm_cache(num_rows):
    return Histories(BatchKVCache([0] * num_rows), num_rows)


def lengths_of(num_rows):
    return st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows)


@pytest.mark.parametrize("new", [rows_cache, window_cache, mlx_lm_cache])
@pytest.mark.parametrize("step", [4, 256])  # tokens by which buffers grow: with few they grow and are cut often
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_attend_to_their_own_history_whatever_becomes_of_the_batch(new, step, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchKVCache, "step", step)
        rows = new(num_rows := data.draw(st.integers(1, 3)))
        rows.read(data.draw(lengths_of(num_rows)), 0)
        for seed in range(1, data.draw(st.integers(2, 8))):
            what = data.draw(st.sampled_from(["step", "step", "read", "select", "join"]))
            if what == "step":
                rows.read([1] * len(rows.seen), seed)
            elif what == "read":
                rows.read(data.draw(lengths_of(len(rows.seen))), seed)
            elif what == "select":
                places = st.lists(st.integers(0, len(rows.seen) - 1), min_size=1, max_size=4)
                kept, rows = rows, rows.select(data.draw(places), with_room=data.draw(st.booleans()))
                kept.read([1] * len(kept.seen), seed)  # the cache selected from goes on as if nothing had been
            else:
                others = new(num_rows := data.draw(st.integers(1, 2)))
                others.read(data.draw(lengths_of(num_rows)), seed)
                rows.join(others)
        rows.read([1] * len(rows.seen), 99)
        (layer,) = rows.cache
        if isinstance(layer, RowsKVCache):
            assert layer.host_padding == layer.left_padding.tolist()
        if new is not window_cache:
            for row, (keys, values) in enumerate(rows.seen):
                alone: Any = layer.extract(row)
                np.testing.assert_array_equal(alone.keys[0], keys)
                np.testing.assert_array_equal(alone.values[0], values)


@pytest.mark.parametrize("new", [rows_cache, window_cache])
def test_rows_of_one_length_need_no_mask(new):
    rows = new(2)
    (layer,) = rows.cache
    assert layer.make_mask(3) == "causal"
    rows.read([1, 1], 0)
    assert layer.make_mask(1) is None
    rows.read([2, 1], 1)
    assert isinstance(layer.make_mask(1), mx.array)
    alone = rows.select([1]).cache[0]
    assert alone.make_mask(1) is None  # the padding went with the row that caused it
    assert alone.host_padding == [0]


def test_a_window_keeps_no_more_than_it_needs(monkeypatch):
    monkeypatch.setattr(BatchKVCache, "step", 8)
    rows = window_cache(2)
    rows.read([3, 1], 0)
    for seed in range(1, 100):
        rows.read([1, 1], seed)
    (layer,) = rows.cache
    # 5 tokens are seen; what is older goes once it fills a step, and the buffer grows by a step
    assert layer.keys.shape[2] <= 5 + 2 * 8
    assert layer.offset.tolist() == [102, 100]  # positions go on


def test_a_selection_leaves_the_cache_as_it_was():
    rows = rows_cache(2)
    rows.read([4, 2], 0)
    (layer,) = rows.cache
    before = np.array(layer.keys)
    chosen = rows.select([1, 1])
    chosen.read([1, 1], 1)
    np.testing.assert_array_equal(layer.keys, before)
    assert layer.host_padding == [0, 2]
    assert chosen.cache[0].host_padding == [0, 0]


def test_rows_that_read_on_keep_their_room_and_others_only_what_is_written():
    rows = rows_cache(3)
    rows.read([4, 2, 4], 0)
    assert rows.select([0]).cache[0].keys.shape[2] == 4
    staying = rows.select([1, 2], with_room=True)
    size = staying.cache[0].keys.shape[2]
    assert size == BatchKVCache.step
    for seed in range(1, size - 4 + 1):
        staying.read([1, 1], seed)
    assert staying.cache[0].keys.shape[2] == size  # no step had to grow


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_positions_are_one_array_for_all_layers_whatever_becomes_of_the_batch(lend, architecture):
    model, _ = lend(architecture)
    read = decoder.Reader(model)

    def positions(cache):
        (shared_B,) = {id(layer.offset): layer.offset for layer in cache if isinstance(layer, RowsKVCache)}.values()
        return shared_B.tolist()

    cache = new_cache(model, 2)
    assert positions(cache) == [0, 0]
    read(cache, [[1] * 300, [2] * 2])
    assert positions(cache) == [300, 2]
    cache = join([select(cache, [1, 0, 1]), read(new_cache(model, 1), [[3] * 4]).cache])
    assert positions(cache) == [2, 300, 2, 4]
    model(mx.array([[5]] * 4), cache=cache)
    assert positions(cache) == [3, 301, 3, 5]


@pytest.mark.parametrize("with_room", [False, True])
def test_a_layer_that_keeps_several_things_keeps_the_room_of_each(with_room):
    rows = rows_cache(3)
    rows.read([4, 2, 4], 0)
    alone = select(rows.cache, [1, 2], with_room=with_room)[0]
    (beside,) = select([CacheList(ArraysCache(1, left_padding=[0] * 3), *rows.cache)], [1, 2], with_room=with_room)
    state, nested = beside.caches
    assert nested.keys.shape[2] == alone.keys.shape[2] == (BatchKVCache.step if with_room else 4)
    assert nested.host_padding == alone.host_padding
    assert state.batch_size == 2


@given(lengths=st.lists(st.integers(1, 3000), max_size=40), ragged=st.booleans())
def test_every_text_is_read_once_with_no_more_padding_than_text(lengths, ragged):
    plan = reading_plan(lengths, ragged=ragged)
    assert sorted(i for chunk in plan for i in chunk) == list(range(len(lengths)))
    for chunk in plan:
        texts = [lengths[i] for i in chunk]
        padded = len(texts) * max(texts)
        assert padded <= 2 * sum(texts)
        assert padded <= decoder.PREFILL_TOKENS or len(texts) == 1
        assert ragged or len(set(texts)) == 1


@given(length=st.integers(1, 3000), count=st.integers(1, 50), ragged=st.booleans())
def test_texts_of_one_length_are_read_in_as_few_passes_as_the_bound_allows(length, count, ragged):
    together = max(1, decoder.PREFILL_TOKENS // length)
    assert len(reading_plan([length] * count, ragged=ragged)) == math.ceil(count / together)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gemma3_text", "qwen3_5", "cohere"])
@pytest.mark.parametrize("most", [1, 7, 16])
def test_a_long_text_read_in_pieces_is_read_as_in_one(lend, monkeypatch, architecture, most):
    policy = lend(architecture)

    def play():
        engine = engine_of(policy, SamplingConfig(temperature=0.7, max_tokens=4))
        requests = group_requests(["x" * 40, "a text of some length"], lambda o, *_: Chatter(2, o), group_size=2)
        return engine.rollout(requests), engine.stats

    whole, cost = play()
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", most)
    pieces, cost_in_pieces = play()
    assert_same(pieces, whole, 1e-4)
    assert cost_in_pieces.prefill_tokens == cost.prefill_tokens
