"""The commands as a user meets them: what is printed, the exit code, what lies on disk."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest

from mlxrl.cli.configs import example_names, example_text
from mlxrl.cli.embedded import embedded_model_path
from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import ConfigError, load_config, make_config

from .command import PROGRAM, TINY, cli, rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run of the embedded default in it, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, cli("train", "--steps", 2, "--output", "run", "--set", "checkpoint.every=1", *TINY, folder=folder)


def test_train_without_a_config_trains_the_embedded_model_and_says_so(trained):
    folder, output = trained
    assert "model    embedded: qwen3" in output
    assert "held-out accuracy before training" in output
    assert "step    1/2" in output
    assert "step    2/2" in output
    assert "held-out accuracy after step 2" in output
    assert [row["step"] for row in rows(folder / "run/metrics.jsonl")] == [1, 2]
    # 2 steps of 2 groups of 4 samples
    assert len(rows(folder / "run/rollouts.jsonl")) == 16


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path):
    arguments = ["train", "--steps", "30", "--output", "my run", "--set", "checkpoint.every=1", *TINY]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as run:
        assert run.stdout is not None
        assert any(line.startswith("step    2") for line in run.stdout)
        run.send_signal(signal.SIGINT)
        shown, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    command = shlex.split(shown.partition("stopped; to go on: ")[2])
    assert command == ["mlxrl-cli", "train", "--resume", "--output", str(tmp_path / "my run")]
    assert len(rows(tmp_path / "my run/metrics.jsonl")) < 30
    assert "step   30/30" in cli(*command[1:], folder=tmp_path)


def test_the_resolved_config_is_on_disk_and_loads_again(trained):
    folder, _ = trained
    written = load_config(folder / "run/config.toml")
    assert (written.steps, written.group_size, written.groups_per_step) == (2, 4, 2)


def test_stock_mlx_lm_answers_greedily_as_the_policy_does(trained):
    # eval of the run plays greedy completions of the policy in process; stock mlx-lm must give the same tokens
    folder, _ = trained
    stock, tokenizer, *_ = mlx_lm.load(str(embedded_model_path()), adapter_path=str(folder / "run/adapters"))
    from mlxrl.policy import LoRAConfig, load_adapter, load_policy_with_lora
    from mlxrl.rollout import SamplingConfig, generate_groups

    policy, _, _ = load_policy_with_lora(embedded_model_path(), LoRAConfig(rank=8))
    load_adapter(policy, folder / "run/adapters")
    questions = ["What is 7+5+8+3?", "What is 1+2+3?", "What is 9+9+9+9+9?"]
    sampling = SamplingConfig(temperature=0, max_tokens=24)
    ours = generate_groups(model=policy, tokenizer=tokenizer, prompts=questions, group_size=1, sampling=sampling)
    prompt = []
    for question, trajectory in zip(questions, ours, strict=True):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        stream = mlx_lm.stream_generate(stock, tokenizer, prompt, max_tokens=24)
        assert [response.token for response in stream] == trajectory.completion_ids
    logits = [model(mx.array([prompt])) for model in (stock, policy)]
    assert mx.allclose(*logits, atol=1e-5)


def test_resume_goes_on_from_the_newest_checkpoint_with_the_same_numbers(trained):
    folder, _ = trained
    unbroken = rows(folder / "run/metrics.jsonl")
    shutil.rmtree(folder / "run/checkpoints/step-000002")
    output = cli("train", "--resume", "--output", "run", folder=folder)
    assert "resumed from step 1" in output
    resumed = rows(folder / "run/metrics.jsonl")
    assert [row["step"] for row in resumed] == [1, 2]
    assert [row["loss"] for row in resumed] == [row["loss"] for row in unbroken]


def test_eval_compares_base_and_trained(trained):
    folder, _ = trained
    base, after = cli("eval", "run", "--tasks", 4, folder=folder).splitlines()
    assert base.startswith("base     accuracy 0.")
    assert after.startswith("trained  accuracy ")


def test_eval_says_of_how_many_tasks_it_does_not_tell_and_why(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completions, answer):\n"
        "    return [ValueError('no such sum') if a == 'x' else None if a == 'y' else 1.0 for a in answer]\n"
    )
    tasks = [{"prompt": f"What is 2+{i}?", "answer": answer} for i, answer in enumerate("1xxy2")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    settings = ["env_name=jsonl", "data.path=tasks.jsonl", "data.eval_path=tasks.jsonl", "eval.tasks=5"]
    settings += ['rewards=[{name="mine.py:mine"}]', "environment={}"]
    options = [part for setting in settings for part in ("--set", setting)]
    output = cli("train", "--steps", 1, "--output", "run", *TINY, *options, folder=tmp_path)
    left_out = "5 tasks, 3 of them without a reward and left out"
    assert "held-out accuracy before training: 1.000  (reward 1.000, " in output
    assert output.count(left_out) == 2
    told = rows(tmp_path / "run/evaluations.jsonl")
    assert [(row["accuracy"], row["failed"], row["unscored"]) for row in told] == [(1.0, 2, 3)] * 2
    printed = cli("eval", "run", "--tasks", 5, folder=tmp_path).splitlines()
    assert [left_out in line for line in printed] == [True, True]


def test_a_run_is_not_overwritten_unless_forced(trained, tmp_path):
    folder, _ = trained
    message = cli("train", "--steps", 1, "--output", "run", *TINY, folder=folder, expect=2)
    assert "run exists; go on with --resume, replace it with --force, or choose another output" in message


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(tmp_path):
    measured = ("time/", "tokens_per_second", "peak_memory_gb")
    runs = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        cli("train", "--steps", 2, "--seed", seed, "--output", name, *TINY, folder=tmp_path)
        metrics = rows(tmp_path / name / "metrics.jsonl")
        runs.append([{k: v for k, v in row.items() if not k.startswith(measured)} for row in metrics])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


BAD = [
    (["--set", "groupsize=4"], ["groupsize", "unknown key", "group_size"]),
    (["--set", "optimizer.learning_rate=nan"], ["optimizer.learning_rate", "finite", "nan"]),
    (["--set", 'group_size="4"'], ["group_size", "integer", "'4'"]),
    (["--set", "steps=2.5"], ["steps", "integer", "2.5"]),
    (["--config", "missing.toml"], ["missing.toml", "does not exist", "init"]),
    (["--config", "broken.toml"], ["broken.toml", "not valid TOML"]),
    (["--model", "no/such/folder"], ["model_id", "no/such/folder", "no folder"]),
    (["--model", "nobody/nothing"], ["model_id", "nobody/nothing", "hub"]),
    (["--algorithm", "rloo", "--group-size", "1"], ["group_size = 1", "rloo", "2"]),
    (["--algorithm", "ppo"], ["algorithm", "'ppo'", "grpo"]),
    (["--set", "env_name=arithmetics"], ["env_name", "arithmetics", "arithmetic"]),
    (["--set", "environment.terms=[5, 3]"], ["env_name", "terms"]),
    (["--group-size", "1"], ["group_size = 1", "grpo", "0"]),
    (["--set", "sampling.temperature=1e40"], ["sampling.temperature", "100", "1e+40"]),
    (["--seed", str(2**63)], ["seed", "less than"]),
    (["--set", "chat_template_kwargs.tokenize=true"], ["chat_template_kwargs.tokenize", "leave it out"]),
    (["--set", "env_name=broken.py:make"], ["env_name", "cannot be loaded", "broken.py, line 1: "]),
    (["--set", "rewards=[{name='broken.py:make'}]"], ["rewards", "cannot be loaded", "broken.py, line 1: "]),
    (["--set", "max_prompt_len=2"], ["max_prompt_len = 2", "shorter than every prompt"]),
    (["--set", "adapter=nowhere"], ["adapter", "nowhere", "adapter_config.json"]),
    (["--output", "broken.toml/run"], ["output", "broken.toml/run", "choose another"]),
    (["--output", "/proc/run"], ["output", "/proc/run", "choose another"]),
    (["--resume", "--output", "nowhere"], ["nowhere", "no run to resume"]),
    (["--resume", "--force", "--output", "nowhere"], ["--resume", "--force"]),
    (["--available-memory-gb", "inf"], ["--available-memory-gb", "inf"]),
    (["--set", "nonsense"], ["--set", "key=value", "nonsense"]),
    (["--available-memory-gb", "0.01"], ["budget", "0.01"]),
    (["--available-memory-gb", "-1"], ["--available-memory-gb", "-1"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(value)[:40])
def test_a_config_that_cannot_run_is_one_message_before_any_model_is_loaded(arguments, words, tmp_path):
    (tmp_path / "broken.toml").write_text("steps = = 3\n")
    (tmp_path / "broken.py").write_text("def make(:\n")
    message = cli("train", *arguments, folder=tmp_path, expect=2)
    assert len(message.strip().splitlines()) == 1, message
    for word in words:
        assert word in message
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_says_what_it_samples_from_and_its_plan_counts_the_copy(tmp_path):
    merged = ["--set", "rollout.weights=merged"]
    # most of the embedded model's 169 thousand float32 weights are in layers that carry an adapter
    assert re.search(r"merged copy +0\.0 MiB", cli("plan", folder=tmp_path))
    assert re.search(r"merged copy +0\.6 MiB", cli("plan", *merged, folder=tmp_path))
    fast = [
        "--steps",
        2,
        "--set",
        "optimizer.learning_rate=0.05",
        "--set",
        "groups_per_step=2",
        "--set",
        "eval.tasks=0",
    ]
    output = cli("train", "--output", "run", *fast, *merged, folder=tmp_path)
    assert "sampler  merged weights (rollout.weights = 'merged')" in output
    assert rows(tmp_path / "run/metrics.jsonl")[0]["rollout/merged"] == 1.0
    assert not all(row["skipped"] for row in rows(tmp_path / "run/metrics.jsonl"))
    # base and trained are each asked for themselves, not a merged copy of one of the two for both
    base, after = cli("eval", "run", "--tasks", 20, "--temperature", 1, folder=tmp_path).splitlines()
    assert base.split(maxsplit=1)[1] != after.split(maxsplit=1)[1]


@pytest.mark.parametrize("name", example_names())
def test_an_example_loads_validates_and_plans_offline(name, tmp_path):
    cli("init", "example.toml", "--example", name, folder=tmp_path)
    assert (tmp_path / "example.toml").read_text() == example_text(name)
    output = cli("plan", "--config", "example.toml", folder=tmp_path)
    assert "peak" in output


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_0_6b_grpo", "qwen3"), ("qwen35_9b_g2_checkpoint", "qwen3_5")]
)
def test_an_example_trains_a_tiny_model_of_its_architecture(name, architecture, tmp_path):
    model = make_tiny_model(tmp_path / "model", architecture)
    text = example_text(name).replace("quant_bits = 4\n", "")  # the tiny model is not quantized
    (tmp_path / "example.toml").write_text(text)
    arguments = ["--config", "example.toml", "--model", model, "--output", "run", "--max-tokens", 8]
    output = cli("train", *arguments, folder=tmp_path)
    assert "step    1/1" in output
    assert (tmp_path / "run/adapters/adapters.safetensors").is_file()


def test_each_reason_of_a_failure_is_printed_once_a_run_with_the_users_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Fails:\n    max_turns = 2\n    turn = 0\n"
        "    def reset(self):\n        return 'say'\n"
        "    def step(self, action):\n        raise KeyError('boom' if self.first else 'boom later')\n"
        "    def state_id(self, observation):\n        return 0\n"
        "class Works(Fails):\n    def step(self, action):\n        return 'x', float(len(action)), True, {}\n"
        "def key(task, seed, member):\n    made = (Works if member > 1 else Fails)()\n"
        "    made.first = member == 0\n    return made\n"
    )
    settings = ["env_name=mine.py:key", "eval.tasks=0", "environment={}", "rewards=[]"]
    options = [part for setting in settings for part in ("--set", setting)]
    output = cli("train", "--steps", 3, "--output", "run", *TINY, *options, folder=tmp_path).splitlines()
    assert any("mine.py:key: " in line for line in output)  # which rich by itself would print with a picture of a key
    said = [
        f"  2 failed: step of the environment raised KeyError: '{what}' (mine.py, line 7); see events.jsonl"
        for what in ("boom", "boom later")
    ]
    assert [line for line in output if "boom" in line] == said
    (first,) = [place for place, line in enumerate(output) if line.startswith("step    1/3")]
    assert output[first + 1 : first + 3] == said


def test_what_was_measured_on_no_row_is_a_dash_and_not_a_zero(tmp_path):
    (tmp_path / "mine.py").write_text("def same(completions, **_):\n    return [1.0 for _ in completions]\n")
    options = ["--set", 'rewards=[{name="mine.py:same"}]', "--set", "eval.tasks=0"]
    output = cli("train", "--steps", 2, "--output", "run", *TINY, *options, folder=tmp_path).splitlines()
    first, second = (line for line in output if line.startswith("step "))
    assert re.search(r"entropy \d\.\d{3}  ", first)  # the first step scores every row
    assert "entropy     -  " in second


def test_where_nothing_had_a_reward_no_number_is_told(tmp_path):
    (tmp_path / "reward.py").write_text("def broken(completions, **_):\n    raise OSError('the door is stuck')\n")
    settings = ['rewards=[{name="reward.py:broken"}]', "eval.tasks=2"]
    options = [part for setting in settings for part in ("--set", setting)]
    output = cli("train", "--steps", 1, "--output", "run", *TINY, *options, folder=tmp_path)
    assert "held-out accuracy before training: -  (reward -, " in output
    assert "step    1/1  reward      -  length" in output
    assert "held-out accuracy: - before, - after" in output
    assert "accuracy -  reward -" in cli("eval", "run", folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_0_6b_gigpo_recurring", ["--model", "embedded"]),  # as it is, all its five steps
        ("recurring_text", ["--steps", 3]),
        ("key_door", ["--steps", 2, "--group-size", 4]),
        ("frozen_lake_echo", ["--steps", 4]),
    ],
)
def test_an_example_of_several_turns_trains_the_embedded_model(name, options, tmp_path):
    cli("init", "example.toml", "--example", name, folder=tmp_path)
    cli("train", "--config", "example.toml", "--output", "run", *options, folder=tmp_path)
    steps = rows(tmp_path / "run/metrics.jsonl")
    assert len(steps) == load_config(tmp_path / "run/config.toml").steps
    for step in steps:
        assert step["failed"] == 0
        assert step["anchor_group_size"] > 1
        assert 0 < step["anchor_share"] <= 1
    # over all steps: a group of four can win its first turn, or all its turns be valid
    assert sum(step["num_turns"] for step in steps) > len(steps)
    assert 0 <= sum(step["success_rate"] for step in steps) < len(steps)
    assert 0 < sum(step["invalid_action_rate"] for step in steps) <= len(steps)
    losses = [step["loss_echo"] for step in steps if "loss_echo" in step]
    assert bool(losses) == (name == "frozen_lake_echo")
    # nats per token; each step plays other lakes, which differ by far less than three updates gain
    assert not losses or losses[-1] < losses[0] - 0.5


def test_init_without_an_example_writes_a_config_that_loads_as_it_is(tmp_path):
    cli("init", "new.toml", folder=tmp_path)
    config = load_config(tmp_path / "new.toml")
    assert config == make_config({"model_id": "embedded"})
    again = cli("init", "new.toml", folder=tmp_path, expect=2)
    assert "new.toml exists" in again
    for unwritable in ("new.toml/other.toml", "new.toml/folder/other.toml"):
        message = cli("init", unwritable, folder=tmp_path, expect=2)
        assert message.startswith(f"{unwritable} cannot be written (")
        assert message.endswith("; name another file.\n")


def test_every_value_that_init_shows_is_one_to_set(tmp_path):
    text = cli("init", folder=tmp_path)
    refused = {}
    for shown in re.finditer(r"^# (\w+) = .*$", text.partition("# [data]")[0], re.MULTILINE):
        (tmp_path / "one.toml").write_text(text[: shown.start()] + shown[0][2:] + text[shown.end() :])
        try:
            load_config(tmp_path / "one.toml")
        except ConfigError as error:
            refused[shown[1]] = str(error)  # alone: what belongs to another setting is refused without it
    for message in refused.values():
        assert re.search("needs|belongs to|has no effect|acts on", message), message
    assert len(refused) < 20
    assert not {"max_turns", "max_observation_len", "max_context", "betas", "clip_low", "output"} & refused.keys()


def test_init_lists_examples_and_prints_the_schema(tmp_path):
    assert cli("init", "--list", folder=tmp_path).split() == example_names()
    assert (
        "learning_rate"
        in json.loads(cli("init", "--schema", folder=tmp_path))["$defs"]["OptimizerConfig"]["properties"]
    )


def test_help_answers_without_importing_mlx(tmp_path):
    program = PROGRAM.replace("main()", "\ntry:\n    main()\nfinally:\n    print('mlx.core' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert "train" in done.stdout
    assert done.stdout.strip().endswith("False")


CORRIDOR = """
from pathlib import Path

