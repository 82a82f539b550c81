"""The estimate against hand-derived parts and measured peaks, and its monotonicity."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.memory import ModelShape, RunShape, estimate, known_config

GB = 10**9


def known(model_id):
    config = known_config(model_id)
    assert config is not None
    return ModelShape.from_config(config)


SMALL = known("mlx-community/Qwen3-0.6B-4bit")
HYBRID = known("mlx-community/Qwen3.5-9B-MLX-4bit")
MIXTURE = ModelShape.from_config(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 300,
    }
)
MODELS = [SMALL, HYBRID, MIXTURE]
RUN = RunShape(group_size=4, max_prompt_len=100, max_completion_len=412)


def measured_model(dtype, layers, bits=None):
    """The Qwen3 shape of the measurements: 256 wide, 4 heads and 2 kv heads of 64, 768 in the feed-forward."""
    packed = {} if bits is None else {"quantization": {"bits": bits, "group_size": 64}}
    return ModelShape.from_config(
        packed
        | {
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_size": 256,
            "num_hidden_layers": layers,
            "intermediate_size": 768,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
        }
    )


# Bytes per token above the weights and adapters, of loss and gradient of a head-free LoRA rank 8 model, 4 rows of 128
# tokens: mx.get_peak_memory of mlx-lm's Qwen3, MLX 0.32, CPU; one gradient tree (4 bytes an element) is part of it
MEASURED = [
    ("float32", 2, False, 90_110),
    ("float32", 4, False, 144_250),
    ("float32", 4, True, 83_720),
    ("float32", 8, True, 90_150),
    ("bfloat16", 4, False, 112_740),
    ("bfloat16", 8, False, 198_250),
    ("bfloat16", 4, True, 76_100),
    ("bfloat16", 8, True, 82_820),
]


@pytest.mark.parametrize(("dtype", "layers", "checkpointing", "measured"), MEASURED)
def test_update_activations_are_within_15_percent_of_the_measured_peak(dtype, layers, checkpointing, measured):
    run = RunShape(group_size=4, max_prompt_len=64, max_completion_len=64, gradient_checkpointing=checkpointing)
    model = measured_model(dtype, layers)
    predicted = (estimate(model, run).update_activations + 4 * model.lora_parameters(8)) / (4 * 128)
    assert predicted == pytest.approx(measured, rel=0.15)


# The same with DoRA: of a quantised base each layer keeps the dense weights that it multiplied by
MEASURED_DORA = [
    ("float32", None, False, 182_423),
    ("bfloat16", None, False, 133_490),
    ("float32", 4, False, 205_967),
    ("bfloat16", 4, False, 144_762),
    ("float32", None, True, 94_771),
    ("bfloat16", None, True, 77_766),
    ("float32", 4, True, 102_445),
    ("bfloat16", 4, True, 81_639),
]


@pytest.mark.parametrize(("dtype", "bits", "checkpointing", "measured"), MEASURED_DORA)
def test_update_activations_of_dora_are_within_16_percent_of_the_measured_peak(dtype, bits, checkpointing, measured):
    run = RunShape(
        group_size=4, max_prompt_len=64, max_completion_len=64, gradient_checkpointing=checkpointing, use_dora=True
    )
    model = measured_model(dtype, 4, bits)
    predicted = (estimate(model, run).update_activations + 4 * model.lora_parameters(8, True)) / (4 * 128)
    assert predicted == pytest.approx(measured, rel=0.16)


# Adapters on some layers of 4 blocks: on the last so many, or on the queries and values of all
MEASURED_SOME = [
    ("float32", 1, 63_564),
    ("float32", 2, 92_156),
    ("float32", None, 120_517),
    ("bfloat16", 1, 48_608),
    ("bfloat16", 2, 69_984),
    ("bfloat16", None, 79_709),
]


@pytest.mark.parametrize(("dtype", "last", "measured"), MEASURED_SOME)
def test_blocks_below_the_first_adapter_keep_nothing(dtype, last, measured):
    def select(block, name):
        return block >= 4 - last if last else name in ("self_attn.q_proj", "self_attn.v_proj")

    run = RunShape(group_size=4, max_prompt_len=64, max_completion_len=64, gradient_checkpointing=False)
    model = measured_model(dtype, 4).adapting(select)
    predicted = (estimate(model, run).update_activations + 4 * model.lora_parameters(8)) / (4 * 128)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_what_a_float32_block_keeps_agrees_with_the_measured_slope_over_layers():
    # (144,250 - 90,110) / 2 = 27,070 bytes per token; counted: 4 bytes of (2*256 + 3*256 + 3*128 + 4*768) elements,
    # 4 * 4 heads * 128 scores, and 4 bytes of the inputs of the LoRA pairs (2*256 + 256 + 768): 27,136
    block = measured_model("float32", 2).blocks[0]
    assert block.kept_bytes(128, 4, "unrolled") == 27_136 == pytest.approx(27_070, rel=0.01)


def test_what_an_unrolled_gated_delta_block_keeps_agrees_with_the_measured_slope_over_layers():
    # Qwen3.5 with 8 value and 4 key heads of 32, 256 wide, 768 in the feed-forward, float32, 2 rows of 64 tokens:
    # peaks of 272,200 and 476,140 bytes per token with 2 and 4 such blocks, 101,970 a block
    model = ModelShape.from_config(
        {
            "model_type": "qwen3_5",
            "hidden_size": 256,
            "num_hidden_layers": 1,
            "intermediate_size": 768,
            "num_attention_heads": 4,
            "vocab_size": 512,
            "layer_types": ["linear_attention"],
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
        }
    )
    assert model.blocks[0].kept_bytes(64, 4, "unrolled") == pytest.approx(101_970, rel=0.05)


def test_the_cache_holds_keys_and_values_in_steps_of_256():
    # 28 blocks x keys and values x 8 heads x 128 x 2 bytes = 114,688 bytes a position; 512 positions for each of 4
    # rows, one more block of each row while it grows, and 256 positions of the one prompt that waits to be forked
    position = 28 * 2 * 8 * 128 * 2
    assert estimate(SMALL, RUN).kv_cache == 4 * 512 * position * 29 // 28 + 256 * position


def test_a_budget_bounds_the_caches_of_the_rows():
    # 114,688 bytes a position as above, 512 positions a row; a budget of one row and a half, which 4 rows may exceed
    # by a step of 256 positions each
    position, prefix = 28 * 2 * 8 * 128 * 2, 256 * 28 * 2 * 8 * 128 * 2

    def rows(budget, **changes):
        run = replace(RUN, **changes)
        return (estimate(SMALL, replace(run, kv_budget_bytes=budget)).kv_cache - prefix) * 28 // 29

    assert rows(768 * position) == (768 + 4 * 256) * position
    # a budget above what 4 rows take bounds nothing, and below one row one row is let in
    assert rows(4 * 512 * position) == rows(None) == 4 * 512 * position
    assert rows(1, rollout_width=1) == rows(512 * position, rollout_width=1) == 512 * position


def test_a_row_ends_at_its_context():
    assert replace(RUN, max_context=300).sequence_length == 300
    assert replace(RUN, max_context=1000).sequence_length == 512


def test_a_merged_copy_is_counted_and_nothing_else_changes():
    plain, merged = (estimate(SMALL, replace(RUN, has_merged_copy=on)) for on in (False, True))
    assert (plain.merged_copy, merged.merged_copy) == (0, SMALL.merged_copy_bytes)
    assert merged.peak - plain.peak == SMALL.merged_copy_bytes


def test_texts_are_read_2048_positions_at_a_time():
    # 4 prompts of 100 tokens in one pass; 40 of them fill the chunk, and so do the long transcripts of many turns
    def activations(**changes):
        # a model whose logits are few, so that reading is the worst moment
        return estimate(MIXTURE, replace(RUN, max_completion_len=10, **changes)).rollout_activations

    widest = max(block.forward_bytes(110, 2) for block in MIXTURE.blocks)
    assert activations(groups_per_step=4) == math.ceil(4 * 100 * widest)
    assert activations(groups_per_step=40) == math.ceil(2048 * widest)


def test_a_sliding_window_bounds_its_blocks_of_the_cache():
    sliding, full = MIXTURE.blocks[:2]
    # 2 * 2 bytes * 64 channels a position; a window of 300 takes two steps of 256, 2000 positions take eight
    assert sliding.cache_bytes(2000, 2) == 256 * 512
    assert full.cache_bytes(2000, 2) == 256 * 2048


def test_a_gated_delta_block_has_a_cache_that_does_not_grow():
    block = HYBRID.blocks[0]
    # float32 state of 32 * 128 * 128, and 3 past inputs of the convolution's 8192 channels in bfloat16
    assert block.cache_bytes(10, 2) == block.cache_bytes(10_000, 2) == 4 * 32 * 128 * 128 + 2 * 3 * 8192


def test_adapters_take_twenty_bytes_an_element_with_adam():
    # float32: the parameter, two gradients, two optimizer states
    assert estimate(SMALL, RUN).adapters == 20 * SMALL.lora_parameters(16)
    assert estimate(SMALL, replace(RUN, optimizer_states=0)).adapters == 12 * SMALL.lora_parameters(16)


def test_the_adapter_of_a_reference_is_one_more_copy():
    plain, kept = (estimate(SMALL, replace(RUN, has_reference_adapter=on)) for on in (False, True))
    assert kept.adapters - plain.adapters == 4 * SMALL.lora_parameters(16)


def test_the_head_holds_the_chunks_in_flight():
    # 2**22 logits are 27 positions of 151,936, and a chunk has 128 at least; of 2.3 chunks 6.5 float32 arrays
    assert estimate(SMALL, RUN).head == 26 * 151_936 * 295
    assert estimate(SMALL, replace(RUN, score_chunk=10)).head == 26 * 151_936 * 23
    # a single row of 200 tokens has no more positions than these
    assert estimate(SMALL, replace(RUN, micro_batch_size=1, max_context=200)).head == 26 * 151_936 * 200


# Bytes of a chunk's logits in float32, 32,000 a position: mx.get_peak_memory of score(with_gradient=True) and the
# gradient of a tiny Qwen3, its slope from chunks of 100 positions to 200, one row, MLX 0.32, CPU
MEASURED_HEAD = [(1, 6.42), (2, 11.99), (4, 14.36)]


@pytest.mark.parametrize(("chunks", "measured"), MEASURED_HEAD)
def test_the_head_is_within_10_percent_of_the_measured_slope(chunks, measured):
    run = RunShape(group_size=1, max_prompt_len=1, max_completion_len=100 * chunks - 1, score_chunk=100)
    assert estimate(SMALL, run).head / (4 * 151_936 * 100) == pytest.approx(measured, rel=0.1)


def test_the_sequence_counts_turns_and_the_observations_between_them():
    run = RunShape(max_prompt_len=100, max_completion_len=50, max_turns=3, max_observation_len=20)
    assert run.sequence_length == 100 + 3 * 50 + 2 * 20


def test_one_row_always_fits_a_micro_batch():
    assert replace(RUN, max_tokens_per_micro_batch=10).micro_batch_tokens == 512
    assert replace(RUN, max_tokens_per_micro_batch=1200).micro_batch_tokens == 1200
    assert replace(RUN, micro_batch_size=3).micro_batch_tokens == 3 * 512


def test_the_peak_is_the_sum_of_the_parts_with_the_larger_phase():
    e = estimate(SMALL, replace(RUN, has_merged_copy=True))
    larger = max(e.kv_cache + e.rollout_activations, e.update_activations + e.head)
    assert e.peak == e.weights + e.merged_copy + e.adapters + larger + e.overhead


def test_the_9b_model_stays_well_under_a_less_economical_engine():
    # that engine took 25.9 GB with 2 rows and 45.9 GB with 4, all rows in one backward pass, checkpointed
    for group_size, other in ((2, 25.9), (4, 45.9)):
        run = RunShape(group_size=group_size, max_prompt_len=97, max_completion_len=512)
        assert estimate(HYBRID, replace(run, micro_batch_size=1)).peak < 0.75 * other * GB
        assert estimate(HYBRID, replace(run, recurrence="fused")).peak < 0.5 * other * GB
        # unrolled in one pass it is the same computation: within 15 % of it
        assert estimate(HYBRID, run).peak == pytest.approx(other * GB, rel=0.15)


def test_the_small_model_stays_well_under_a_less_economical_engine():
    # that engine took 5.3 to 6.3 GB on a Mac
    run = RunShape(group_size=4, max_prompt_len=97, max_completion_len=256)
    assert estimate(SMALL, run).peak < 0.75 * 5.3 * GB


def test_notes_name_what_is_assumed():
    unknown = ModelShape.from_config({**(known_config("Qwen3-0.6B") or {}), "model_type": "brandnew"})
    assert any("'brandnew' is unknown" in note for note in estimate(unknown, RUN).notes)
    assert any("unrolled" in note for note in estimate(HYBRID, RUN).notes)
    assert any("fused" in note for note in estimate(HYBRID, replace(RUN, recurrence="fused")).notes)
    assert any("expert" in note for note in estimate(MIXTURE, RUN).notes)
    assert not any("delta" in note or "expert" in note for note in estimate(SMALL, RUN).notes)


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
        "recurrence": st.sampled_from(["unrolled", "fused"]),
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
    peak = {r: estimate(model, replace(run, recurrence=r)).peak for r in ("fused", "unrolled")}
    assert peak["fused"] <= peak["unrolled"]
    with_reference, without = (estimate(model, replace(run, has_reference=on)) for on in (True, False))
    assert with_reference.peak - without.peak == 4 * run.rows * run.sequence_length  # one float32 a token, no weights
    on, off = (estimate(model, replace(run, gradient_checkpointing=on)).peak for on in (True, False))
    assert on <= off


@settings(max_examples=100, deadline=None)
@given(run=RUNS, name=st.sampled_from(["Qwen3-0.6B", "Qwen3.5-9B"]), bits=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_fewer_bits_never_take_more_memory(run, name, bits):
    run = replace(run, use_dora=False)  # which holds the dense weights beside the packed ones
    packed, plain = estimate(known(f"{name}-{bits}bit"), run), estimate(known(name), run)
    assert packed.peak < plain.peak


@pytest.mark.parametrize(
    ("field", "value"),
    [("group_size", 0), ("max_prompt_len", -1), ("lora_rank", 1.5), ("rollout_width", 0), ("max_observation_len", -1)],
)
def test_a_run_shape_refuses_impossible_numbers(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be a whole number of at least \d, got {value}"):
        replace(RUN, **{field: value})


def test_a_run_shape_refuses_an_unknown_recurrence_and_a_switch_that_is_no_bool():
    with pytest.raises(ValueError, match="recurrence must be 'unrolled' or 'fused', got 'fast'"):
        RunShape(max_prompt_len=1, max_completion_len=1, recurrence="fast")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has_reference must be True or False, got 'no'"):
        RunShape(max_prompt_len=1, max_completion_len=1, has_reference="no")  # pyright: ignore[reportArgumentType]
