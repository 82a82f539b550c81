"""`bench memory`: what is predicted is what a process of its own measures."""

import json
import subprocess
import sys

import pytest

MAIN = [sys.executable, "-c", "from mlxrl.cli import main; main()", "bench", "memory"]


def bench_memory(*arguments):
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("shape", ["small 32-bit 2x8 160+16", "small-hybrid 4-bit 2x8 160+16 checkpointed"])
def test_a_peak_is_predicted_within_15_percent(shape, tmp_path):
    done = bench_memory("--shapes", shape, "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (row,) = report["shapes"]
    assert row["name"] == shape
    assert report["backend"] == row["run"]["backend"] == "cpu"
    assert row["measured"]["peak"] == max(row["measured"]["rollout"], row["measured"]["update"])
    assert row["ratio"]["peak"] == row["predicted"]["peak"] / row["measured"]["peak"] == pytest.approx(1, abs=0.15)
    assert all(word in done.stdout for word in shape.split())


def test_a_shape_that_is_not_there_is_one_message():
    done = bench_memory("--shapes", "huge")
    assert done.returncode == 2
    assert "--shapes must be part of the name of a shape, got huge; there are: small 32-bit" in done.stderr
