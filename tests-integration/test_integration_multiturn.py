"""The figures for several turns in the README of mlxrl-cli are those of the results file, and say what it says."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "packages/mlxrl-cli/README.md").read_text()
MULTITURN = runpy.run_path(str(ROOT / "tests-integration/multiturn.py"))
RESULTS = json.loads(MULTITURN["RESULTS"].read_text())


@pytest.mark.parametrize("part", MULTITURN["TABLES"])
def test_the_tables_are_those_of_the_results_file(part):
    for table in MULTITURN["TABLES"][part]:
        name = table.__name__.removesuffix("_table")
        quoted = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, flags=re.DOTALL)
        assert quoted is not None
        assert quoted[1] == table(RESULTS[part])
    assert {row["seed"] for row in RESULTS[part]["runs"]} == set(MULTITURN["SEEDS"][part])


def test_gigpo_opens_doors_that_the_base_model_did_not():
    for row in RESULTS["key_door"]["runs"]:
        if row["omega"]:
            assert row["success_before"] <= 0.3
            assert row["success_after"] >= 0.85
            assert row["returns"][-1] > row["returns"][0]


def test_gigpo_and_episodes_alone_had_the_same_samples():
    runs = RESULTS["key_door"]["runs"]
    seeds = {omega: [row["seed"] for row in runs if row["omega"] == omega] for omega in (1.0, 0.0)}
    assert seeds[1.0] == seeds[0.0] == list(MULTITURN["SEEDS"]["key_door"])
    assert {len(row["returns"]) for row in runs} == {40 // MULTITURN["WINDOW"]}


def test_the_walk_whose_states_recur_is_learned_from_every_seed():
    for row in RESULTS["recurring"]["runs"]:
        first, last = MULTITURN["first_and_last_10"](row["returns"])
        assert last >= first + 0.3


def test_echo_predicts_held_out_observations_better_than_the_same_run_without():
    for row in RESULTS["echo"]["runs"]:
        assert row["with"]["nll"] <= row["without"]["nll"] - 0.2
        assert row["with"]["nll"] <= row["nll_before"] - 0.2
