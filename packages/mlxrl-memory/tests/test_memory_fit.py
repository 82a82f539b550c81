"""Proposals that make a run fit, the machine's memory, and the README."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrl.memory import ModelShape, RunShape, available_memory, estimate, fit, human_bytes, known_config
from mlxrl.memory.machine import cgroup_limit

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
    _, second = fit(MODEL, run, first.peak - 1).proposals
    # 32 rows of 10,240 positions of 114,688 bytes are 35 GiB; the next power of two is 32
    assert (second.field, second.old, second.new) == ("kv_budget_bytes", None, 32 * GIB)


def test_nothing_fits_a_budget_below_the_weights_and_the_smallest_shape_is_named():
    result = fit(MODEL, RUN, MODEL.weight_bytes)
    assert result.run is None
    assert result.smallest_peak > MODEL.weight_bytes
    assert human_bytes(result.smallest_peak) in result.reason


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


def test_the_readme_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, {})
    assert "gradient_checkpointing: False -> True" in capsys.readouterr().out
