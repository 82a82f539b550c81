"""More of anything never takes less memory, and a run shape refuses what is no shape."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.memory import RunShape, estimate

from .shapes import BACKENDS, MODELS, RUN, known

COUNTS = {
    "max_prompt_len": 3000,
    "max_completion_len": 3000,
    "group_size": 32,
    "groups_per_step": 32,
    "max_turns": 8,
    "max_observation_len": 500,
    "max_context": 3000,
    "rollout_width": 300,
    "kv_budget_bytes": 2**32,
    "micro_batch_size": 300,
    "max_tokens_per_micro_batch": 100_000,
    "lora_rank": 128,
    "optimizer_states": 4,
    "score_chunk": 3000,
}
OPTIONAL = (
    "max_context",
    "rollout_width",
    "kv_budget_bytes",
    "micro_batch_size",
    "max_tokens_per_micro_batch",
    "score_chunk",
)


def run_shape(fields: dict[str, Any]) -> RunShape:
    return RunShape(**fields)


RUNS = st.fixed_dictionaries(
    {name: st.integers(1, most) | (st.none() if name in OPTIONAL else st.nothing()) for name, most in COUNTS.items()}
    | {
        "gradient_checkpointing": st.booleans(),
        "has_reference": st.booleans(),
        "has_reference_adapter": st.booleans(),
        "use_dora": st.booleans(),
        "has_merged_copy": st.booleans(),
        "shares_prompts": st.booleans(),
        "backend": st.sampled_from(BACKENDS),
    }
).map(run_shape)


@settings(max_examples=200, deadline=None)
@given(model=st.sampled_from(MODELS), run=RUNS, field=st.sampled_from(sorted(COUNTS)), more=st.integers(1, 1000))
def test_the_peak_never_falls_when_a_knob_grows(model, run, field, more):
    value: int | None = getattr(run, field)
    if value is not None:
        larger: dict[str, Any] = {field: value + more}
        assert estimate(model, replace(run, **larger)).peak >= estimate(model, run).peak


@settings(max_examples=100, deadline=None)
@given(model=st.sampled_from(MODELS), run=RUNS)
def test_switches_only_ever_save_memory_the_way_they_say(model, run):
    with_reference, without = (estimate(model, replace(run, has_reference=on)) for on in (True, False))
    assert with_reference.batch - without.batch == 4 * run.rows * run.sequence_length  # one float32 a token, no weights
    assert with_reference.held == without.held
    on, off = (estimate(model, replace(run, gradient_checkpointing=on)).peak for on in (True, False))
    assert on <= off


@settings(max_examples=100, deadline=None)
@given(run=RUNS, name=st.sampled_from(["Qwen3-0.6B", "Qwen3.5-9B"]), bits=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_fewer_bits_never_take_more_memory(run, name, bits):
    run = replace(run, use_dora=False)  # which holds the dense weights beside the packed ones
    packed, plain = estimate(known(f"{name}-{bits}bit"), run), estimate(known(name), run)
    assert packed.weights < plain.weights
    assert packed.peak <= plain.peak


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
