"""What the audit takes for rounding and what for a fault, on models that round coarsely, go wrong, or do both."""

import re

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import Model

from mlxrl.rollout import Engine, SamplingConfig
from mlxrl.rollout.audit import audit

REASON = (
    r"its logits differ from those of a pass over the whole text by (\S+) of their size, where rounding may take (\S+)"
)


def with_noise(logits, share, seed):
    """The logits, and at every position noise of this share of their own size."""
    noise = mx.random.normal(logits.shape, key=mx.random.key(seed))
    size = mx.linalg.norm(logits - logits.mean(axis=-1, keepdims=True), axis=-1, keepdims=True)
    return logits + share * size * noise / mx.linalg.norm(noise, axis=-1, keepdims=True)


def num_read(cache):
    """How many tokens a cache holds, over all its rows."""
    return 0 if cache is None else mx.sum(mx.array(cache[0].offset)).item()


class Coarse(Model):
    """Rounds coarsely, in bfloat16: 4 % of its logits depend on how many tokens a pass reads, and behind how many.

    Two passes of different shape thus differ by 0.04 * sqrt(2) = 0.057 of the logits' size, a tenth more or less by
    how the two noises lie: by more than 0.05, and three times as much is less than the cap of 0.2.
    """

    def __call__(self, inputs, cache=None, input_embeddings=None):
        seed = 1000 * inputs.shape[1] + num_read(cache)
        return with_noise(super().__call__(inputs, cache, input_embeddings), 0.04, seed).astype(mx.bfloat16)


class Drifting(Model):
    """Exact in plain passes; with a cache its logits are off by a share of their size, which no rounding explains."""

    share = 0.0

    def __call__(self, inputs, cache=None, input_embeddings=None):
        logits = super().__call__(inputs, cache, input_embeddings)
        return logits if cache is None else with_noise(logits, self.share, seed=1)


class DriftsBy4Percent(Drifting):
    share = 0.04


class DriftsBy6Percent(Drifting):
    share = 0.06


class Forgetful(Model):
    """Its steps read another token than the newest."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        if cache is not None and inputs.shape[1] == 1:
            inputs = mx.full(inputs.shape, 7)
        return super().__call__(inputs, cache, input_embeddings)


class Displaced(Model):
    """Its steps turn queries and keys to a position three further on."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        shift = 3 if cache is not None and inputs.shape[1] == 1 else 0
        for layer in cache or []:
            layer.offset = layer.offset + shift
        logits = super().__call__(inputs, cache, input_embeddings)
        for layer in cache or []:
            layer.offset = layer.offset - shift
        return logits


class SeesPadding(Model):
    """Its steps see the padding in front of the shorter rows of a batch."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        for layer in cache or []:
            layer.make_mask = lambda N, **_: None if N == 1 else "causal"
        return super().__call__(inputs, cache, input_embeddings)


class SeesFuture(Model):
    """In a plain pass every token sees those after it."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        return super().__call__(inputs, [Unmasked() for _ in self.layers] if cache is None else cache, input_embeddings)


class SeesALittleOfTheFuture(Model):
    """A tenth of what it says of each token is what it says of all."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        logits = super().__call__(inputs, cache, input_embeddings)
        return logits + 0.1 * logits.mean(axis=1, keepdims=True)


class In16Bits(Model):
    def __call__(self, inputs, cache=None, input_embeddings=None):
        return super().__call__(inputs, cache, input_embeddings).astype(mx.bfloat16)


class SeesFutureIn16Bits(In16Bits, SeesFuture):
    pass


class SeesALittleIn16Bits(In16Bits, SeesALittleOfTheFuture):
    pass


class Unmasked(KVCache):
    def make_mask(self, *args, **kwargs):
        return None


class Broken(Model):
    """With a cache it says no numbers."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        logits = super().__call__(inputs, cache, input_embeddings)
        return logits if cache is None else mx.full(logits.shape, mx.nan)


