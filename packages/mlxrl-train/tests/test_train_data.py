"""From a file of rows to what is asked and rewarded: formats, columns, templates, and prompts that are too long."""

# pyright: reportOptionalMemberAccess=false

import csv
import json
import shutil
from collections import Counter
from typing import Any

import pytest

from mlxrl.train import ConfigError, load_config, make_config, open_session, resume, train

ROWS = [{"prompt": "ab" * (1 + i), "answer": str(i), "other": None if i == 2 else f'"{i}"\n'} for i in range(5)]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def played(folder):
    """The rollouts of a run without the names of their tasks, which tell the file."""
    return [{name: value for name, value in row.items() if name != "task"} for row in rows(folder / "rollouts.jsonl")]


@pytest.fixture
def files(tmp_path):
    """The same rows as JSON lines, as a JSON list and as CSV."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return {name: {"path": str(tmp_path / f"rows.{name}")} for name in ("jsonl", "json", "csv")}


@pytest.fixture
def run_on(values, tmp_path):
    """run_on(name, data) -> what a run draws and earns, whose reward takes every column of the data."""
    (tmp_path / "all.py").write_text(
        "def words(answer, other, prompts):\n"
        "    return [len(f'{a}{o}{p}') / 9 for a, o, p in zip(answer, other, prompts, strict=True)]\n"
    )

    def run(name, data):
        reward = {"name": f"{tmp_path / 'all.py'}:words"}
        train(make_config(values(env_name="dataset", data=data, output=str(tmp_path / name), rewards=[reward])))
        return played(tmp_path / name)

    return run


def test_a_run_is_the_same_whatever_format_its_rows_are_in(run_on, files):
    runs = {name: run_on(name, data) for name, data in files.items()}
    assert runs["jsonl"] == runs["json"] == runs["csv"]
    assert len(runs["csv"]) == 2 * 2 * 3
    assert len({row["reward"] for row in runs["csv"]}) > 1


def test_a_run_on_parquet_or_on_a_saved_dataset_is_that_on_json_lines(run_on, files, tmp_path):
    datasets = pytest.importorskip("datasets", reason='needs pip install "mlxrl-env[datasets]"')
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    plain = run_on("jsonl", files["jsonl"])
    assert run_on("of-parquet", {"path": str(tmp_path / "rows.parquet")}) == plain
    assert run_on("of-a-folder", {"path": str(tmp_path / "saved")}) == plain


def test_every_column_reaches_the_rewards_as_it_stands_and_by_its_further_name(values, files, tmp_path):
    (tmp_path / "seen.py").write_text(
        "rows = []\n\n\ndef seen(prompts, answer, other, hint, **_):\n"
        "    rows.extend(zip(prompts, answer, other, hint, strict=True))\n    return [0.0] * len(prompts)\n"
    )
    data = {
        **files["jsonl"],
        "columns": {"hint": "prompt"},
        "system_prompt": "Hush.",
        "prompt_template": "Say {prompt}",
    }
    session = open_session(make_config(values(data=data, rewards=[{"name": f"{tmp_path / 'seen.py'}:seen"}])))
    (reward,) = session.curriculum.rewards
    function: Any = reward.function
    tasks = session.curriculum.train
    columns = {name: [task.columns[name] for task in tasks] for name in tasks[0].columns}
    function(prompts=[task.prompt for task in tasks], **columns)
    system = {"role": "system", "content": "Hush."}
    assert function.__globals__["rows"] == [
        ((system, {"role": "user", "content": f"Say {row['prompt']}"}), row["answer"], row["other"], row["prompt"])
        for row in ROWS
    ]


@pytest.mark.parametrize("reward", ["numeric_match", "exact_match", "math_match", "answer_tag"])
def test_an_answer_that_is_missing_is_told_before_the_model_is_loaded(values, tmp_path, reward):
    path = tmp_path / "questions.csv"
    path.write_text("prompt,solution\n2+2?,4\n")
    fields = values(model_id="no-model", data={"path": str(path)}, rewards=[{"name": reward}])
    with pytest.raises(ConfigError) as error:
        open_session(make_config(fields))
    for part in (repr(reward), "'answer'", str(path), "prompt, solution"):
        assert part in str(error.value)
    named = {"path": str(path), "columns": {"answer": "solution"}}
    with pytest.raises(ConfigError, match="'no-model' is no folder"):  # the next that is wrong
        open_session(make_config(fields | {"data": named}))


def test_answers_without_the_number_that_a_reward_needs_are_counted_and_told_once(values, tmp_path):
    path, answers = tmp_path / "questions.jsonl", ["4", "abc", None, "twelve apples", "5"]
    path.write_text("".join(json.dumps({"prompt": "ab", "answer": answer}) + "\n" for answer in answers))
    rewards = [{"name": name} for name in ("numeric", "answer-tag", "exact")]
    train(make_config(values(data={"path": str(path)}, rewards=rewards)))
    told = [row["reason"] for row in rows(tmp_path / "run" / "events.jsonl") if row["event"] == "inactive"]
    why = "leaves 3 of 5 tasks unscored, whose answer holds no number; the first is 'questions.jsonl:2' with 'abc'."
    assert told == [f"rewards 'numeric' {why}", f"rewards 'answer-tag' {why}"]


def test_columns_that_rows_for_evaluation_lack_are_told_too(values, files, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "2+2?", "solution": "4"}\n')
    data = files["csv"] | {"eval_path": str(tmp_path / "held_out.jsonl")}
    fields = values(model_id="no-model", data=data, rewards=[{"name": "numeric_match"}], eval={"tasks": 1})
    with pytest.raises(ConfigError, match=r"'numeric_match' needs the column 'answer'.*held_out\.jsonl"):
        open_session(make_config(fields))


def test_prompts_that_are_too_long_are_left_out_counted_and_told(values, project, tmp_path):
    # prompts of 1 to 12 letters in 3 template tokens: six of twelve have up to 9 tokens
    data = {"path": str(project / "tasks.jsonl"), "eval_path": str(project / "tasks.jsonl")}
    fields = values(max_prompt_len=9, steps=3, data=data, eval={"tasks": 8})
    result = train(make_config(fields))
    asked = Counter(len(row["turns"][0]["observation"]) for row in rows(tmp_path / "run" / "rollouts.jsonl"))
    assert asked == dict.fromkeys(range(1, 7), 3)  # 3 steps of 2 groups of 3 are an epoch of the six
    assert [len(evaluation.trajectories) for _, evaluation in result.evaluations] == [6, 6]
    events = [row for row in rows(tmp_path / "run" / "events.jsonl") if row["event"] == "overlong"]
    assert events == [
        {"step": 0, "event": "overlong", "split": "train", "dropped": 6, "tasks": 12, "longest": 9},
        {"step": 0, "event": "overlong", "split": "eval", "dropped": 2, "tasks": 8, "longest": 9},
    ]
    assert [str(out) for out in open_session(make_config(fields)).left_out] == [
        "6 of 12 prompts are left out, for they have more than 9 tokens.",
        "2 of 8 held-out prompts are left out, for they have more than 9 tokens.",
    ]
    resume(tmp_path / "run", {"steps": 4})
    assert [row for row in rows(tmp_path / "run" / "events.jsonl") if row["event"] == "overlong"] == events


def test_prompts_of_just_the_longest_length_leave_nothing_out(values):
    assert open_session(make_config(values(max_prompt_len=15))).left_out == ()
    (out,) = open_session(make_config(values(max_prompt_len=14))).left_out
    assert (out.dropped, out.tasks) == (1, 12)


def test_prompts_that_are_too_long_are_refused_where_the_config_says_so(values, project):
    def refusal(**fields):
        with pytest.raises(ConfigError) as error:
            open_session(make_config(values(**fields)))
        return str(error.value)

    path = str(project / "tasks.jsonl")
    # the seventh row asks 7 letters in 3 template tokens
    assert refusal(max_prompt_len=9, data={"path": path, "overlong": "error"}) == (
        "the prompt of task 'tasks.jsonl:7' has 10 tokens and may have 9, as 6 of 12 are too long; raise "
        "max_prompt_len, shorten them, or set data.overlong = 'drop'."
    )
    open_session(make_config(values(max_prompt_len=15, data={"path": path, "overlong": "error"})))
    assert "max_prompt_len = 3 is shorter than every prompt; raise it" in refusal(max_prompt_len=3)


def test_evaluation_tasks_all_too_long_are_refused(values, files, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "long" * 9, "answer": "1"}) + "\n")
    data = files["json"] | {"eval_path": str(tmp_path / "long.jsonl")}
    with pytest.raises(ConfigError, match="max_prompt_len = 20 is shorter than every held-out prompt; raise it"):
        open_session(make_config(values(data=data, eval={"tasks": 1}, max_prompt_len=20)))


def test_equal_rows_are_groups_of_their_own_and_each_is_played_once_an_epoch(values, tmp_path):
    (tmp_path / "same.jsonl").write_text('{"prompt": "ab"}\n' * 5)
    train(make_config(values(data={"path": str(tmp_path / "same.jsonl")}, steps=5)))
    found = rows(tmp_path / "run" / "rollouts.jsonl")
    tasks = [row["task"] for row in found[::3]]
    assert [row["group"] for row in found] == [group for group in range(10) for _ in range(3)]
    for epoch in (tasks[:5], tasks[5:]):  # the third step straddles them
        assert sorted(epoch) == [f"same.jsonl:{line}" for line in range(1, 6)]
    # equal prompts are drawn with keys of their own
    assert len({tuple(row["segments"][0]["token_ids"]) for row in found}) > 15


def test_template_arguments_and_the_system_prompt_reach_the_chat_template(values, files, tiny, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if enable_thinking %}think{% else %}speak{% endif %}{{ (style or {}).tone }}"
    )
    data = files["csv"] | {"system_prompt": "Hush."}

    def prompts(**fields):
        session = open_session(make_config(values(model_id=str(model), data=data, **fields)))
        return [session.tokenizer.decode(session.engine.encoder.prompt(t.prompt)) for t in session.curriculum.train[:1]]

    assert prompts() == ["<system>Hush.<user>abspeak"]
    arguments = {"enable_thinking": True, "style": {"tone": "!"}}
    assert prompts(chat_template_kwargs=arguments) == ["<system>Hush.<user>abthink!"]
    # and the rollouts of a run begin with it
    train(make_config(values(model_id=str(model), data=data, chat_template_kwargs=arguments, steps=1)))
    assert load_config(tmp_path / "run" / "config.toml").chat_template_kwargs == arguments
    session = open_session(load_config(tmp_path / "run" / "config.toml"))
    for row in rows(tmp_path / "run" / "rollouts.jsonl"):
        (segment,) = row["segments"]
        start = session.tokenizer.decode(segment["token_ids"][: segment["roles"].index(1)])  # 1 is an action's
        assert start == f"<system>Hush.<user>{row['turns'][0]['observation'][1]['content']}think!"


def test_fields_that_cannot_act_on_the_data_are_told(values, files):
    data = files["csv"] | {"seed": 3}
    told = "data.seed draws the share that is held out; set data.eval_fraction."
    assert told in open_session(make_config(values(data=data))).inactive
    assert told not in open_session(make_config(values(data=data | {"eval_fraction": 0.5}))).inactive
    held_out = files["csv"] | {"eval_path": files["json"]["path"]}
    told = "data.eval_path is read for evaluations only; set eval.tasks."
    assert told in open_session(make_config(values(data=held_out))).inactive
    assert told not in open_session(make_config(values(data=held_out, eval={"tasks": 1}))).inactive
