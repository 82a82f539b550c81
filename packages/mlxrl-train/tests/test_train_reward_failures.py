"""Whole runs whose rewards fail, in some rows or in all."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false

import sys
import tomllib

import numpy as np
import pytest

from mlxrl.train import RewardError, RunError, make_config, train

from .reading import lines

MISHAPS = """
import math
import time

calls = []


def mishaps(trajectories, **_):
    # by the sample of a group: raises, NaN, abstains, and three rewards
    calls.append(len(trajectories))
    if any(t.sample_index == 0 for t in trajectories):
        raise KeyError("answer")
    return [[None, math.nan, None, 0.1, 0.5, 0.9][t.sample_index] for t in trajectories]


def sleeps(trajectories, **_):
    if any(t.sample_index == 1 for t in trajectories):
        time.sleep(3600)
    return [float(t.sample_index) for t in trajectories]


def short(trajectories, **_):
    return [1.0]


def late(completions, **_):
    calls.append(1)
    if len(calls) > 2:
        raise KeyError("answer")
    return [float(len(c)) for c in completions]


def nested(completion_ids, **_):
    return [[float(len(ids))] for ids in completion_ids]
"""


@pytest.fixture
def mishaps(tmp_path):
    """mishaps(name, **fields of the reward) -> the reward of that name of a file of functions that break."""
    (tmp_path / "mishaps.py").write_text(MISHAPS)
    return lambda name, **fields: {"name": f"{tmp_path / 'mishaps.py'}:{name}"} | fields


def test_a_reward_that_fails_on_some_rows_costs_those_rows_alone(values, tmp_path, mishaps):
    rewards = [mishaps("mishaps"), {"name": "length", "options": {"target": 4}, "weight": 0.0}]
    result = train(make_config(values(rewards=rewards, group_size=6, steps=3)))
    name = rewards[0]["name"]
    rollouts, events = (lines(tmp_path / "run" / f"{file}.jsonl") for file in ("rollouts", "events"))
    for row in result.metrics:
        # two groups: each time the samples 0 and 1 fail
        assert (row["failed"], row[f"rewards/{name}/failed"], row["rewards/length/failed"]) == (4, 4, 0)
        assert row[f"rewards/{name}/mean"] == pytest.approx(0.5)  # of 0.1, 0.5 and 0.9
        assert (row["skipped"], row["nonfinite"]) == (0, 0)
        assert row["grad_norm"] > 0
    for step in (1, 2, 3):
        raised, nan = (event for event in events if event["step"] == step)
        groups = sorted({row["group"] for row in rollouts if row["step"] == step})
        assert (raised["event"], raised["reward"], raised["rows"]) == ("reward", name, [[g, 0] for g in groups])
        assert raised["reason"] == "raised KeyError: 'answer' (mishaps.py, line 12)"
        assert (nan["event"], nan["reward"], nan["rows"]) == ("reward", name, [[g, 1] for g in groups])
        assert "got nan" in nan["reason"]
    for row in rollouts:
        failed = row["sample"] in (0, 1)
        assert (row["error"] is not None) == failed
        assert (row["reward"] is None) == failed


def test_rows_that_a_reward_fails_on_or_abstains_from_are_in_no_baseline(values, tmp_path, mishaps):
    config = make_config(values(rewards=[mishaps("mishaps")], group_size=6, steps=1, output=str(tmp_path / "run.npz")))
    train(config)
    batch = np.load(tmp_path / "run.npz")
    # of the samples of each group, 0 raises, 1 gives NaN and 2 abstains; the others are a group of three, whose rewards
    # 0.1, 0.5 and 0.9 have the deviation 0.4 * sqrt(2 / 3): one deviates by sqrt(3 / 2) of it
    rows = np.array([weights.any() for weights in batch["weights"]])
    np.testing.assert_array_equal(rows, [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3)
    np.testing.assert_allclose(batch["advantages"][rows][:, 0], [-(1.5**0.5), 0, 1.5**0.5] * 2, rtol=1e-5, atol=1e-6)
    assert not batch["advantages"][~rows].any()


def test_a_reward_that_hangs_on_a_row_of_each_group_does_not_stop_the_run(values, tmp_path, mishaps):
    result = train(make_config(values(rewards=[mishaps("sleeps", timeout=0.2)])))
    assert [row["failed"] for row in result.metrics] == [2, 2]
    assert {event["reason"] for event in lines(tmp_path / "run" / "events.jsonl")} == {"took longer than 0.2 s"}


@pytest.mark.parametrize(
    ("name", "reason", "last"),
    [
        ("short", r"must return a list of 6 rewards, got 1", 3),
        ("late", r"raised KeyError: 'answer' \(mishaps\.py, line [0-9]+\)", 5),
        ("nested", r"must return numbers .* got a list, for example \[[0-9]\.0\]", 3),
    ],
)
def test_a_reward_that_fails_on_every_row_of_three_steps_ends_the_run(values, tmp_path, mishaps, name, reason, last):
    # beside one that never fails: the run would otherwise end as one without any reward
    rewards = [{"name": "length", "options": {"target": 4}}, mishaps(name)]
    with pytest.raises(RewardError, match=f":{name}' failed on every row in 3 steps in a row; it {reason}; mend it"):
        train(make_config(values(rewards=rewards, steps=9)))
    metrics, events = (lines(tmp_path / "run" / f"{file}.jsonl") for file in ("metrics", "events"))
    told = [event for event in events if event["event"] == "reward"]
    assert [(event["step"], event["count"]) for event in told] == [(step, 6) for step in range(last - 2, last + 1)]
    assert len({event["reason"] for event in told}) == 1
    assert [row[f"rewards/{rewards[1]['name']}/failed"] for row in metrics] == [0] * (last - 3) + [6] * 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{last:06d}"]


def test_a_run_that_a_reward_ended_goes_on_once_it_is_mended(values, tmp_path):
    source = tmp_path / "mended.py"
    source.write_text("def mine(completions):\n    return [1.0]\n")
    config = make_config(values(rewards=[{"name": f"{source}:mine"}], steps=5))
    for steps in (3, 4):
        with pytest.raises(RewardError, match=f"failed on every row in {steps} steps in a row"):
            train(config, resume=steps > 3)
    sys.modules.pop(next(name for name in sys.modules if name.startswith("mlxrl_user_mended_")))
    source.write_text("def mine(completions):\n    return [float(len(text)) for text in completions]\n")
    (row,) = train(config, resume=True).metrics
    assert (row["step"], row["failed"]) == (5, 0)


def test_a_run_that_a_reward_ended_says_so_where_every_episode_fails_afterwards(rooms, tmp_path):
    source = tmp_path / "mended.py"
    source.write_text("def mine(completions):\n    return [1.0]\n")
    (tmp_path / "door.py").write_text(
        "from pathlib import Path\nfrom mlxrl.env import StepResult\n\n"
        "class Door:\n    max_turns = 2\n"
        "    def reset(self):\n        return 'hello'\n"
        "    def step(self, action):\n"
        f"        if Path({str(tmp_path / 'stuck')!r}).exists():\n            raise OSError\n"
        "        return StepResult('', 1.0, terminated=True)\n"
        "    def state_id(self, observation):\n        return observation\n\n"
        "def door(task, seed, index):\n    return Door()\n"
    )
    config = make_config(rooms(env_name=f"{tmp_path / 'door.py'}:door", rewards=[{"name": f"{source}:mine"}], steps=4))
    with pytest.raises(RewardError, match="failed on every row in 3 steps in a row"):
        train(config)
    (tmp_path / "stuck").touch()
    with pytest.raises(RunError, match="no trajectory had a reward in 4 steps in a row; the first failed with"):
        train(config, resume=True)


def test_a_reward_that_scores_in_one_of_several_ways_says_in_which(values, tmp_path):
    train(make_config(values(rewards=[{"name": "math", "options": {"comparison": "as-written"}}], steps=1)))
    told, *_ = lines(tmp_path / "run" / "events.jsonl")
    assert told == {"step": 0, "event": "scored_by", "reward": "math", "reason": "answers as they are written"}


def test_the_rewards_that_are_shipped_run_by_their_names_with_options_from_a_file(values, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "ab", "answer": "B", "tests": ["assert True"]}\n')
    (tmp_path / "rewards.toml").write_text("""
        [[rewards]]
        name = "choice"
        [[rewards]]
        name = "contains"
        options = {texts = ["a", "b"]}
        [[rewards]]
        name = "contains"
        options = {ignore_case = true}
        [[rewards]]
        name = "json_schema"
        options = {schema = {type = ["object", "array"], required = ["a"]}}
        [[rewards]]
        name = "code-tests"
        options = {seconds = 60.0}
        [[rewards]]
        name = "length"
        options = {target = 3}
    """)
    fields = values(data={"path": str(tmp_path / "tasks.jsonl")}, steps=1)
    rewards = tomllib.loads((tmp_path / "rewards.toml").read_text())["rewards"]
    (row,) = train(make_config(fields | {"rewards": rewards})).metrics
    names = ["choice", "contains", "contains#2", "json_schema", "code-tests", "length"]
    assert [row[f"rewards/{name}/failed"] for name in names] == [0] * 6
    rollouts = lines(tmp_path / "run" / "rollouts.jsonl")
    assert [list(each["rewards"]) for each in rollouts] == [names] * 6
    for each in rollouts:
        # sampled tokens have roles of 1
        sampled = sum(role == 1 for role in each["segments"][0]["roles"])
        assert each["rewards"]["length"] == pytest.approx(max(0.0, 1 - abs(sampled - 3) / 3))
        assert each["reward"] == pytest.approx(sum(each["rewards"].values()))


def test_failures_of_an_evaluation_are_told(values, project, tmp_path, mishaps):
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    fields = values(data=data, rewards=[mishaps("mishaps")], group_size=6, steps=1, eval={"tasks": 3})
    train(make_config(fields))
    evaluations, events = (lines(tmp_path / "run" / f"{name}.jsonl") for name in ("evaluations", "events"))
    # each is sample 0 of its task
    assert [(row["failed"], row["unscored"], row["reward"]) for row in evaluations] == [(3, 3, None)] * 2
    told = [event for event in events if event.get("evaluation")]
    assert [(event["step"], event["rows"]) for event in told] == [(step, [[0, 0], [1, 0], [2, 0]]) for step in (0, 1)]
