"""What rollouts sample from: measured without a trace, kept for the run, and given up where the copy drifts."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import json
import math
import random
import shutil
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import Observer, load_config, make_config, open_session, resume, train
from mlxrl.train.rollout_weights import choose_weights, watch_mismatch
from mlxrl.train.run_folder import RunState

VOLATILE = ("time/", "tokens_per_second", "peak_memory_gb")
AUTO, MERGED = {"weights": "auto"}, {"weights": "merged"}


def rows(path):
    """The rows of a file, without what differs from run to run."""
    if not path.exists():
        return []
    kept = [json.loads(line).items() for line in path.read_text().splitlines()]
    return [{name: value for name, value in row if not name.startswith(VOLATILE)} for row in kept]


def contents(folder) -> dict[str, Any]:
    """All that a run came to."""
    logs = {name: rows(folder / f"{name}.jsonl") for name in ("metrics", "rollouts", "evaluations", "events")}
    adapter = (folder / "adapters" / "adapters.safetensors").read_bytes()
    return logs | {"adapter": adapter, "state": json.loads((folder / "adapters" / "state.json").read_text())["state"]}


def events(folder):
    return [event for event in rows(folder / "events.jsonl") if event["event"] in ("rollout_weights", "mismatch")]


@pytest.fixture
def prefers(monkeypatch):
    """prefers("merged") -> from now on a measurement comes out like that, whatever it measures."""
    gains = {"merged": -math.inf, "shared": math.inf}
    return lambda weights: monkeypatch.setattr("mlxrl.train.rollout_weights.LEAST_GAIN", gains[weights])


@pytest.fixture
def strict(monkeypatch):
    """From now on any difference between sampler and policy is too much; float32 leaves one of about 1e-7."""
    monkeypatch.setattr("mlxrl.train.rollout_weights.MAX_MISMATCH", 0.0)


@pytest.mark.parametrize("longest", [5, 60])
def test_both_are_timed_and_the_choice_is_told_with_its_reason(values, longest):
    session = open_session(make_config(values(rollout=AUTO, max_completion_len=longest)))
    weights, reason, seconds = choose_weights(session)
    assert seconds.keys() == {"shared", "merged"}
    assert all(0 < time < 60 for time in seconds.values())
    saved = 1 - seconds["merged"] / seconds["shared"]
    assert weights == ("merged" if saved > 0.1 else "shared")
    assert reason == f"a rollout from the merged copy takes {abs(saved):.0%} {'less' if saved > 0 else 'more'} time"


COUNTED = """
made, acted = [], []


class Counted:
    max_turns = 3

    def reset(self):
        return "go"

    def step(self, action):
        acted.append(action)

    def state_id(self, observation):
        return observation


def counted(task, seed, index):
    made.append((task, seed, index))
    return Counted()
