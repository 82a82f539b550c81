"""Runs that start at the same time, or whose start fails: none takes another's folder, and none leaves one behind."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mlxrl.train import ConfigError, RunError, config_toml, load_config, make_config, resume, train
from mlxrl.train.files import read_lines
from mlxrl.train.folder_lock import FolderLock

# Waits, when it is imported, until so many processes have come so far, or until there is a file "go".
GATE = """
import os
import time
from pathlib import Path

from mlxrl.env import make_env

here = Path(__file__).parent
end = time.monotonic() + 60
(here / f"came-{os.getpid()}").touch()
while len(list(here.glob("came-*"))) < NUM and not (here / "go").exists():
    assert time.monotonic() < end
    time.sleep(0.01)


def tasks(path):
    return make_env("jsonl", path=path)
"""
RUN = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlxrl.train import load_config, train
print(train(load_config(sys.argv[1], {"seed": int(sys.argv[2])})).folder)
"""


@pytest.fixture
def gated(values, project, tmp_path, monkeypatch):
    """gated(number, **fields) -> a config whose start waits for so many processes, all in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def make(number, **fields):
        (tmp_path / "gate.py").write_text(GATE.replace("NUM", str(number)))
        environment = {"path": str(project / "tasks.jsonl")}
        fields = values(env_name="gate.py:tasks", environment=environment, steps=1) | fields
        del fields["data"]
        return make_config({name: value for name, value in fields.items() if value is not None})

    return make


def begin(config, tmp_path, seed=0):
    """Another process that trains in the test's folder."""
    (tmp_path / "config.toml").write_text(config_toml(config))
    command = [sys.executable, "-c", RUN, str(tmp_path / "config.toml"), str(seed)]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)


def test_runs_that_start_at_the_same_time_without_an_output_each_take_a_number(gated, tmp_path):
    others = [begin(gated(3, output=None), tmp_path, seed) for seed in range(3)]
    folders = [other.communicate(timeout=120)[0].strip() for other in others]
    assert sorted(folders) == [str(tmp_path / "runs" / f"gate-grpo-00{number}") for number in (1, 2, 3)]
    for seed, folder in enumerate(folders):
        config = load_config(f"{folder}/config.toml")
        assert config.seed == seed
        assert [row["step"] for row in read_lines(tmp_path / folder / "metrics.jsonl")] == [1]


def test_a_folder_in_which_another_process_has_not_loaded_its_model_yet_is_refused(gated, tmp_path):
    config = gated(9)
    with begin(config, tmp_path, seed=7) as other:
        while other.poll() is None and not list(tmp_path.glob("came-*")):
            time.sleep(0.01)
        for force in (False, True):
            with pytest.raises(RunError, match=f"another process runs in {tmp_path / 'run'}; wait until it ends"):
                train(config, force=force)
        (tmp_path / "go").touch()
        assert other.wait(120) == 0
    assert load_config(tmp_path / "run" / "config.toml").seed == 7
    with pytest.raises(RunError, match="exists; go on with --resume"):
        train(config)


HOLDING = """
import sys
import time
from pathlib import Path
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlxrl.train import Observer, load_config, train

class Waiting(Observer):
    def on_start(self, session, folder, first_step):
        Path(sys.argv[2]).touch()
        time.sleep(600)

train(load_config(sys.argv[1]), resume=True, observer=Waiting())
"""


def test_one_process_at_a_time_runs_in_a_folder_and_a_killed_one_locks_nobody_out(values, tmp_path):
    config = make_config(values())
    train(config)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path / "run/config.toml", tmp_path / "begun"]) as other:
        while other.poll() is None and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        for how in ({"resume": True}, {"force": True}):
            with pytest.raises(RunError, match=f"another process runs in {tmp_path / 'run'}; wait until it ends"):
                train(config, **how)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
        other.send_signal(signal.SIGKILL)
    assert [row["step"] for row in resume(tmp_path / "run", {"steps": 3}).metrics] == [3]


def test_a_run_that_came_and_went_just_before_a_folder_is_taken_stays(values, tmp_path, monkeypatch):
    train(make_config(values(steps=1, output=str(tmp_path / "faster"))))
    take = FolderLock.take

    def late(self, **how):
        shutil.copytree(tmp_path / "faster", tmp_path / "run", symlinks=True)
        return take(self, **how)

    monkeypatch.setattr(FolderLock, "take", late)
    with pytest.raises(RunError, match="exists; go on with --resume"):
        train(make_config(values(steps=1, seed=1)))
    for name in ("config.toml", "metrics.jsonl", "rollouts.jsonl", "adapters/adapters.safetensors"):
        assert (tmp_path / "run" / name).exists()
    assert load_config(tmp_path / "run" / "config.toml").seed == 0


def test_where_no_folder_can_be_made_a_start_says_so(values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "unplugged")
    unnamed = values()
    del unnamed["output"]
    for fields in (unnamed, values(output="runs/mine")):
        with pytest.raises(RunError, match="cannot be a folder here"):
            train(make_config(fields))
    (tmp_path / "batch.npz").mkdir()
    with pytest.raises(RunError, match=r"batch\.npz is a folder, and the batch needs a file; choose another output"):
        train(make_config(values(output="batch.npz")))
    assert not (tmp_path / "batch").exists()


def test_a_start_that_fails_leaves_neither_a_folder_nor_a_number_behind(values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unnamed = values(steps=1)
    del unnamed["output"]
    (tmp_path / "empty").mkdir()
    for fields in (unnamed, values(), values(output=str(tmp_path / "empty"))):
        with pytest.raises(ConfigError, match="no-model"):
            train(make_config(fields | {"model_id": "no-model"}))
    assert list((tmp_path / "runs").iterdir()) == []
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "empty").iterdir()) == []  # which was there before
    assert train(make_config(unnamed)).folder == tmp_path / "runs" / "jsonl-grpo-001"


@pytest.mark.parametrize("written", ["the config", "an adapter"])
def test_a_start_that_cannot_write_leaves_nothing_behind(values, tmp_path, written):
    fields = values(steps=1)
    if written == "an adapter":  # the copy of the one that the run goes on from
        train(make_config(values(steps=1, output=str(tmp_path / "first"))))
        fields |= {"adapter": str(tmp_path / "first" / "adapters")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # bytes of a file
    try:
        with pytest.raises((OSError, RuntimeError), match=r"File too large|Unable to write"):
            train(make_config(fields))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "run").exists()
    assert train(make_config(fields)).folder == tmp_path / "run"


def test_a_lock_that_a_killed_start_left_behind_is_no_run(values, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert train(make_config(values(steps=1))).folder == tmp_path / "run"
