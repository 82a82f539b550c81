"""The folder of a run: what is refused, what is replaced, what is in it."""

# pyright: reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

import json
import math
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrl.train import Observer, RunError, load_config, make_config, open_session, resume, train, train_step
from mlxrl.train.files import append_lines, cut_off, point_link, read_lines, size_of_lines, write_folder, write_text

from .reading import lines


def test_a_folder_that_holds_a_run_is_refused_before_the_model_is_loaded_unless_it_is_replaced(values, tmp_path):
    train(make_config(values(steps=1)))
    first = (tmp_path / "run" / "rollouts.jsonl").read_text()
    with pytest.raises(
        RunError, match="exists; go on with --resume, replace it with --force, or choose another output"
    ):
        train(make_config(values(steps=1, model_id="no-model")))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(make_config(values(steps=1, seed=1)), force=True)
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() != first
    assert load_config(tmp_path / "run" / "config.toml").seed == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"  # no run wrote it


def test_a_replaced_run_leaves_nothing_behind(values, tmp_path):
    train(make_config(values(steps=3, checkpoint={"every": 1})))
    train(make_config(values(steps=1)), force=True)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    for name in ("metrics", "rollouts"):
        assert {row["step"] for row in read_lines(tmp_path / "run" / f"{name}.jsonl")} == {1}


@pytest.mark.parametrize("content", ["notes.txt", "config.toml", "checkpoints/epoch-1/weights"])
def test_a_folder_that_holds_no_run_is_never_touched_even_with_force(values, tmp_path, content):
    file = tmp_path / "run" / content
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for force in (False, True):
        with pytest.raises(RunError, match="choose another output"):
            train(make_config(values()), force=force)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "mine"


def test_a_file_is_no_folder(values, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match="run is a file, and a run needs a folder"):
        train(make_config(values()), force=True)


def test_a_force_that_cannot_start_leaves_the_old_run(values, tmp_path):
    train(make_config(values(steps=1)))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="no-model"):
        train(make_config(values(steps=1, model_id="no-model")), force=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_run_without_an_output_takes_the_first_free_number(values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = values(steps=1, algorithm={"name": "dr-grpo"})
    del fields["output"]
    folders = [train(make_config(fields)).folder for _ in range(2)]
    assert folders == [tmp_path / "runs" / f"jsonl-dr-grpo-00{number}" for number in (1, 2)]


def test_the_config_of_a_run_is_its_own_resolved(values, tmp_path):
    config = make_config(values(steps=1))
    train(config)
    assert load_config(tmp_path / "run" / "config.toml") == config


def test_an_output_that_ends_in_npz_saves_the_last_batch_beside_the_folder(values, tmp_path):
    fields = values(output=str(tmp_path / "last.npz"), steps=2, kl_beta=0.1, update={"updates_per_batch": 2})
    result = train(make_config(fields))
    assert result.folder == tmp_path / "last"
    saved = np.load(tmp_path / "last.npz")
    last = [row for row in read_lines(tmp_path / "last" / "rollouts.jsonl") if row["step"] == 2]
    assert saved["rewards"].tolist() == [row["reward"] for row in last]
    assert saved["group_ids"].tolist() == [row["group"] for row in last]
    for row, record in enumerate(last):
        (segment,) = record["segments"]
        sampled = np.array(segment["sampler_logprobs"])[np.array(segment["roles"]) == 1]
        np.testing.assert_allclose(saved["sampler_logprobs"][row][: len(sampled)], sampled, atol=1e-6)
        assert saved["roles"][row].sum() == len(sampled)
    for name in ("turns", "advantages", "weights", "old_logprobs", "reference_logprobs"):
        assert saved[name].shape == saved["roles"].shape
    (tmp_path / "last.npz").unlink()
    resume(tmp_path / "last", {"steps": 3})
    assert (tmp_path / "last.npz").exists()


def test_every_trajectory_is_on_disk_with_its_tokens_roles_log_probs_and_rewards(rooms, tmp_path):
    seen = []

    class Watching(Observer):
        def on_step(self, metrics, trajectories):
            seen.extend(trajectories)

    train(make_config(rooms(steps=1, echo_alpha=0.1)), observer=Watching())
    records = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(records) == len(seen) == 6
    for record, trajectory in zip(records, seen, strict=True):
        (segment,), (kept,) = trajectory.segments, record["segments"]
        assert kept["token_ids"] == segment.token_ids.tolist()
        assert kept["roles"] == segment.roles.tolist()
        assert {0, 1, 2} == set(kept["roles"])
        np.testing.assert_allclose(kept["sampler_logprobs"], segment.sampler_logprobs, atol=1e-6)
        assert (record["group"], record["sample"]) == (trajectory.group_id, trajectory.sample_index)
        assert record["reward"] == trajectory.reward == pytest.approx(sum(t["reward"] for t in record["turns"]))
        assert record["rewards"] == {"environment": trajectory.reward}
        assert [t["action"] for t in record["turns"]] == [t.action for t in trajectory.turns]
        assert record["stop_reason"] == "max_turns"


def test_the_adapters_of_a_run_load_in_plain_mlx_lm(values, tiny, tmp_path):
    session = open_session(make_config(values()))
    train(make_config(values(steps=2)))
    model, tokenizer = mlx_lm.load(str(tiny), adapter_path=str(tmp_path / "run" / "adapters"))
    for step in range(2):  # the same steps again, on a live model
        train_step(session, step)
    tokens = mx.array([[3, 40, 50, 60]])
    base, _ = mlx_lm.load(str(tiny))
    np.testing.assert_allclose(np.array(model(tokens)), np.array(session.model(tokens)), atol=1e-5)
    assert np.abs(np.array(model(tokens) - base(tokens))).max() > 1e-3
    assert mlx_lm.generate(model, tokenizer, prompt="ab", max_tokens=3) is not None


def test_a_run_goes_on_from_the_adapter_of_another(values, tmp_path):
    train(make_config(values(steps=2)))
    saved = mx.load(str(tmp_path / "run" / "adapters" / "adapters.safetensors"))
    session = open_session(make_config(values(adapter=str(tmp_path / "run" / "adapters"))))
    for name, value in tree_flatten(session.model.trainable_parameters()):
        assert (value == saved[name]).all(), name
    with pytest.raises(ValueError, match="set `rank` to the adapter's"):
        open_session(make_config(values(adapter=str(tmp_path / "run" / "adapters"), rank=3)))


def test_the_newest_checkpoints_stay(values, tmp_path):
    train(make_config(values(steps=5, checkpoint={"every": 2, "keep": 2})))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    assert (tmp_path / "run" / "adapters").resolve().name == "step-000005"


def test_numbers_that_are_not_finite_are_null_in_a_line_however_deep(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"a": math.nan, "b": [1.0, -math.inf, {"c": math.inf}], "d": "NaN"}, {"a": 1}])
    assert [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()] == [
        {"a": None, "b": [1.0, None, {"c": None}], "d": "NaN"},
        {"a": 1},
    ]


