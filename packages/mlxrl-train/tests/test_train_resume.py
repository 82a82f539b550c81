"""A run that broke off goes on as if it had not, and a checkpoint that cannot be trusted is refused."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import mlx.core as mx
import pytest

from mlxrl.policy.testing import make_tiny_model
from mlxrl.train import ConfigError, RunError, config_toml, load_config, make_config, open_session, resume, train
from mlxrl.train.run_folder import RunFolder

VOLATILE = ("time/", "tokens_per_second", "peak_memory_gb")
# Everything that must survive: dropout, moments, a falling rate, evaluations, several updates, tasks that do not fit.
FULL = {
    "steps": 4,
    "groups_per_step": 4,  # of 9 tasks that fit: epochs end after 9 groups
    "max_prompt_len": 12,
    "dropout": 0.2,
    "kl_beta": 0.05,
    "optimizer": {"learning_rate": 0.01, "schedule": "cosine", "weight_decay": 0.01},
    "update": {"updates_per_batch": 2, "minibatches": 2},
    "eval": {"tasks": 3, "every": 2, "temperature": 1.0},
    "checkpoint": {"every": 1, "keep": 9},
}


def rows(path):
    """The rows of a file without what differs from run to run; none where there is no file."""
    if not path.exists():
        return []
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(VOLATILE)}
        for line in path.read_text().splitlines()
    ]


def contents(folder):
    """All that a run came to: logs, and every number of its newest checkpoint."""
    found = {name: rows(folder / f"{name}.jsonl") for name in ("metrics", "rollouts", "evaluations", "events")}
    newest = folder / "adapters"
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        found[name] = {key: (value.dtype, value.tolist()) for key, value in mx.load(str(newest / name)).items()}
    return found | {"state": json.loads((newest / "state.json").read_text())["state"]}


@pytest.fixture
def full(values, project):
    """The fields of a run that uses all that must survive."""
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    return lambda **fields: values(**FULL | {"data": data} | fields)


def break_off(folder, step):
    """Leave a run as a kill just after a step's log lines leaves it: newer lines, older checkpoints."""
    for saved in folder.glob("checkpoints/step-*"):
        if int(saved.name[5:]) > step:
            shutil.rmtree(saved)


def test_a_run_that_broke_off_anywhere_goes_on_bit_for_bit(full, tmp_path):
    train(make_config(full(output=str(tmp_path / "whole"))))
    whole = contents(tmp_path / "whole")
    assert [row["step"] for row in whole["metrics"]] == [1, 2, 3, 4]
    assert [row["step"] for row in whole["evaluations"]] == [0, 2, 4]
    assert [row["dropped"] for row in whole["events"] if row["event"] == "overlong"] == [3]
    # nothing saved yet; in the first epoch; two groups into the second; after the last step, before its evaluation
    for step in (0, 1, 3, 4):
        folder = tmp_path / f"broken-{step}"
        shutil.copytree(tmp_path / "whole", folder, symlinks=True)
        break_off(folder, step)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "los')  # cut in the middle of a line
        if step == 4:
            kept = (folder / "evaluations.jsonl").read_text().splitlines(keepends=True)[:-1]
            (folder / "evaluations.jsonl").write_text("".join(kept))
        result = resume(folder)
        assert contents(folder) == whole, step
        assert [row["step"] for row in result.metrics] == list(range(step + 1, 5))


def test_a_run_resumes_at_the_boundary_of_an_epoch_and_trains_to_more_steps(values, tmp_path):
    # 12 tasks, 6 groups a step: two steps are an epoch
    fields = values(groups_per_step=6, group_size=2, checkpoint={"every": 0})
    train(make_config(fields | {"steps": 4, "output": str(tmp_path / "whole")}))
    train(make_config(fields | {"steps": 2}))
    resume(tmp_path / "run", {"steps": 4})
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    # the folder's config has the new length: what is resumed again is over
    assert load_config(tmp_path / "run" / "config.toml").steps == 4
    assert resume(tmp_path / "run").metrics == ()
    tasks = [row["task"] for row in rows(tmp_path / "run" / "rollouts.jsonl")]
    for epoch in (tasks[:24], tasks[24:]):
        assert sorted(epoch) == sorted(f"tasks.jsonl:{i}" for i in range(1, 13) for _ in range(2))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Folder of a tiny mixture of experts of two blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    return make_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **sizes)


