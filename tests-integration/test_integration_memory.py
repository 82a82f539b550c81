"""The memory model predicts what was measured, and DESIGN.md shows it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from mlxrl.cli.bench.memory import predicted_peaks

ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "tests-integration/results/memory.json").read_text())
ROWS = [(backend, row) for backend, report in RESULTS.items() for row in report["shapes"]]


@pytest.mark.parametrize(("backend", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value["name"])
def test_the_peak_is_predicted_within_15_percent(backend, row):
    predicted = predicted_peaks(row["config"], row["run"])
    assert row["run"]["backend"] == backend
    assert predicted["peak"] == pytest.approx(row["measured"]["peak"], rel=0.15)
    # the phase that is not the peak may be further off, but never by half
    for phase in ("rollout", "update"):
        assert predicted[phase] == pytest.approx(row["measured"][phase], rel=0.4)


def test_twelve_shapes_at_least_are_dense_and_hybrid_packed_and_not_checkpointed_and_not():
    assert len(ROWS) >= 12
    kinds = {
        (row["config"]["model_type"], "quantization" in row["config"], row["run"]["gradient_checkpointing"])
        for _, row in ROWS
    }
    assert len(kinds) == 2 * 2 * 2
    prompts = [row["run"]["max_prompt_len"] / row["run"]["max_completion_len"] for _, row in ROWS]
    assert min(prompts) < 0.5 < 2 < max(prompts)


def test_the_design_shows_the_results_file():
    path = ROOT / "tests-integration/memory.py"
    spec = importlib.util.spec_from_file_location("memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    design = (ROOT / "DESIGN.md").read_text()
    found = re.search(r"<!-- memory -->\n(.*?)\n<!-- /memory -->", design, flags=re.DOTALL)
    assert found is not None
    assert found[1] == module.table(RESULTS)
