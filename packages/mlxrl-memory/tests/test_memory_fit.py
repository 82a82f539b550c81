"""Proposals that make a run fit, the machine's memory, and the README."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.memory import ModelShape, RunShape, available_memory, estimate, fit, human_bytes, known_config
from mlxrl.memory.machine import cgroup_limit

from .shapes import CONFIGS, RUNS

GIB = 2**30
MODEL = ModelShape.from_config(known_config("mlx-community/Qwen3-0.6B-4bit") or {})
RUN = RunShape(
    group_size=8, groups_per_step=4, max_prompt_len=256, max_completion_len=768, gradient_checkpointing=False
)
ORDER = [
    "gradient_checkpointing", "max_tokens_per_micro_batch", "has_merged_copy", "kv_budget_bytes", "rollout_width",
    "group_size", "max_completion_len",
]  # fmt: skip


def test_a_run_that_fits_is_returned_as_it_is():
    peak = estimate(MODEL, RUN).peak
    result = fit(MODEL, RUN, peak)
    assert (result.fits, result.run, result.proposals, result.peak) == (True, RUN, (), peak)


def test_checkpointing_is_the_first_proposal_and_is_enough_when_it_is():
    checkpointed = replace(RUN, gradient_checkpointing=True)
    result = fit(MODEL, RUN, estimate(MODEL, checkpointed).peak)
    assert not result.fits
    assert result.run == checkpointed
    (only,) = result.proposals
    assert (only.field, only.old, only.new) == ("gradient_checkpointing", False, True)
    assert only.peak == estimate(MODEL, checkpointed).peak


def test_a_smaller_budget_cuts_micro_batches_before_it_touches_the_group():
    result = fit(MODEL, RUN, 8 * GIB)
    assert result.run is not None
    assert [p.field for p in result.proposals][:2] == ORDER[:2]
    assert (result.run.group_size, result.run.max_completion_len) == (8, 768)


def test_the_merged_copy_goes_before_rows_wait_and_rows_wait_before_the_rollout_narrows():
    # of long rows the caches are what is large: 32 rows of 8192 + 2048 tokens
    run = replace(RUN, max_prompt_len=2048, max_completion_len=8192, gradient_checkpointing=True, has_merged_copy=True)
    run = replace(run, max_tokens_per_micro_batch=run.sequence_length)
    peak = estimate(MODEL, run).peak
    (first,) = fit(MODEL, run, peak - MODEL.merged_copy_bytes).proposals
    assert (first.field, first.old, first.new) == ("has_merged_copy", True, False)
    assert first.peak == peak - MODEL.merged_copy_bytes
    # 32 rows of 10,240 positions of 114,688 bytes are 35 GiB; the next power of two is 32, and leaves room for the copy
    (second,) = fit(MODEL, run, first.peak - 1).proposals
    assert (second.field, second.old, second.new) == ("kv_budget_bytes", None, 32 * GIB)


def test_nothing_fits_a_budget_below_the_weights_and_the_smallest_shape_is_named():
    result = fit(MODEL, RUN, MODEL.weight_bytes)
    assert result.run is None
    assert result.smallest_peak > MODEL.weight_bytes
    assert human_bytes(result.smallest_peak) in result.reason


def test_the_group_keeps_its_size_where_the_completion_has_to_be_shorter_anyway():
    # rows go one at a time: a smaller group saves some bytes of the batch, but the longest row has to fit
    run = RunShape(max_prompt_len=64, max_completion_len=2000, group_size=4, groups_per_step=8, rollout_width=1)
    run = replace(run, max_tokens_per_micro_batch=1, shares_prompts=False)
    halves = replace(run, max_completion_len=1000)
    (only,) = fit(MODEL, run, estimate(MODEL, halves).peak).proposals
    assert (only.field, only.old, only.new) == ("max_completion_len", 2000, 1000)


def test_a_completion_shrinks_from_what_the_context_leaves():
    run = replace(RUN, max_completion_len=8192, max_context=1024)
    shorter = replace(run, max_completion_len=128, max_tokens_per_micro_batch=384, group_size=2, rollout_width=1)
    budget = estimate(MODEL, replace(shorter, gradient_checkpointing=True)).peak
    found = fit(MODEL, run, budget).run
    assert found is not None
    assert found.max_completion_len == 128


# what fit may turn a knob to at the least
LEAST = {"gradient_checkpointing": True, "has_merged_copy": False, "rollout_width": 1}


def smallest_of(run: RunShape) -> RunShape:
    run = replace(run, group_size=min(2, run.group_size), max_completion_len=min(32, run.max_completion_len), **LEAST)
    return replace(run, max_tokens_per_micro_batch=run.sequence_length)


@settings(max_examples=200, deadline=None)
@given(config=CONFIGS, run=RUNS, share=st.floats(0.05, 1.05))
def test_what_is_proposed_fits_and_is_needed(config, run, share):
    model = ModelShape.from_config(config).on(run.backend)
    budget = int(share * estimate(model, run).peak)
    result = fit(model, run, budget)
    assert result == fit(model, run, budget)
    least = estimate(model, smallest_of(run)).peak
    assert (result.run is None) == (least > budget)
    assert result.smallest_peak <= max(budget, least)
    shape = replace(run, **{p.field: p.new for p in result.proposals})
    assert estimate(model, shape).peak == result.smallest_peak
    for proposal in result.proposals:
        undone = [proposal.old]
        if proposal.field in ("max_tokens_per_micro_batch", "rollout_width", "group_size", "max_completion_len"):
            step = 2 * (proposal.new or 0) + 1  # no less than what was halved
            undone.append(step if proposal.old is None else min(step, proposal.old))
        for value in undone:
            assert estimate(model, replace(shape, **{proposal.field: value})).peak > max(budget, least)


def test_a_4_bit_model_is_advised_only_where_it_takes_less():
    config = dict(known_config("Qwen3-0.6B") or {})
    plain = ModelShape.from_config(config)
    assert "take a smaller or 4-bit model" in fit(plain, RUN, 1).reason
    assert "take a smaller model" in fit(MODEL, RUN, 1).reason  # it has 4 bits
    # one block of a wide vocabulary: on CUDA the head is there packed and dense
    head = ModelShape.from_config(config | {"num_hidden_layers": 1})
    assert "take a smaller model" in fit(head, replace(RUN, backend="cuda"), 1).reason


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(GIB // 2, 40 * GIB),
    checkpointing=st.booleans(),
    observation=st.integers(0, 300),
    merged=st.booleans(),
)
def test_applying_the_proposals_gives_the_run_and_its_peak(budget, checkpointing, observation, merged):
    run = replace(
        RUN,
        gradient_checkpointing=checkpointing,
        max_turns=2,
        max_observation_len=observation,
        has_merged_copy=merged,
    )
    result = fit(MODEL, run, budget)
    shape, peak = run, result.peak
    for proposal in result.proposals:
        assert getattr(shape, proposal.field) == proposal.old
        shape = replace(shape, **{proposal.field: proposal.new})
        peak = estimate(MODEL, shape).peak
        assert proposal.peak == peak
    assert [ORDER.index(p.field) for p in result.proposals] == sorted(ORDER.index(p.field) for p in result.proposals)
    assert result.smallest_peak == peak
    assert (result.run == shape and peak <= budget) or (result.run is None and peak > budget)


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(GIB // 2, 40 * GIB))
def test_more_budget_never_makes_a_run_stop_fitting(budget):
    if fit(MODEL, RUN, budget).run is not None:
        assert fit(MODEL, RUN, budget + GIB).run is not None


@pytest.mark.parametrize("budget", [0, -5, 1.5, True])
def test_a_budget_that_is_no_positive_number_is_refused(budget):
    with pytest.raises(ValueError, match=f"budget_bytes must be a whole number above 0, got {budget}"):
        fit(MODEL, RUN, budget)


def test_version_2_limits_are_read_up_to_the_root(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    (tmp_path / "mount/pod/box").mkdir(parents=True)
    (tmp_path / "mount/pod/box/memory.max").write_text("max\n")
    assert cgroup_limit(membership, tmp_path / "mount") is None
    (tmp_path / "mount/pod/memory.max").write_text("4096\n")
    assert cgroup_limit(membership, tmp_path / "mount") == 4096


def test_version_1_limits_are_read_under_the_memory_controller(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("7:cpu,cpuacct:/box\n5:memory:/box\n")
    (tmp_path / "memory/box").mkdir(parents=True)
    (tmp_path / "memory/box/memory.limit_in_bytes").write_text("8192\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit(membership, tmp_path) == 8192


def test_a_system_without_cgroups_has_no_limit(tmp_path):
    assert cgroup_limit(tmp_path / "absent", tmp_path) is None


def test_this_machine_has_between_100_mib_and_64_tib():
    assert 100 * 2**20 < available_memory() < 64 * 2**40


def test_bytes_are_written_in_the_unit_that_people_read():
    assert human_bytes(int(3.42 * GIB)) == "3.42 GiB"
    assert human_bytes(5 * 2**20) == "5.0 MiB"
    assert human_bytes(12 * 2**20) == "0.01 GiB"


def test_the_readme_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, {})
    assert "gradient_checkpointing: False -> True" in capsys.readouterr().out


def test_values_that_are_refused_are_left_out_and_the_next_knob_is_turned():
    def refusal(field, value):
        return f"{value} rows are too few" if field == "group_size" and value < 8 else None

    least = smallest_of(RUN)
    free = fit(MODEL, RUN, estimate(MODEL, least).peak)
    bound = fit(MODEL, replace(RUN, group_size=16), estimate(MODEL, replace(least, group_size=8)).peak, refusal)
    assert (free.run and free.run.group_size, bound.run and bound.run.group_size) == (2, 8)
    assert "max_completion_len" in [p.field for p in bound.proposals]
    # where nothing fits, what stays is named with the reason
    assert fit(MODEL, RUN, 1, refusal).reason.endswith("group_size stays, for 4 rows are too few.")
    assert "stays" not in fit(MODEL, RUN, 1).reason
