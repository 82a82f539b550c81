"""More of anything never takes less memory, and a run shape refuses what is no shape."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.memory import ModelShape, RunShape, estimate

from .shapes import CONFIGS, COUNTS, MODELS, RUN, RUNS, known


@settings(max_examples=200, deadline=None)
@given(model=st.sampled_from(MODELS), run=RUNS, field=st.sampled_from(sorted(COUNTS)), more=st.integers(1, 1000))
def test_the_peak_never_falls_when_a_knob_grows(model, run, field, more):
    value: int | None = getattr(run, field)
    if value is not None:
        larger: dict[str, Any] = {field: value + more}
        assert estimate(model, replace(run, **larger)).peak >= estimate(model, run).peak


@pytest.mark.parametrize("field", ["max_prompt_len", "max_completion_len"])
def test_neither_does_it_where_longer_rows_are_fewer_beside_states_that_do_not_grow(field):
    model = known("Qwen3.5-9B")
    run = RunShape(max_prompt_len=32, max_completion_len=64, group_size=16, groups_per_step=8, backend="cuda",
                   kv_budget_bytes=4 * 2**30, max_tokens_per_micro_batch=512)  # fmt: skip
    peaks = [estimate(model, replace(run, **{field: length})).peak for length in range(64, 1024, 32)]
    assert peaks == sorted(peaks)


@settings(max_examples=100, deadline=None)
@given(model=st.sampled_from(MODELS), run=RUNS)
def test_switches_only_ever_save_memory_the_way_they_say(model, run):
    with_reference, without = (estimate(model, replace(run, has_reference=on)) for on in (True, False))
    assert with_reference.batch - without.batch == 4 * run.rows * run.sequence_length  # one float32 a token, no weights
    assert with_reference.held == without.held
    on, off = (estimate(model, replace(run, gradient_checkpointing=on)).peak for on in (True, False))
    assert on <= off


@settings(max_examples=200, deadline=None)
@given(config=CONFIGS, run=RUNS, field=st.sampled_from(sorted(COUNTS)), more=st.integers(1, 1000))
def test_neither_does_it_of_models_of_any_proportions(config, run, field, more):
    model = ModelShape.from_config(config).on(run.backend)
    value: int | None = getattr(run, field)
    larger: dict[str, Any] = {field: None if value is None else value + more}
    peak = estimate(model, run).peak
    assert estimate(model, replace(run, **larger)).peak >= peak
    assert estimate(model, replace(run, use_dora=True, has_merged_copy=True, gradient_checkpointing=False)).peak >= peak


def quantized(config: dict[str, Any], bits: int) -> ModelShape:
    return ModelShape.from_config(config | {"quantization": {"bits": bits, "group_size": 64}})


@settings(max_examples=100, deadline=None)
@given(run=RUNS, name=st.sampled_from(["Qwen3-0.6B", "Qwen3.5-9B"]), bits=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_fewer_bits_never_take_more_memory(run, name, bits):
    packed, plain = estimate(known(f"{name}-{bits}bit"), run), estimate(known(name), run)
    assert packed.weights < plain.weights
    assert packed.peak <= plain.peak


@settings(max_examples=300, deadline=None)
@given(config=CONFIGS, run=RUNS, bits=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_fewer_bits_take_more_only_where_the_model_is_mostly_vocabulary_which_is_there_dense_as_well(config, run, bits):
    packed, plain = quantized(config, bits).on(run.backend), ModelShape.from_config(config).on(run.backend)
    more = estimate(packed, run).peak - estimate(plain, run).peak
    elements = config["vocab_size"] * config["hidden_size"]
    if elements * (2 - config["tie_word_embeddings"]) <= plain.parameters // 2:
        assert more <= 0
    elif run.backend == "cuda":  # the head while it works
        assert more <= elements * bits // 8 + elements // 64 * 4
    elif run.backend == "cpu" and run.has_merged_copy:  # the copy of a dense float32 model shares its embedding
        assert more <= packed.weight_bytes
    else:
        assert more <= 0
    if bits < 8:
        assert estimate(packed, run).peak <= estimate(quantized(config, 8).on(run.backend), run).peak


@pytest.mark.parametrize(
    ("field", "value"),
    [("group_size", 0), ("max_prompt_len", -1), ("lora_rank", 1.5), ("rollout_width", 0), ("max_observation_len", -1)],
)
def test_a_run_shape_refuses_impossible_numbers(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be a whole number of at least \d, got {value}"):
        replace(RUN, **{field: value})


def test_a_run_shape_refuses_an_unknown_backend_and_a_switch_that_is_no_bool():
    with pytest.raises(ValueError, match="backend must be one of cpu, cuda, metal, got 'tpu'"):
        RunShape(max_prompt_len=1, max_completion_len=1, backend="tpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has_reference must be True or False, got 'no'"):
        RunShape(max_prompt_len=1, max_completion_len=1, has_reference="no")  # pyright: ignore[reportArgumentType]
