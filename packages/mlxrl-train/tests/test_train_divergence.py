"""What is kept of a run whose policy breaks: the checkpoints from before, of which a message names the last sound."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import re

import pytest

from mlxrl.train import Observer, RunError, make_config, train


@pytest.fixture
def breaking(values, monkeypatch):
    """breaking(**fields) -> the config of a run that saves every step and whose fourth update breaks the policy."""
    monkeypatch.setattr("mlxrl.train.step.learning_rate", lambda section, step, steps: 0.01 if step < 3 else 1e38)
    fields = {"checkpoint": {"every": 1, "keep": 3}, "update": {"max_grad_norm": 0}}
    return lambda **more: make_config(values(**fields | more))


def saved(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())


def test_a_policy_that_broke_displaces_no_checkpoint_and_the_last_sound_one_is_named(breaking, tmp_path):
    sound = tmp_path / "run" / "checkpoints" / "step-000003"
    words = f"lower optimizer.learning_rate, from adapter = '{sound}', the last checkpoint known to be sound."
    with pytest.raises(RunError, match=f"not finite in 5 steps in a row; .* {re.escape(words)}"):
        train(breaking(steps=20))
    assert saved(tmp_path / "run") == [2, 3, 4]  # the update that broke it was itself finite
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 9
    again = train(breaking(steps=1, adapter=str(sound), output=str(tmp_path / "again")))
    assert again.metrics[0]["nonfinite_samples"] == 0


@pytest.mark.parametrize("name", ["rloo", "reinforce++", "gigpo"])
def test_a_policy_that_broke_is_told_where_its_kl_is_charged_in_the_reward(breaking, name):
    with pytest.raises(RunError, match="not finite in 5 steps in a row"):
        train(breaking(steps=20, kl_beta=0.05, algorithm={"name": name, "kl_placement": "reward"}))


def test_where_no_checkpoint_is_known_to_be_sound_none_is_named(breaking, tmp_path):
    with pytest.raises(RunError, match=r"start a new run with a lower optimizer\.learning_rate\.$"):
        train(breaking(steps=20, checkpoint={"every": 1, "keep": 1}))
    assert saved(tmp_path / "run") == [4]


def test_the_last_step_is_saved_whatever_it_was_and_displaces_none(breaking, tmp_path):
    warned = []

    class Hearing(Observer):
        def on_warning(self, reason):
            warned.append(reason)

    train(breaking(steps=6), observer=Hearing())
    sound = tmp_path / "run" / "checkpoints" / "step-000003"
    words = "the run ends with 2 steps that were not finite: its policy may be broken"
    assert warned == [f"{words}; {sound} is the last checkpoint known to be sound"]
    assert saved(tmp_path / "run") == [2, 3, 4, 6]
    assert (tmp_path / "run" / "adapters").resolve().name == "step-000006"


def test_a_checkpoint_that_is_due_in_a_broken_step_waits_for_a_finite_one(values, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxrl.train.reward_calls.LARGEST_REWARD", 1e300)
    (tmp_path / "once.py").write_text(
        "calls = 0\n\n"
        "def huge(completions, **_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [(1e100 if calls == 2 else 1.0) * i for i, _ in enumerate(completions)]\n"
    )
    rewards = [{"name": f"{tmp_path / 'once.py'}:huge"}]
    checkpoint = {"every": 2, "keep": 9}
    config = make_config(values(rewards=rewards, steps=5, checkpoint=checkpoint, algorithm={"advantage": "centred"}))
    assert [row["nonfinite"] for row in train(config).metrics] == [0, 1, 0, 0, 0]
    assert saved(tmp_path / "run") == [3, 4, 5]