FIELDS = """
import datetime
import math
import pathlib
import uuid

import numpy as np

from mlxrl.env import StepResult

FIELDS = {
    "at": datetime.date(2026, 12, 1),
    "share": np.float32(0.5),
    "of": uuid.UUID(int=7),
    "file": pathlib.PurePosixPath("a/b"),
    "box": (1, math.nan, {"deep": (math.inf, {3})}),
    "by": {(1, 2): None},
}


class Fields:
    max_turns = 2

    def reset(self):
        return [{"role": "user", "content": "hello", **FIELDS}]

    def step(self, action):
        return StepResult([{"role": "user", "content": "again", **FIELDS}], float(len(action)), False, False)

    def state_id(self, observation):
        return 0


def fields(task, seed, group_index):
    return Fields()
"""


def test_what_a_message_carries_beside_its_text_is_on_disk_in_words_where_json_does_not_know_it(rooms, tmp_path):
    (tmp_path / "fields.py").write_text(FIELDS)
    train(make_config(rooms(env_name=f"{tmp_path / 'fields.py'}:fields", steps=1)))
    records = lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(records) == 6
    carried = {
        "at": "2026-12-01",
        "share": "0.5",
        "of": "00000000-0000-0000-0000-000000000007",
        "file": "a/b",
        "box": [1, None, {"deep": [None, "{3}"]}],
        "by": {"(1, 2)": None},
    }
    for record in records:
        texts = [turn["observation"] for turn in record["turns"]]
        assert texts == [[{"role": "user", "content": text, **carried}] for text in ("hello", "again")]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_lines_are_cut_off_before_the_first_that_is_not_kept(tmp_path):
    path = tmp_path / "lines.jsonl"
    for content, kept in (
        ('{"step": 1}\n{"step": 2}\n{"ste', [1, 2]),
        ('{"step": 1}\n{"step": 3}\n{"step": 2}\n', [1]),
        ('{"step": 3}\n', []),
        ("", []),
    ):
        path.write_text(content)
        cut_off(path, size_of_lines(path, lambda row: row["step"] < 3))
        assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in kept)


def test_a_file_or_folder_whose_writing_breaks_leaves_the_old_one_whole(tmp_path):
    write_text(tmp_path / "text", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "text", "new \ud800")
    assert (tmp_path / "text").read_text() == "old"

    def break_down(folder):
        (folder / "half").write_text("half")
        raise OSError("disk full")

    write_folder(tmp_path / "folder", lambda folder: (folder / "whole").write_text("old"))
    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "folder", break_down)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["whole"]
    write_folder(tmp_path / "folder", lambda folder: (folder / "new").write_text("new"))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".text.new", "folder", "text"]


def test_a_link_moves_from_one_folder_to_another_and_is_relative(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        point_link(tmp_path / "link", tmp_path / name)
        assert (tmp_path / "link").readlink().as_posix() == name
    tmp_path.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    assert (tmp_path.with_name(tmp_path.name + "-moved") / "link").is_dir()


def test_a_copy_of_a_run_made_by_following_links_is_resumed_and_replaced(values, tmp_path):
    train(make_config(values(steps=1)))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # follows links: adapters is a folder there
    assert not (tmp_path / "copy" / "adapters").is_symlink()
    assert len(resume(tmp_path / "copy", {"steps": 2}).metrics) == 1
    assert (tmp_path / "copy" / "adapters").is_symlink()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert len(train(make_config(values(steps=1, output=str(tmp_path / "other"))), force=True).metrics) == 1