from mlxrl.env import StepResult


class Corridor:
    max_turns = 2

    def reset(self):
        return "left or right?"

    def step(self, action):
        return StepResult("still here", 1.0, False)

    def state_id(self, observation):
        return observation


def corridor(task, seed, group_index):
    with Path(__file__).with_name("made").open("a") as file:
        file.write(".")
    return Corridor()
"""


def test_an_environment_of_a_file_is_asked_once_for_its_turns_and_found_from_any_folder(tmp_path):
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    for folder in (begun, elsewhere):
        folder.mkdir()
        (folder / "corridor.py").write_text(CORRIDOR if folder is begun else "raise OSError('the namesake')\n")
    constant = ["--set", "optimizer.schedule=constant", "--set", "optimizer.end_learning_rate=0.0"]
    own = ["--set", "env_name=corridor.py:corridor", "--set", "rewards=[]", *TINY, *constant]
    cli("train", "--steps", 1, "--output", "run", *own, "--set", "eval.tasks=0", folder=begun)
    # of eight tasks for their turns, and 2 groups of 4 to be played
    assert len((begun / "made").read_text()) == 8 + 8
    run = begun / "run"
    more = cli("train", "--output", run, "--resume", "--set", "steps=2", folder=elsewhere)
    assert "resumed from step 1" in more
    assert "task     corridor.py:corridor: 100 tasks, rewarded by environment" in more
    again = cli("train", "--output", run, "--resume", "--steps", 3, *own, "--set", "eval.tasks=0", folder=elsewhere)
    assert "resumed from step 2" in again
    assert "(2 tasks, temperature 0)" in cli("eval", run, "--tasks", 2, folder=elsewhere)