@pytest.mark.parametrize("adapter", [{}, {"use_dora": True, "targets": ["layers.1.self_attn", "layers.0.*.gate"]}])
@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor", "lion", "muon"])
def test_the_state_of_every_optimizer_survives_bit_for_bit(values, mixture, tmp_path, name, adapter):
    fields = values(model_id=str(mixture), steps=4, optimizer={"name": name, "learning_rate": 0.01}, **adapter)
    train(make_config(fields | {"output": str(tmp_path / "whole"), "checkpoint": {"every": 2}}))
    whole = contents(tmp_path / "whole")
    assert not any(row["skipped"] for row in whole["metrics"])
    shutil.copytree(tmp_path / "whole", tmp_path / "broken", symlinks=True)
    break_off(tmp_path / "broken", 2)
    assert [row["step"] for row in resume(tmp_path / "broken").metrics] == [3, 4]
    assert contents(tmp_path / "broken") == whole


SCRIPT = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlxrl.train import load_config, train
train(load_config(sys.argv[1]), resume=False)
"""


def test_a_run_killed_at_a_random_instant_goes_on_and_ends_the_same(full, tmp_path):
    fields = full(steps=5, update={}, eval={"tasks": 0}, checkpoint={"every": 1, "keep": 2})
    config = make_config(fields)
    (tmp_path / "config.toml").write_text(config_toml(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "config.toml")]) as run:
        while run.poll() is None and len(rows(metrics) if metrics.exists() else []) < 2:
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)  # anywhere in a step: rollout, update, writing
        run.send_signal(signal.SIGKILL)
    resume(tmp_path / "run")
    train(make_config(fields | {"output": str(tmp_path / "whole")}))
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


@pytest.fixture(scope="module")
def trained(quick, tmp_path_factory):
    """The folder of a run of two steps with a checkpoint after each; `saved` is a copy to spoil."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(make_config(quick | {"output": str(folder), "checkpoint": {"every": 1}}))
    return folder


