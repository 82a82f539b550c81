"""Whole runs of a tiny model: what they depend on, what they survive, what they write."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false

import math
import random
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.env import StopReason
from mlxrl.policy import shares_prefixes
from mlxrl.policy.gradient_caches import GradientCache
from mlxrl.train import ConfigError, NamedReward, Observer, RunError, make_config, open_session, train, train_step
from mlxrl.train.evaluation import has_full_marks as accurate

from .reading import lines

VOLATILE = ("time/", "tokens_per_second", "peak_memory_gb")


def steady(row):
    """A row without what differs between two runs of one config."""
    return {name: value for name, value in row.items() if not name.startswith(VOLATILE)}


def test_a_run_depends_on_its_config_and_seed_and_on_no_global_state(values, tmp_path):
    runs = {}
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        random.seed(name)
        np.random.seed(len(name))
        mx.random.seed(len(name))
        config = make_config(values(output=str(tmp_path / name), seed=seed, dropout=0.3))
        result = train(config)
        runs[name] = (
            [steady(row) for row in lines(tmp_path / name / "metrics.jsonl")],
            lines(tmp_path / name / "rollouts.jsonl"),
            (tmp_path / name / "adapters" / "adapters.safetensors").read_bytes(),
        )
        assert [steady(row) for row in result.metrics] == runs[name][0]
    assert runs["one"] == runs["two"]
    for ours, others in zip(runs["one"], runs["other"], strict=True):
        assert ours != others


def test_the_samples_of_a_group_differ_and_so_do_those_of_two_steps_on_one_task(values, tmp_path):
    one_task = tmp_path / "one.jsonl"
    one_task.write_text('{"prompt": "ab"}\n')
    train(make_config(values(data={"path": str(one_task)}, group_size=4, max_completion_len=8)))
    rows = lines(tmp_path / "run" / "rollouts.jsonl")
    texts = [row["turns"][0]["action"] for row in rows]
    assert len(rows) == 2 * 2 * 4  # steps, groups, samples: the same prompt twice in a step makes two groups
    assert sorted({row["group"] for row in rows}) == [0, 1, 2, 3]
    assert len(set(texts)) == len(texts)


def test_an_environment_that_fails_at_times_costs_its_rows_alone(rooms, project, tmp_path):
    train(make_config(rooms(env_name=f"{project / 'my_envs.py'}:failing", steps=3, groups_per_step=3)))
    metrics, rollouts, events = (
        lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "rollouts", "events")
    )
    for step in (1, 2, 3):
        failed = [row for row in rollouts if row["step"] == step and row["error"]]
        told = [event for event in events if event["step"] == step and event["event"] == "failed"]
        # of the samples 0, 1 and 2 of a task, one has (task + sample) % 3 == 0
        assert len(failed) == 3 == metrics[step - 1]["failed"]
        assert [row for e in told for row in e["rows"]] == [[row["group"], row["sample"]] for row in failed]
        assert [e["count"] for e in told] == [3]  # one line for one reason
        assert all(row["reward"] is None and row["stop_reason"] == "env_error" for row in failed)
        assert all("OSError: the door is stuck (my_envs.py, line 17)" in event["reason"] for event in told)
        assert metrics[step - 1]["skipped"] == 0
    # the others have their three turns
    assert all(len(row["turns"]) == 3 for row in rollouts if not row["error"])
    assert {len(row["turns"]) for row in rollouts if row["error"]} <= {1, 2, 3}


def test_a_policy_that_blows_up_stops_the_run_after_five_steps_with_what_to_do(values, tmp_path):
    config = make_config(values(steps=20, optimizer={"learning_rate": 1e38}, update={"max_grad_norm": 0}))
    with pytest.raises(RunError, match=r"policy or its gradient was not finite in 5 steps in a row; start a new run"):
        train(config)
    metrics, rollouts = (lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    # what is not finite is written as null
    broken = {row["step"] for row in rollouts if None in row["segments"][0]["sampler_logprobs"]}
    assert sorted(broken) == [row["step"] for row in metrics][-5:]
    assert metrics[0]["grad_norm"] > 0
    assert [row["nonfinite_samples"] for row in metrics][-5:] == [6] * 5
    why = [event["reason"] for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "skipped"]
    assert why[-5:] == ["6 trajectories have log-probs that are not finite"] * 5


def test_steps_with_a_gradient_that_is_not_finite_are_counted_until_a_finite_one(values, tmp_path, monkeypatch):
    # a reward of 1e100, if it were let through, has a finite advantage in float64 and an infinite one in float32
    monkeypatch.setattr("mlxrl.train.reward_calls.LARGEST_REWARD", 1e300)
    huge = tmp_path / "huge.py"
    huge.write_text("def huge(completions, **_):\n    return [1e100 * i for i, _ in enumerate(completions)]\n")
    fields = values(rewards=[{"name": f"{huge}:huge"}], steps=9, algorithm={"advantage": "centred"})
    with pytest.raises(RunError, match="not finite in 5 steps in a row"):
        train(make_config(fields))
    metrics, events = (lines(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "events"))
    assert [(row["grad_norm"], row["skipped"], row["nonfinite"]) for row in metrics] == [(None, 1, 1)] * 5
    assert [(row["step"], row["event"]) for row in events] == [(step, "skipped") for step in range(1, 6)]
    assert {row["reason"] for row in events} == {"the loss or its gradient is not finite"}


def test_a_finite_step_between_others_starts_the_count_again(values, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxrl.train.reward_calls.LARGEST_REWARD", 1e300)
    (tmp_path / "mostly.py").write_text(
        "calls = 0\n\n"
        "def huge(completions, **_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [(1.0 if calls == 5 else 1e100) * i for i, _ in enumerate(completions)]\n"
    )
    fields = values(rewards=[{"name": f"{tmp_path / 'mostly.py'}:huge"}], steps=9, algorithm={"advantage": "centred"})
    metrics = train(make_config(fields)).metrics
    assert [row["nonfinite"] for row in metrics] == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert [row["skipped"] for row in metrics] == [1, 1, 1, 1, 0, 1, 1, 1, 1]


@pytest.fixture
def count_passes():
    """count_passes(model) -> a list with an entry for every reading of a batch: no decoding, nor where rows go on."""

    def wrap(model):
        shares_prefixes(model)  # what is compared once a model is compared here
        passes = []
        trunk = model.model

        class Counting(type(trunk)):
            def __call__(self, inputs, cache=None, *args, **kwargs):
                if cache is None or (isinstance(cache[0], GradientCache) and cache[0].empty()):
                    passes.append(inputs.shape)
                return super().__call__(inputs, cache, *args, **kwargs)

        trunk.__class__ = Counting
        return passes

    return wrap


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        # of the old policy, of the reference, of the updates
        ({}, (0, 0, 1)),
        ({"kl_beta": 0.1}, (0, 1, 1)),
        ({"update": {"updates_per_batch": 3}}, (1, 0, 3)),
        ({"update": {"minibatches": 2}}, (1, 0, 2)),
        ({"kl_beta": 0.1, "algorithm": {"name": "rloo", "kl_placement": "reward"}}, (1, 1, 1)),  # both, for k1
        ({"update": {"max_tokens_per_micro_batch": 1}}, (0, 0, 6)),  # each of the six rows alone
        ({"micro_batch_size": 4}, (0, 0, 2)),
    ],
)
def test_a_step_runs_the_passes_it_needs_and_no_other(values, count_passes, fields, passes):
    session = open_session(make_config(values(**fields)))
    counted = count_passes(session.model)
    metrics = train_step(session, 0).metrics
    assert metrics["frac_reward_zero_std"] == 0
    assert len(counted) == sum(passes)
    assert tuple(metrics[f"forwards/{kind}"] for kind in ("old", "reference", "score")) == passes
    assert (metrics["scored_rows"], metrics["scored_share"]) == (
        6 * max(1, fields.get("update", {}).get("updates_per_batch", 1)),
        1,
    )
    updates = fields.get("update", {}).get("updates_per_batch", 1) * fields.get("update", {}).get("minibatches", 1)
    assert session.optimizer.step.item() == updates


@pytest.mark.parametrize(("every", "full_steps"), [(2, [0, 2, 4]), (3, [0, 3]), (1, [0, 1, 2, 3, 4]), (0, [])])
def test_rows_that_teach_nothing_are_scored_in_the_steps_that_score_all(
    values, count_passes, tmp_path, every, full_steps
):
    constant = tmp_path / "constant.py"
    constant.write_text("def same(completions, **_):\n    return [0.1 for _ in completions]\n")
    fields = values(
        rewards=[{"name": f"{constant}:same"}],
        logging={"full_score_every": every},
        update={"updates_per_batch": 2},
    )
    session = open_session(make_config(fields))
    passes = count_passes(session.model)
    for step in range(5):
        passes.clear()
        metrics = train_step(session, step).metrics
        full = step in full_steps
        assert (metrics["forwards/old"], metrics["forwards/score"]) == ((1, 2) if full else (0, 0))
        assert len(passes) == (3 if full else 0)
        assert (metrics["scored_rows"], metrics["scored_share"]) == ((12, 1) if full else (0, 0))
        assert (metrics["entropy"] > 0) if full else math.isnan(metrics["entropy"])
        assert metrics["skipped"] == 2


def test_every_pass_over_a_batch_takes_each_trajectory_once_in_another_split(values, count_passes):
    session = open_session(make_config(values(update={"updates_per_batch": 2, "minibatches": 3})))
    metrics, groups, _ = train_step(session, 0)
    assert metrics["scored_rows"] == 2 * len(groups.sampled)
    assert session.optimizer.step.item() == 6


def test_rewards_that_never_differ_train_nothing(values, tmp_path):
    constant = tmp_path / "constant.py"
    constant.write_text("def same(completions, **_):\n    return [0.1 for _ in completions]\n")
    result = train(make_config(values(rewards=[{"name": f"{constant}:same"}], kl_beta=0.0)))
    start = open_session(make_config(values())).model
    saved = mx.load(str(tmp_path / "run" / "adapters" / "adapters.safetensors"))
    for name, value in tree_flatten(start.trainable_parameters()):
        assert (saved[name] == value).all(), name
    assert [(row["skipped"], row["nonfinite"]) for row in result.metrics] == [(1.0, 0.0)] * 2
    events = [(row["event"], row["reason"]) for row in lines(tmp_path / "run" / "events.jsonl")]
    assert events == [("skipped", "no row had anything to teach")] * 2


def test_the_step_metrics_of_an_algorithm_and_the_loss_of_the_world_model_are_logged(rooms):
    fields = rooms(algorithm={"name": "gigpo"}, echo_alpha=0.1, steps=1)
    session = open_session(make_config(fields))
    metrics, groups, batch = train_step(session, 0)
    # the share of turns whose room another turn of the group was in too, counted again here
    states = [(t.group_id, turn.state_id) for t in groups.sampled for turn in t.turns]
    shared = [state for state in states if states.count(state) > 1]
    assert metrics["anchor_share"] == pytest.approx(len(shared) / len(states))
    assert metrics["anchor_group_size"] == pytest.approx(len(states) / len(set(states)))
    assert metrics["loss_echo"] > 0
    assert 0 <= metrics["echo_accuracy"] < 1
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.1 * metrics["loss_echo"], rel=1e-5)
    assert (np.array(batch.view.roles) == 2).any()


def test_the_sampler_and_the_scorer_agree_and_the_ratio_of_one_update_is_one(rooms):
    session = open_session(make_config(rooms(sampling={"temperature": 0.7}, kl_beta=0.1)))
    for step in range(3):
        metrics = train_step(session, step).metrics
        assert metrics["sampling_logp_difference/max"] < 1e-4
        assert (metrics["ratio"], metrics["clip_ratio"]) == (1.0, 0.0)
        assert (metrics["kl"] == 0) == (step == 0)


def test_the_constant_length_of_dr_grpo_counts_the_turns_of_the_environment(rooms):
    lengths = [
        open_session(make_config(rooms(algorithm={"name": "dr-grpo", **options}, **fields))).algorithm.max_tokens
        for options, fields in (({}, {}), ({}, {"max_turns": 2}), ({"drgrpo_max_tokens": 50}, {}))
    ]
    assert lengths == [3 * 4, 2 * 4, 50]


def test_evaluations_come_before_during_and_after_and_move_nothing(values, project, tmp_path):
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    seen = []

    class Watching(Observer):
        def on_start(self, session, folder, first_step):
            seen.append(("start", first_step))

        def on_evaluation(self, step, evaluation):
            seen.append(("evaluation", step))

        def on_step(self, metrics, trajectories):
            seen.append(("step", metrics["step"]))

        def on_end(self, result):
            seen.append(("end", len(result.metrics)))

    evaluated = train(make_config(values(data=data, steps=3, eval={"tasks": 5, "every": 2})), observer=Watching())
    plain = train(make_config(values(data=data, steps=3, output=str(tmp_path / "plain"))))
    assert seen == [
        ("start", 0), ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("evaluation", 3),
        ("end", 3),
    ]  # fmt: skip
    assert [steady(row) for row in evaluated.metrics] == [steady(row) for row in plain.metrics]
    rows = lines(tmp_path / "run" / "evaluations.jsonl")
    assert [(row["step"], row["tasks"], row["temperature"]) for row in rows] == [(0, 5, 0.0), (2, 5, 0.0), (3, 5, 0.0)]
    first = evaluated.evaluations[0][1]
    assert len(first.trajectories) == 5
    assert rows[0]["reward"] == pytest.approx(sum(t.reward for t in first.trajectories) / 5)
    assert rows[0]["mean_length"] == pytest.approx(sum(t.num_sampled for t in first.trajectories) / 5)
    assert not (tmp_path / "plain" / "evaluations.jsonl").exists()


def test_full_reward_is_what_counts_as_accurate(values, tmp_path, project):
    scores = tmp_path / "scores.py"
    scores.write_text(
        "def score(completions, answer, **_):\n    return [None if a == '3' else float(int(a) % 2) for a in answer]\n"
    )
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    rewards = [{"name": f"{scores}:score", "weight": 2.0}]
    result = train(make_config(values(data=data, rewards=rewards, steps=1, eval={"tasks": 6})))
    # answers 0 to 5: 1 and 5 earn 2, and 3, of which the function abstains, is left out
    outcome = result.evaluations[-1][1]
    assert (outcome.accuracy, outcome.reward, outcome.unscored) == (pytest.approx(2 / 5), pytest.approx(4 / 5), 1)


def test_accuracy_asks_for_the_full_mark_of_every_part_that_has_a_positive_weight_and_did_not_abstain(episode):
    def played(stop=StopReason.env_done, paid=(-0.2, 1.0), **parts):
        trajectory = episode(0, (2,) * len(paid), turn_rewards=paid)
        return replace(trajectory, stop_reason=stop, reward_parts={"environment": sum(paid), **parts}, reward=1.0)

    right, wrong = played(good=1.0, bad=1.0), played(good=0.5, bad=0.0)
    rewards = [NamedReward("good", 2.0, min), NamedReward("bad", -1.0, min)]
    assert [accurate(t, rewards) for t in (right, wrong)] == [True, False]  # whatever it is charged for
    assert accurate(played(good=1.0, bad=None), rewards)
    assert not accurate(played(good=None, bad=0.0), rewards)  # no part of it says that it is right
    shaped = [NamedReward("environment", 1.0), NamedReward("good", 0.5, min)]
    assert accurate(right, shaped)  # a return of 0.8 that ended in success
    assert accurate(played(good=None), shaped)
    assert not accurate(played(good=0.9), shaped)
    assert not accurate(played(paid=(1.0, 0.0), good=1.0), shaped)  # over without a last reward
    assert not accurate(played(StopReason.max_turns, paid=(0.0, 1.0), good=1.0), shaped)
    assert not accurate(played(StopReason.length, paid=(1.0,), good=1.0), shaped)


def test_accuracy_of_a_run_with_a_negative_weight_and_a_reward_that_abstains(values, tmp_path, project):
    scores = tmp_path / "scores.py"
    scores.write_text(
        "def right(answer, **_):\n    return [float(int(a) % 2) for a in answer]\n"
        "def fault(answer, **_):\n    return [1.0 for a in answer]\n"
        "def seldom(answer, **_):\n    return [1.0 if a == '1' else None for a in answer]\n"
    )
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    weights = {"right": 1.0, "fault": -0.5, "seldom": 1.0}
    rewards = [{"name": f"{scores}:{name}", "weight": weight} for name, weight in weights.items()]
    result = train(make_config(values(data=data, rewards=rewards, steps=1, eval={"tasks": 6})))
    assert result.evaluations[-1][1].accuracy == pytest.approx(3 / 6)


def test_memory_in_use_stays_flat_over_fifty_steps(values):
    fields = values(group_size=2, groups_per_step=1, max_completion_len=2, kl_beta=0.1)
    session = open_session(make_config(fields))
    used, peaks = [], []
    for step in range(50):
        peaks.append(train_step(session, step).metrics["peak_memory_gb"] * 2**30)
        used.append(mx.get_active_memory())
    assert session.optimizer.step.item() > 40
    # the adapter and its moments take some 30 kB; a step that left its gradients behind would add 10 kB
    assert max(used[10:]) - min(used[10:]) < 5_000
    # rows are of many lengths, so that peaks differ from step to step, but late ones are no higher than early ones
    assert max(peaks[-10:]) < 1.05 * max(peaks[:10])


def test_a_step_has_every_number_that_its_readers_know(values):
    metrics = train_step(open_session(make_config(values())), 0).metrics
    names = """step reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio entropy kl
        loss grad_norm lr clip_ratio sampling_logp_difference/mean sampling_logp_difference/max num_turns failed
        num_tokens tokens_per_second peak_memory_gb rollout/decode_forwards rollout/prefill_tokens
        rollout/peak_cache_gb rollout/merged rollout/mismatch
        scored_rows scored_share forwards/score forwards/old forwards/reference
        time/rollout time/reward time/score time/update time/step"""
    assert set(names.split()) <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def broken(completions, **_):\n    return [None for _ in completions]\n", "every reward function abstained"),
    ],
)
def test_a_run_in_which_nothing_is_ever_scored_stops_and_says_why(values, tmp_path, source, reason):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(RunError, match=f"no trajectory had a reward in 3 steps in a row; {reason}"):
        train(make_config(values(rewards=[{"name": f"{tmp_path / 'broken.py'}:broken"}], steps=9)))
    assert (tmp_path / "run" / "adapters").resolve().name == "step-000003"  # the policy is as good as before


def test_a_run_whose_every_episode_fails_stops_with_the_first_reason(rooms, tmp_path):
    (tmp_path / "stuck.py").write_text(
        "class Stuck:\n    max_turns = 2\n"
        "    def reset(self):\n        return 'hello'\n"
        "    def step(self, action):\n        raise OSError('the door is stuck')\n"
        "    def state_id(self, observation):\n        return observation\n\n"
        "def stuck(task, seed, index):\n    return Stuck()\n"
    )
    with pytest.raises(RunError, match=r"in 3 steps in a row; the first failed with: step .* the door is stuck"):
        train(make_config(rooms(env_name=f"{tmp_path / 'stuck.py'}:stuck", steps=9)))


def test_a_prompt_that_the_chat_template_refuses_is_named_before_anything_is_drawn(values, tiny, tmp_path):
    model = tmp_path / "picky"
    shutil.copytree(tiny, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}" + template)
    with pytest.raises(ConfigError, match=r"the prompt of task 'tasks\.jsonl:1' cannot be encoded .*no such role"):
        train(make_config(values(model_id=str(model))))
    assert not (tmp_path / "run").exists()
