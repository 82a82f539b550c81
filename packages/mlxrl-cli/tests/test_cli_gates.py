"""The gates as a user meets them: they pass on what is sound, and see what is not."""

import json
import math

import pytest

from mlxrl.cli import gates

from .command import cli, rows


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("qwen3", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]),
        ("qwen3_5", ["self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a"]),
    ],
)
def test_smoke_reports_shapes_and_passes(architecture, targets, tmp_path):
    output = cli("smoke", "--architecture", architecture, folder=tmp_path)
    for target in targets:
        assert target in output
    assert "in lora_a and lora_b" in output
    assert output.count("pass") == 5
    assert "FAIL" not in output


@pytest.mark.parametrize("command", ["equivalence", "phase2-equivalence"])
def test_equivalence_passes_under_both_names(command, tmp_path):
    output = cli(command, folder=tmp_path)
    assert "16 of 16" in output


@pytest.mark.parametrize(
    ("command", "measure"), [("equivalence", "_engine_difference"), ("smoke", "_sampler_difference")]
)
@pytest.mark.parametrize("broken", [None, 0, 1])
def test_a_gate_fails_where_one_row_differs_by_what_is_no_number(command, measure, broken, tmp_path, monkeypatch):
    place = iter(range(100))
    monkeypatch.setattr(gates, measure, lambda *_: math.nan if next(place) == broken else 0.0)
    cli(command, folder=tmp_path, expect=0 if broken is None else 1)
    assert next(place) > 1  # it measured several rows


def test_a_gate_that_fails_exits_with_1():
    with pytest.raises(SystemExit) as stopped:
        gates.finish([("one and one is three", 1 + 1 == 3, "it is 2")])
    assert stopped.value.code == 1


def test_gsm8k_trains_on_the_given_file_and_scores_its_answers(tmp_path):
    lines = [{"question": f"What is {n}+1?", "answer": f"Add one.\n#### {n + 1}"} for n in range(1, 9)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = cli("gsm8k", "--data", "gsm8k.jsonl", "--max-tokens", 8, "--tasks", 2, "--output", "run", folder=tmp_path)
    assert output.count("pass  ") == 3
    assert {row["task"].split(":")[0] for row in rows(tmp_path / "run/rollouts.jsonl")} == {"gsm8k.jsonl"}