"""


def test_measuring_leaves_no_trace(rooms, tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    session = open_session(make_config(rooms(env_name=f"{tmp_path / 'counted.py'}:counted", rollout=AUTO)))
    suite, drawn = session.curriculum.suite, [group.id for group in session.loader.peek(5)]
    counted = type(suite.make(session.curriculum.train[0], 0, 0)).step.__globals__
    counted["made"].clear()

    def state():
        adapter: Any = dict(tree_flatten(session.model.parameters()))
        drawn_from: Any = mx.random.state
        return {name: id(value) for name, value in adapter.items()}, [key.tolist() for key in drawn_from]

    before = state(), random.getstate()
    assert choose_weights(session).seconds
    assert (state(), random.getstate()) == before
    assert session.loader.position == 0
    assert [group.id for group in session.loader.next(5)] == drawn
    # 2 groups of 3 samples, each built once
    assert len(counted["made"]) == len(set(counted["made"])) == 6
    assert counted["acted"] == []


@pytest.mark.parametrize("weights", ["shared", "merged"])
def test_a_run_that_chose_is_the_run_that_was_told(values, prefers, project, tmp_path, weights):
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    fields = {"data": data, "eval": {"tasks": 3, "temperature": 1.0}, "steps": 2}
    prefers(weights)
    train(make_config(values(rollout=AUTO, **fields)))
    train(make_config(values(rollout={"weights": weights}, output=str(tmp_path / "told"), **fields)))
    chose, told = contents(tmp_path / "run"), contents(tmp_path / "told")
    (choice,) = chose["events"]
    assert (choice["step"], choice["event"], choice["weights"]) == (0, "rollout_weights", weights)
    assert chose["state"] == told["state"] | {"rollout_weights": weights}
    for name in ("metrics", "rollouts", "evaluations", "adapter"):
        assert chose[name] == told[name], name
    assert [row["rollout/merged"] for row in chose["metrics"]] == 2 * [float(weights == "merged")]


def test_a_choice_outlives_the_process_that_measured(values, prefers, tmp_path):
    prefers("merged")
    train(make_config(values(rollout=AUTO, steps=3, checkpoint={"every": 1}, max_observation_len=5)))
    whole = contents(tmp_path / "run")
    assert [event["event"] for event in whole["events"]] == ["rollout_weights", "inactive"]
    prefers("shared")  # what another measurement would say
    for step in (0, 1):
        folder = tmp_path / f"broken-{step}"
        shutil.copytree(tmp_path / "run", folder, symlinks=True)
        for saved in folder.glob("checkpoints/step-*"):
            if int(saved.name[5:]) > step:
                shutil.rmtree(saved)
        resume(folder)
        assert contents(folder) == whole, step


def test_a_copy_that_does_not_fit_is_neither_made_nor_measured(values, tmp_path):
    train(make_config(values(rollout=AUTO)), available_bytes=2**20)
    (choice,) = events(tmp_path / "run")
    assert (choice["weights"], choice["seconds"]) == ("shared", {})
    assert choice["reason"] == "a merged copy does not fit into the memory that was planned with"


def test_environments_that_cannot_be_opened_are_not_measured(rooms, tmp_path):
    (tmp_path / "stuck.py").write_text(COUNTED.replace('return "go"', "raise OSError"))
    session = open_session(make_config(rooms(env_name=f"{tmp_path / 'stuck.py'}:counted", rollout=AUTO)))
    choice = choose_weights(session)
    assert (choice.weights, choice.seconds) == ("shared", {})
    assert choice.reason.startswith("every environment of the first step failed")


def test_a_run_that_chose_the_copy_leaves_it_when_it_drifts(values, prefers, strict, tmp_path):
    prefers("merged")
    watched = []

    class Watching(Observer):
        def on_start(self, session, folder, first_step):
            watched.append(session.engine)

    fields = values(rollout=AUTO, steps=3, checkpoint={"every": 1})
    train(make_config(fields), observer=Watching())
    whole = contents(tmp_path / "run")
    first, second = events(tmp_path / "run")
    assert (first["step"], first["weights"], second["step"], second["weights"]) == (0, "merged", 1, "shared")
    mismatch = whole["metrics"][0]["rollout/mismatch"]
    assert 0 < mismatch < 1e-5
    assert second["reason"].endswith(f"differ from the policy's by {mismatch:.3g} on average, more than 0.0")
    assert [row["rollout/merged"] for row in whole["metrics"]] == [1.0, 0.0, 0.0]
    assert watched[0].weights == "shared"
    for step in (1, 2):  # what was given up stays so
        folder = tmp_path / f"broken-{step}"
        shutil.copytree(tmp_path / "run", folder, symlinks=True)
        for saved in folder.glob("checkpoints/step-*"):
            if int(saved.name[5:]) > step:
                shutil.rmtree(saved)
        resume(folder)
        assert contents(folder) == whole, step


def test_a_run_that_was_told_to_use_the_copy_goes_on_and_says_so_once(values, strict, tmp_path):
    train(make_config(values(rollout=MERGED, steps=3, checkpoint={"every": 1})))
    (event,) = events(tmp_path / "run")
    assert (event["step"], event["event"]) == (1, "mismatch")
    assert event["reason"].endswith("; set rollout.weights = 'shared' to sample from the policy itself")
    assert [row["rollout/merged"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1.0, 1.0, 1.0]
    resume(tmp_path / "run", {"steps": 4})
    assert len(events(tmp_path / "run")) == 1


def test_only_what_the_weights_may_have_caused_is_judged(values):
    def events_of(*mismatches, **fields):
        session = open_session(make_config(values(**{"rollout": MERGED} | fields)))
        state, found = RunState(), []
        for state.step, mismatch in enumerate(mismatches, start=1):
            metrics = {"rollout/mismatch": mismatch or 0.0, "scored_rows": float(mismatch is not None)}
            found += watch_mismatch(session, state, metrics)
        return [event["step"] for event in found]

    # 0.1 is still the policy; what comes back after a good step is told again; NaN is no policy
    assert events_of(0.1, 0.11, 0.2, 0.01, 0.11, math.nan) == [2, 5]
    assert events_of(math.nan) == [1]
    assert events_of(0.2, None, 0.2) == [1]  # a step in which nothing was scored says nothing
    assert events_of(1.0, rollout={}) == []
    assert events_of(1.0, sampling={"top_k": 2}) == []
    assert events_of(1.0, dropout=0.1) == []


def test_the_first_of_several_updates_is_judged(values):
    # later ones have moved on from the policy that sampled, by design
    fields = values(rollout=MERGED, steps=1, update={"updates_per_batch": 3}, optimizer={"learning_rate": 0.1})
    (metrics,) = train(make_config(fields)).metrics
    assert metrics["rollout/mismatch"] < 1e-4 < metrics["sampling_logp_difference/mean"]


def test_a_share_that_teaches_nothing_is_not_what_is_judged(values, tmp_path):
    (tmp_path / "one.py").write_text("def one(completions, **_):\n    return [1.0] + [0.0] * (len(completions) - 1)\n")
    fields = {"rollout": MERGED, "steps": 4, "group_size": 2, "groups_per_step": 4, "update": {"minibatches": 4}}
    fields |= {"rewards": [{"name": f"{tmp_path / 'one.py'}:one"}], "logging": {"full_score_every": 0}}
    # of 8 rows the 2 of one group teach something, and the first of four shares has neither in half of the steps
    assert all(0 < row["rollout/mismatch"] < 1e-4 for row in train(make_config(values(**fields))).metrics)
    assert events(tmp_path / "run") == []


def test_of_a_model_whose_memory_is_not_counted_no_copy_is_made(values, tmp_path):
    model = make_tiny_model(tmp_path / "mixed", conv_window=4)
    train(make_config(values(model_id=str(model), rollout=AUTO, steps=1)))
    (choice,) = events(tmp_path / "run")
    assert choice["weights"] == "shared"
    assert choice["reason"] == "whether a merged copy fits into the memory cannot be predicted for this model"


def test_evaluations_of_a_run_draw_as_they_are_told_on_the_engine_of_the_run(values, project):
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    fields = values(data=data, eval={"tasks": 3, "temperature": 0.5}, sampling={"top_k": 7}, rollout={"stop": ["."]})
    session = open_session(load_config(None, fields))
    ours, theirs = session.engine.sampling, session.eval_sampling
    assert (theirs.temperature, theirs.top_k, theirs.stop, theirs.max_tokens) == (0.5, 7, (".",), ours.max_tokens)
    assert ours.temperature == 1.0