@pytest.fixture
def saved(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def test_a_checkpoint_that_was_never_finished_is_ignored(saved):
    half = saved / "checkpoints" / ".step-000003.new"
    half.mkdir()
    (half / "adapters.safetensors").write_bytes(b"half")
    resume(saved, {"steps": 3})
    assert not half.exists()
    assert len(rows(saved / "metrics.jsonl")) == 3


def test_a_run_killed_between_its_last_save_and_dropping_the_oldest_drops_it_when_it_goes_on(saved):
    names = sorted(path.name for path in (saved / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002"]
    resume(saved, {"checkpoint.keep": 1})  # nothing is left to do
    assert [path.name for path in (saved / "checkpoints").iterdir()] == ["step-000002"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGE = {
    "a flipped bit": (lambda c: flip(c / "adapters.safetensors"), "adapters.safetensors is not what was saved"),
    "a cut file": (
        lambda c: os.truncate(c / "optimizer.safetensors", 99),
        "optimizer.safetensors is not what was saved",
    ),
    "a missing file": (lambda c: (c / "adapters.safetensors").unlink(), "No such file"),
    "no state": (lambda c: (c / "state.json").unlink(), "No such file"),
    "broken JSON": (lambda c: (c / "state.json").write_text("{"), "Expecting property name"),
    "another file's JSON": (lambda c: (c / "state.json").write_text("[1]"), "list indices"),
    "a state without its parts": (lambda c: (c / "state.json").write_text('{"config": {}}'), "'state'"),
    "an edited step": (lambda c: edit(c / "state.json", '"step": 2', '"step": 1'), "state.json says step 1"),
    "a state of another version": (lambda c: edit(c / "state.json", '"position"', '"place"'), "unexpected keyword"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_the_reason_and_the_one_before_serves(saved, case):
    damage, reason = DAMAGE[case]
    newest = saved / "checkpoints" / "step-000002"
    damage(newest)
    before = rows(saved / "metrics.jsonl")
    with pytest.raises(RunError, match=rf"checkpoint .*step-000002 cannot be used \(.*{re.escape(reason)}") as refusal:
        resume(saved)
    assert str(refusal.value).endswith("remove it to resume from the one before.")
    assert rows(saved / "metrics.jsonl") == before  # nothing was touched
    shutil.rmtree(newest)
    assert [row["step"] for row in resume(saved).metrics] == [2]


def test_going_on_takes_no_more_memory_the_more_was_logged(saved):
    line = (saved / "rollouts.jsonl").read_text().splitlines()[0]
    longer = line[:-1] + ', "more": ' + json.dumps([0.5] * 2000) + "}\n"
    config = load_config(saved / "config.toml", {"output": str(saved)})
    session = open_session(config)

    def peak(num_lines):
        with (saved / "rollouts.jsonl").open("a") as file:
            file.writelines([longer.replace('"step": 1', '"step": 2')] * num_lines + [longer.replace("1", "3", 1)])
        tracemalloc.start()
        RunFolder(saved).restore(config, session.model, session.optimizer)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert all(row["step"] <= 2 for row in rows(saved / "rollouts.jsonl"))
        return most

    few = max(peak(0), peak(10))
    assert peak(200) < few + 500_000  # the lines are 2.4 million bytes


@pytest.mark.parametrize("name", ["metrics", "rollouts", "evaluations", "events"])
@pytest.mark.parametrize("line", ["{", '{"epoch": 1}', "[1]", "\udcff"])
def test_a_damaged_line_is_told_and_a_file_of_lines_can_be_taken_away(saved, name, line):
    file = saved / f"{name}.jsonl"
    whole = rows(file)
    with file.open("a", errors="surrogateescape") as log:
        log.write(f'{{"step": 3}}\n{line}\n')  # behind the checkpoint
    for other in saved.glob("*.jsonl"):
        if other != file:
            other.write_text(other.read_text() + '{"step": 3}\n')
    before = {path: path.read_bytes() for path in saved.glob("*.jsonl")}
    with pytest.raises(RunError, match=rf"{file} is damaged \(.*\); remove it to resume without its past\."):
        resume(saved)
    assert {path: path.read_bytes() for path in before} == before  # of none is anything cut off
    file.unlink()
    resume(saved, {"steps": 3})
    assert [row["step"] for row in rows(file)] == [3] * len([row for row in whole if row["step"] == 2])


def test_a_checkpoint_of_another_run_is_refused_with_the_field_that_differs(saved, values, tmp_path):
    def refusal(**fields):
        with pytest.raises(RunError) as error:
            train(make_config(values(checkpoint={"every": 1}, **fields)), resume=True)
        return str(error.value)

    where = f"checkpoint {saved / 'checkpoints' / 'step-000002'} was made with"
    where = where.removeprefix("checkpoint ")
    for fields, field, then, now in (
        ({"optimizer": {"learning_rate": 0.02}}, "optimizer.learning_rate", "0.01", "0.02"),
        ({"seed": 4}, "seed", "0", "4"),
        ({"kl_beta": 0.5}, "kl_beta", "0.0", "0.5"),
        ({"group_size": 2}, "group_size", "3", "2"),
        ({"max_completion_len": 6}, "max_completion_len", "5", "6"),
    ):
        message = refusal(**fields)
        assert message.startswith(where)
        assert f"{field} = {then}, the config has {now}; resume with the same value" in message
    # without a checkpoint the folder's config speaks
    break_off(saved, 0)
    assert refusal(seed=4).startswith(f"{saved / 'config.toml'} was made with seed = 0")


def test_what_an_update_and_a_rollout_take_at_once_may_change_on_the_way(full, tmp_path):
    fields = {"dropout": 0.0, "steps": 2}
    train(make_config(full(**fields)))
    unchanged = rows(tmp_path / "run" / "metrics.jsonl")[-1]
    break_off(tmp_path / "run", 1)
    less = {"gradient_checkpointing": True, "update.max_tokens_per_micro_batch": 40, "micro_batch_size": 3}
    (resumed,) = resume(tmp_path / "run", less | {"rollout_mode": "sequential"}).metrics
    written = load_config(tmp_path / "run" / "config.toml")
    assert (written.gradient_checkpointing, written.update.max_tokens_per_micro_batch) == (True, 40)
    assert resumed["forwards/score"] > unchanged["forwards/score"]
    for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
        assert resumed[name] == pytest.approx(unchanged[name], rel=1e-3, abs=1e-5), name


def test_the_length_of_a_run_is_free_only_while_the_rate_does_not_depend_on_it(full, tmp_path):
    train(make_config(full(steps=1)))
    with pytest.raises(RunError, match="was made with steps = 1, the config has 3"):
        resume(tmp_path / "run", {"steps": 3})


def test_data_that_were_replaced_are_refused_and_data_that_moved_are_not(values, project, tmp_path, monkeypatch):
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    for folder in (begun, elsewhere):
        folder.mkdir()
        shutil.copy(project / "tasks.jsonl", folder / "tasks.jsonl")
    monkeypatch.chdir(begun)
    data = {"path": "tasks.jsonl", "eval_path": "tasks.jsonl"}
    train(make_config(values(data=data, output="run", steps=1, checkpoint={"every": 1})))
    run = begun / "run"
    monkeypatch.chdir(elsewhere)  # relative paths are those of the folder where the run began
    (elsewhere / "tasks.jsonl").write_text('{"prompt": "b", "answer": "c"}\n')
    assert [row["step"] for row in resume(run, {"steps": 2}).metrics] == [2]
    original = (begun / "tasks.jsonl").read_text()
    (begun / "tasks.jsonl").write_text(original.replace('"answer": "3"', '"answer": "4"'))
    words = (
        f"data.path = '{begun / 'tasks.jsonl'}' does not hold the tasks that "
        f"{run / 'checkpoints' / 'step-000002'} was made with, which were read from '{begun / 'tasks.jsonl'}'; "
        "put them back, set data.path to where they lie now, or start a new run."
    )
    fields = {"data.eval_path": str(begun / "kept.jsonl"), "steps": 3}
    (begun / "kept.jsonl").write_text(original)
    before = rows(run / "metrics.jsonl")
    with pytest.raises(RunError, match=re.escape(words)):
        resume(run, fields)
    assert rows(run / "metrics.jsonl") == before
    assert [row["step"] for row in resume(run, fields | {"data.path": str(begun / "kept.jsonl")}).metrics] == [3]
    with pytest.raises(RunError, match=re.escape(f"data.path = '{elsewhere / 'tasks.jsonl'}' does not hold")):
        resume(run, fields | {"steps": 4, "data.path": "tasks.jsonl"})


REWARD = "def paid(completions):\n    return [{}.0 for _ in completions]\n"


def test_code_of_the_user_is_found_where_the_run_began_and_not_its_namesake(rooms, project, tmp_path, monkeypatch):
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    for number, folder in enumerate((begun, elsewhere)):
        folder.mkdir()
        shutil.copy(project / "my_envs.py", folder / "my_envs.py")
        (folder / "own.py").write_text(REWARD.format(number + 1))
    (elsewhere / "my_envs.py").write_text("raise OSError('the namesake')\n")
    monkeypatch.chdir(begun)
    fields = rooms(env_name="my_envs.py:rooms", rewards=[{"name": "own.py:paid"}], steps=1)
    del fields["output"]
    run = train(make_config(fields)).folder
    assert run == begun / "runs" / "my_envs-grpo-001"
    monkeypatch.chdir(elsewhere)
    resume(run, {"steps": 2})
    assert open_session(load_config(run / "config.toml")).curriculum.max_turns == 3
    # its own config says no more of where the code lies, and is that of the run all the same
    train(make_config(fields | {"steps": 3, "output": str(run)}), resume=True)
    # code that has moved, or that was mended, is what the config says
    shutil.copy(project / "my_envs.py", elsewhere / "my_envs.py")
    resume(run, {"steps": 4, "code_folder": "."})
    assert load_config(run / "config.toml").code_folder == str(elsewhere)
    metrics = rows(run / "metrics.jsonl")
    assert [row["rewards/own.py:paid/mean"] for row in metrics] == [1, 1, 1, 2]
    told = open_session(make_config(rooms(code_folder="."))).inactive
    assert [sentence.split()[0] for sentence in told] == ["code_folder"]


def test_what_is_kept_and_evaluated_may_change_on_the_way(saved, values, project):
    data = {"path": str(project / "tasks.jsonl")}
    config = make_config(values(data=data, steps=4, checkpoint={"every": 1, "keep": 1}))
    train(config, resume=True)
    assert [path.name for path in (saved / "checkpoints").iterdir()] == ["step-000004"]
    assert (saved / "adapters").resolve().name == "step-000004"


def test_there_must_be_a_run_to_resume(values, tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        train(make_config(values()), resume=True)
    with pytest.raises(RunError, match=r"holds no run to resume: there is no config\.toml"):
        resume(tmp_path / "nowhere")
    unnamed = values()
    del unnamed["output"]
    with pytest.raises(RunError, match="resuming needs the run's folder; name it with output"):
        train(make_config(unnamed), resume=True)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("steps = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resume(tmp_path / "run")
