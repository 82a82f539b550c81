"""The estimate against hand-derived parts and measured peaks."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.memory import Backend, ModelShape, RunShape, estimate, known_config

from .shapes import BACKENDS, HYBRID, MIXTURE, RUN, SMALL, known

GB = 10**9


# 4 rows of 128 tokens that are read whole, as those that were measured
WHOLE = RunShape(
    group_size=4,
    max_prompt_len=64,
    max_completion_len=64,
    lora_rank=8,
    shares_prompts=False,
    gradient_checkpointing=False,
    backend="cpu",
)


def measured_model(dtype, layers, bits=None, hidden=256):
    """The Qwen3 shape of the measurements: heads of 64, half as many kv heads, thrice the width in the feed-forward."""
    packed = {} if bits is None else {"quantization": {"bits": bits, "group_size": 64}}
    return ModelShape.from_config(
        packed
        | {
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": 3 * hidden,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 64,
            "vocab_size": 512,
        }
    )


# Bytes per token above the weights and adapters, of loss and gradient of the trunk of a LoRA rank 8 model as the policy
# reads it, 4 rows of 128 tokens: mx.get_peak_memory of mlx-lm's Qwen3, MLX 0.32, CPU; one gradient tree (4 bytes an
# element) is part of it. The constants of Metal, which fuses no attention here, are those of 16-bit models.
MEASURED = [
    ("float32", 2, False, 77_630),
    ("float32", 4, False, 115_970),
    ("float32", 8, False, 197_730),
    ("float32", 4, True, 64_800),
    ("float32", 8, True, 69_200),
    ("bfloat16", 2, False, 43_860),
    ("bfloat16", 4, False, 68_080),
    ("bfloat16", 8, False, 117_520),
    ("bfloat16", 4, True, 34_160),
    ("bfloat16", 8, True, 36_190),
]


def predicted(model, **changes):
    """The same of the estimate."""
    backend: Backend = "cpu" if model.dtype == "float32" else "metal"
    run = replace(WHOLE, backend=backend, **changes)
    return (estimate(model, run).update_activations + 4 * model.lora_parameters(8, run.use_dora)) / (4 * 128)


@pytest.mark.parametrize(("dtype", "layers", "checkpointing", "measured"), MEASURED)
def test_update_activations_are_within_15_percent_of_the_measured_peak(dtype, layers, checkpointing, measured):
    model = measured_model(dtype, layers)
    assert predicted(model, gradient_checkpointing=checkpointing) == pytest.approx(measured, rel=0.15)


# The same with DoRA, whose layers keep their outputs; of a quantised base no dense weights
MEASURED_DORA = [
    ("float32", None, False, 161_830),
    ("bfloat16", None, False, 95_910),
    ("float32", 4, False, 157_720),
    ("bfloat16", 4, False, 95_920),
    ("float32", None, True, 73_970),
    ("bfloat16", None, True, 44_100),
    ("float32", 4, True, 69_770),
    ("bfloat16", 4, True, 44_440),
]


@pytest.mark.parametrize(("dtype", "bits", "checkpointing", "measured"), MEASURED_DORA)
def test_update_activations_of_dora_are_within_15_percent_of_the_measured_peak(dtype, bits, checkpointing, measured):
    model = measured_model(dtype, 4, bits)
    assert predicted(model, gradient_checkpointing=checkpointing, use_dora=True) == pytest.approx(measured, rel=0.15)


# Adapters on some layers of 4 blocks: on the last so many, or on the queries and values of all
MEASURED_SOME = [
    ("float32", 1, 56_570),
    ("float32", 2, 76_910),
    ("float32", None, 102_430),
    ("bfloat16", 1, 31_740),
    ("bfloat16", 2, 43_860),
    ("bfloat16", None, 60_630),
]


@pytest.mark.parametrize(("dtype", "last", "measured"), MEASURED_SOME)
def test_blocks_below_the_first_adapter_keep_nothing(dtype, last, measured):
    def select(block, name):
        return block >= 4 - last if last else name in ("self_attn.q_proj", "self_attn.v_proj")

    assert predicted(measured_model(dtype, 4).adapting(select)) == pytest.approx(measured, rel=0.15)


def test_what_a_float32_block_keeps_agrees_with_the_measured_slope_over_layers():
    # (197,730 - 77,630) / 6 less a gradient of 304 = 19,713 bytes per token; counted: 4 bytes of
    # (2*256 + 3*256 + 3*128 + 2*768) elements, 4 * 4 heads * 128 scores, and 4 bytes of the inputs of the LoRA pairs
    # (2*256 + 256 + 768): 20,992
    block = measured_model("float32", 2).blocks[0]
    assert block.kept_bytes(4) + block.score_bytes(128, 4, 0) == 20_992 == pytest.approx(19_713, rel=0.07)


def test_narrow_heads_keep_no_scores_where_their_attention_is_fused():
    block = measured_model("bfloat16", 2).blocks[0]
    assert [block.score_bytes(128, 2, width) for width in (63, 64, 128)] == [2 * 4 * 128, 0, 0]


# Fields of a gated-delta block and its bytes a token: the slope of `mx.get_peak_memory` of a training step from 2 to 4
# such blocks before one with attention; 128 wide, 384 in the feed-forward, 4 value and 2 key heads of 32, float32, 16
# rows of 32 tokens, MLX 0.32, CPU
MEASURED_DELTA = [
    ({}, 14_345),
    ({"linear_value_head_dim": 64}, 19_885),
    ({"linear_key_head_dim": 64}, 17_841),
    ({"linear_num_key_heads": 4}, 17_110),
    ({"linear_num_value_heads": 8}, 20_114),
    ({"hidden_size": 256}, 16_498),
]


@pytest.mark.parametrize(("fields", "measured"), MEASURED_DELTA)
def test_what_a_gated_delta_block_keeps_is_within_15_percent_of_the_measured_slope_over_layers(fields, measured):
    config = {
        "model_type": "qwen3_5",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "layer_types": ["linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    block = ModelShape.from_config(config | fields).blocks[0]
    assert block.kept_bytes(4) == pytest.approx(measured, rel=0.15)


def test_the_states_of_a_gated_delta_model_are_those_of_one_layer():
    def activations(layers):
        config = {**(known_config("Qwen3.5-9B") or {})}
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
        return estimate(ModelShape.from_config(config), replace(WHOLE, backend="metal")).update_activations

    # 4 more layers are 3 gated-delta blocks and one with attention, each with what it keeps of 512 tokens, no states
    delta, full = HYBRID.blocks[0], HYBRID.blocks[3]
    kept = 3 * delta.kept_bytes(2) + full.kept_bytes(2) + full.score_bytes(128, 2, 0)
    assert activations(8) - activations(4) == pytest.approx(512 * kept, rel=1e-6)


def test_the_cache_holds_keys_and_values_and_grows_in_steps_of_256():
    # 28 blocks x keys and values x 8 heads x 128 x 2 bytes = 114,688 bytes a position; 4 rows of a prompt of 100 and
    # two steps for 412 more
    position = 28 * 2 * 8 * 128 * 2
    assert estimate(SMALL, RUN).kv_cache == 4 * (100 + 512) * position
    # between turns the batch that a row left, the row and the batch that it joins are there
    turns = replace(RUN, max_turns=2, max_completion_len=206)
    assert estimate(SMALL, turns).kv_cache == 3 * 4 * (100 + 512) * position


def test_a_budget_bounds_the_caches_of_the_rows():
    # 114,688 bytes a position as above; a budget of one row and a half, which 4 rows may exceed by a step of 256 each
    position = 28 * 2 * 8 * 128 * 2

    def rows(budget, **changes):
        return estimate(SMALL, replace(RUN, kv_budget_bytes=budget, **changes)).kv_cache

    assert rows(768 * position) == (768 + 4 * 256) * position
    # a budget above what 4 rows take bounds nothing, and below one row one row is let in
    assert rows(4 * 612 * position) == rows(None) == 4 * 612 * position
    assert rows(1, rollout_width=1) == rows(512 * position, rollout_width=1) == 612 * position


def test_a_row_ends_at_its_context():
    assert replace(RUN, max_context=300).sequence_length == 300
    assert replace(RUN, max_context=1000).sequence_length == 512


def test_a_merged_copy_is_counted_and_nothing_else_changes():
    plain, merged = (estimate(SMALL, replace(RUN, has_merged_copy=on)) for on in (False, True))
    assert (plain.merged_copy, merged.merged_copy) == (0, SMALL.merged_copy_bytes)
    assert merged.peak - plain.peak == SMALL.merged_copy_bytes


def test_texts_are_read_2048_positions_at_a_time():
    # observations of 4 rows in one pass; those of 40 fill the chunk
    def activations(**changes):
        run = replace(RUN, max_completion_len=10, max_turns=2, max_observation_len=300, backend="cpu", **changes)
        return estimate(MIXTURE, run).rollout_activations - 2 * MIXTURE.lora_parameters(16)

    widest = max(block.kept_bytes(2) + block.score_bytes(420, 2, 0) for block in MIXTURE.blocks)
    assert activations() == math.ceil(4 * 300 * widest)
    assert activations(groups_per_step=10) == math.ceil(2048 * widest)


def test_a_sliding_window_bounds_its_blocks_of_the_cache():
    sliding, full = MIXTURE.blocks[:2]
    # 2 * 2 bytes * 64 channels a position; beyond a window of 300 a step of 256 is dropped once another has grown
    assert sliding.cache_bytes(2000, 2) == 256 * (300 + 2 * 256)
    assert full.cache_bytes(2000, 2) == 256 * 2000


def test_a_gated_delta_block_has_a_cache_that_does_not_grow():
    block = HYBRID.blocks[0]
    # float32 state of 32 * 128 * 128, and 3 past inputs of the convolution's 8192 channels in bfloat16
    assert block.cache_bytes(10, 2) == block.cache_bytes(10_000, 2) == 4 * 32 * 128 * 128 + 2 * 3 * 8192


def test_adapters_take_twenty_bytes_an_element_with_adam():
    # float32: the parameter and two optimizer states, and two gradients during the update
    adam, plain = estimate(SMALL, RUN), estimate(SMALL, replace(RUN, optimizer_states=0))
    assert adam.adapters + adam.gradients == 20 * SMALL.lora_parameters(16)
    assert plain.adapters + plain.gradients == 12 * SMALL.lora_parameters(16)


def test_the_adapter_of_a_reference_is_one_more_copy():
    plain, kept = (estimate(SMALL, replace(RUN, has_reference_adapter=on)) for on in (False, True))
    assert kept.adapters - plain.adapters == 4 * SMALL.lora_parameters(16)


def head_bytes(model, run):
    """What the head takes where it is all that a pass takes: a block is next to nothing beside a large vocabulary."""
    return estimate(model, run).update_activations


LARGE_HEAD = ModelShape.from_config(
    {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "vocab_size": 1_000_000,
        "dtype": "float32",
        "tie_word_embeddings": True,
    }
)
# Bytes of a chunk's logits in float32, 32,000 a position: mx.get_peak_memory of score(with_gradient=True) and the
# gradient of a tiny Qwen3, its slope from chunks of 100 positions to 200, one row, MLX 0.32, CPU
MEASURED_HEAD = [(1, 6.42), (2, 11.99), (4, 14.36)]


@pytest.mark.parametrize(("chunks", "measured"), MEASURED_HEAD)
def test_the_head_is_within_10_percent_of_the_measured_slope(chunks, measured):
    run = RunShape(group_size=1, max_prompt_len=1, max_completion_len=100 * chunks, score_chunk=100, backend="cpu")
    assert head_bytes(LARGE_HEAD, run) / (4 * 1_000_000 * 100) == pytest.approx(measured, rel=0.1)


def test_chunks_of_the_head_are_those_of_the_backend():
    # 2**19, 2**25 and 2**22 logits, 16, 256 and 128 positions at least; of 2.3 chunks, on CUDA of one
    run = RunShape(group_size=1, max_prompt_len=1, max_completion_len=1000)
    positions = {backend: replace(run, backend=backend).head_positions(1_000_000) for backend in BACKENDS}
    assert positions == {"cpu": math.ceil(2.3 * 16), "cuda": 256, "metal": math.ceil(2.3 * 128)}
    assert replace(run, backend="cpu").head_positions(2**15) == math.ceil(2.3 * 16)
    assert replace(run, backend="cpu").head_positions(2**13) == math.ceil(2.3 * 64)
    # only answers are scored
    assert replace(run, max_completion_len=20).head_positions(2**13) == 20


def test_a_quantised_head_is_there_dequantised_on_cuda():
    packed, plain = (
        estimate(known(f"Qwen3-0.6B-{kind}"), replace(RUN, backend="cuda", group_size=1, max_completion_len=30))
        for kind in ("4bit", "bf16")
    )
    # 151,936 x 1,024 in bfloat16
    assert packed.update_activations - plain.update_activations == 2 * 151_936 * 1_024


def test_the_sequence_counts_turns_and_the_observations_between_them():
    run = RunShape(max_prompt_len=100, max_completion_len=50, max_turns=3, max_observation_len=20)
    assert run.sequence_length == 100 + 3 * 50 + 2 * 20


@given(
    prompt=st.integers(1, 999), action=st.integers(1, 999), observation=st.integers(0, 999), turns=st.integers(1, 20)
)
def test_a_transcript_is_the_prompt_the_actions_and_the_observations_between_them(prompt, action, observation, turns):
    run = RunShape(max_prompt_len=prompt, max_completion_len=action, max_turns=turns, max_observation_len=observation)
    assert run.sequence_length == prompt + turns * action + (turns - 1) * observation


def test_one_row_always_fits_a_micro_batch():
    assert replace(RUN, max_tokens_per_micro_batch=10).micro_batch_tokens == 512
    assert replace(RUN, max_tokens_per_micro_batch=1200).micro_batch_tokens == 1200
    assert replace(RUN, micro_batch_size=3).micro_batch_tokens == 3 * 512


def test_a_prompt_is_read_once_for_its_rows_where_that_saves_a_fifth():
    # 2 prompts of 500 and 8 rows of 100 more: 1,800 tokens instead of 4,800, at most 1,000 of them in one pass
    run = RunShape(groups_per_step=2, group_size=4, max_prompt_len=500, max_completion_len=100)
    whole, alone, shared = run.readings
    assert shared == (1800, 1000, 8 * 500)
    # prompts up to 0.2 * 8 / (0.8 * 8 - 2) = 4 / 11 of the rest are read with every row
    assert whole == (math.ceil(8 * (100 + 400 / 11)),) * 2 + (0,)
    assert alone == (2 * 600, 2 * 600, 0)
    assert run.micro_batch_tokens == 1800
    # 44 tokens are not enough for a rest of 200, but for one of 121
    short = replace(run, max_prompt_len=44, max_completion_len=200)
    assert short.readings == ((8 * 244, 8 * 244, 0), (2 * 244, 2 * 244, 0), (2 * 44 + 8 * 121, 8 * 121, 8 * 44))
    assert replace(run, shares_prompts=False).readings == ((8 * 600, 8 * 600, 0),)
    # a bound on rows may cut groups anywhere
    capped = replace(run, micro_batch_size=4)
    shared = math.ceil(0.8 * 4 * 600)
    assert capped.readings == ((4 * 600, 4 * 600, 0), (shared, shared, 4 * 500))
    # a budget of tokens may hold all 4 rows, which begin with copies of a prompt
    assert replace(capped, max_tokens_per_micro_batch=900).readings == ((900, 900, 0), (900, 900, 4 * 500))
    assert replace(run, micro_batch_size=1).readings == ((600, 600, 0),)
    # shorter rows may fill a budget, with whichever of the two passes
    assert replace(run, max_tokens_per_micro_batch=900).readings[-1] == (900, 900, 8 * 500)


def test_the_peak_is_the_sum_of_the_parts_with_the_larger_phase():
    e = estimate(SMALL, replace(RUN, has_merged_copy=True))
    update = e.gradients + e.update_activations + e.batch
    larger = max(e.kv_cache + e.rollout_activations, update)
    assert e.mlx_peak == e.weights + e.merged_copy + e.adapters + larger
    assert e.peak == e.mlx_peak + e.runtime


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_9b_model_stays_well_under_the_published_peaks_of_another_engine(backend):
    # that engine took 25.9 GB with 2 rows and 45.9 GB with 4, all rows in one backward pass, checkpointed, and 36 GB
    # with 2 rows of 128 tokens, not checkpointed
    model = HYBRID.on(backend)
    for group_size, completion, checkpointing, other in (
        (2, 512, True, 25.9),
        (4, 512, True, 45.9),
        (2, 31, False, 36.0),
    ):
        run = RunShape(
            group_size=group_size,
            max_prompt_len=97,
            max_completion_len=completion,
            gradient_checkpointing=checkpointing,
            backend=backend,
        )
        assert estimate(model, run).peak < other * GB


def test_the_small_model_stays_well_under_a_less_economical_engine():
    # that engine took 5.3 to 6.3 GB on a Mac
    run = RunShape(group_size=4, max_prompt_len=97, max_completion_len=256)
    assert estimate(SMALL, run).peak < 0.75 * 5.3 * GB


def test_what_is_extrapolated_is_named():
    def reasons(model, backend: Backend):
        return " ".join(estimate(model, replace(RUN, backend=backend)).extrapolated)

    unknown = ModelShape.from_config({**(known_config("Qwen3-0.6B") or {}), "model_type": "brandnew"})
    assert reasons(SMALL, "cpu") == reasons(HYBRID, "cpu") == ""
    assert "'brandnew' is unknown" in reasons(unknown, "cpu")
    assert "expert" in reasons(MIXTURE, "cpu")
    assert "other backends than metal" in reasons(SMALL, "metal")
    assert reasons(SMALL, "cuda") == reasons(HYBRID, "cuda") == ""


def test_16_bit_models_are_float32_on_the_cpu():
    plain = known("Qwen3-0.6B")
    assert plain.on("cpu").weight_bytes == 2 * plain.weight_bytes == 4 * plain.parameters
    assert plain.on("cuda") == plain.on("metal") == plain
    # scales and biases of packed weights too: 4 + 64 / 64 bits instead of 4 + 32 / 64
    assert SMALL.on("cpu").weight_bytes / SMALL.weight_bytes == pytest.approx(5 / 4.5, rel=0.01)