class Uniform(Model):
    """Says the same of every token, as a head of zeros does; of no size to measure distances by."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        return mx.zeros_like(super().__call__(inputs, cache, input_embeddings))


class DriftsAndSeesPadding(DriftsBy6Percent, SeesPadding):
    pass


class CoarseAndForgetful(Coarse, Forgetful):
    pass


class CoarseAndDisplaced(Coarse, Displaced):
    pass


class CoarseAndSeesPadding(Coarse, SeesPadding):
    pass


@pytest.fixture
def model(make):
    """model(Coarse) -> a tiny Qwen3 that is one."""

    def of(kind):
        made, _ = make("qwen3")
        made.__class__ = kind
        return made

    return of


def told(reason):
    """The largest distance and the tolerance that a reason tells, as it spells them."""
    found = re.fullmatch(REASON, reason)
    assert found is not None
    return found.groups()


def test_rounding_that_passes_of_other_shapes_show_too_is_no_fault(model):
    verdict = audit(model(Coarse))
    assert verdict.row_bytes is not None
    assert verdict.batched
    assert verdict.ragged
    assert verdict.reason == ""


@pytest.mark.parametrize("kind", [CoarseAndForgetful, CoarseAndDisplaced])
def test_steps_that_go_wrong_are_not_excused_by_coarse_rounding(model, kind):
    verdict = audit(model(kind))
    assert verdict.row_bytes is None
    distance, tolerance = map(float, told(verdict.reason))
    # 3 * 0.057 = 0.17 as Coarse derives it, up to a tenth more for the widest of all positions
    assert 0.17 <= tolerance < 0.2
    assert distance > 0.3  # beyond the cap as well


def test_a_batch_that_goes_wrong_is_not_excused_by_coarse_rounding(model):
    verdict = audit(model(CoarseAndSeesPadding))
    assert verdict.row_bytes is not None  # a row alone has no padding
    assert not verdict.batched
    assert not verdict.ragged
    distance, tolerance = map(float, told(verdict.reason))
    assert tolerance < 0.2
    assert distance > 0.3


@pytest.mark.parametrize(
    "kind",
    [SeesFuture, SeesFutureIn16Bits, SeesALittleOfTheFuture, SeesALittleIn16Bits],
    ids=lambda kind: kind.__name__,
)
def test_a_model_that_sees_the_future_is_not_excused_by_what_its_plain_passes_differ_by(model, kind):
    verdict = audit(model(kind))
    assert verdict.row_bytes is None
    distance, tolerance = told(verdict.reason)
    assert float(distance) > 0.05
    assert tolerance == "0.05"


def test_where_rounding_is_fine_no_more_than_a_twentieth_is_tolerated(model):
    assert audit(model(DriftsBy4Percent)).batched
    verdict = audit(model(DriftsBy6Percent))
    assert verdict.row_bytes is None
    assert told(verdict.reason) == ("0.06", "0.05")


def test_a_model_that_fails_in_every_way_is_told_how_far_off_a_row_alone_is(model):
    # in a batch the padding takes its logits much further than 0.06
    assert told(audit(model(DriftsAndSeesPadding)).reason) == ("0.06", "0.05")


def test_what_is_no_number_is_refused_and_what_is_nothing_agrees(model):
    assert told(audit(model(Broken)).reason) == ("inf", "0.05")
    assert audit(model(Uniform)).batched


def test_the_refusal_names_the_model_the_distance_and_the_tolerance(model, lend):
    _, tokenizer = lend("qwen3")
    message = (
        "a qwen3 model cannot be sampled from token by token: its logits differ from those of a pass over the whole "
        "text by 0.06 of their size, where rounding may take 0.05; use another."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Engine(model(DriftsBy6Percent), tokenizer, SamplingConfig())


def test_a_verdict_is_of_the_types_that_the_weights_have(lend):
    model, _ = lend("qwen3")
    wide = audit(model)
    assert audit(model) is wide
    try:
        model.set_dtype(mx.float16)
        narrow = audit(model)
    finally:
        model.set_dtype(mx.float32)
    assert wide.row_bytes is not None
    assert narrow.row_bytes is not None
    assert wide.row_bytes(100) == 2 * narrow.row_bytes(100)
