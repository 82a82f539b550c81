"""The bench: who takes part does the same work, and what is reported follows from what was measured."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from statistics import median

import numpy as np
import pytest

from mlxrl.cli import main
from mlxrl.cli.bench import ours, peer
from mlxrl.cli.bench.models import load_bench_policy
from mlxrl.cli.bench.race import ContestantError, Result, median_ratio, race
from mlxrl.cli.bench.update import update_steps
from mlxrl.cli.bench.work import (
    MultiturnWork,
    RolloutWork,
    choose_ends,
    declare_ends,
    make_texts,
    make_update_work,
    spread_limits,
)
from mlxrl.policy import adapter_parameters
from mlxrl.policy.testing import make_tiny_model
from mlxrl.rollout import Role, group_requests

SMALL = ["--rounds", 1, "--rank", 2, "--prompt-len", 9, "--samples", 2]


def bench(*arguments, expect=0):
    """The JSON that the command wrote to standard output, and what it wrote to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setattr(
            sys,
            "argv",
            ["mlxrl-cli", "bench", *map(str, arguments), *([] if "--json" in arguments else ["--json", "-"])],
        )
        with pytest.raises(SystemExit) as stopped:
            main()
    assert (stopped.value.code or 0) == expect, err.getvalue()
    return json.loads(out.getvalue()) if out.getvalue() else {}, err.getvalue()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The tiny policy with its own end tokens declared away."""
    policy = load_bench_policy(None, None, None, 2, tmp_path_factory.mktemp("model"))
    declare_ends(policy.tokenizer, [])
    return policy


def by_name(report):
    return {row["name"]: row for row in report["contestants"]}


def assert_follows_from_rounds(report):
    """Medians and ratios are those of the rounds that stand beside them."""
    rates = {name: [one["tokens"] / one["seconds"] for one in row["rounds"]] for name, row in by_name(report).items()}
    for name, row in by_name(report).items():
        assert len(row["rounds"]) == report["settings"]["rounds"]
        assert row["tokens"] == median(one["tokens"] for one in row["rounds"])
        assert row["tokens_per_second"] == pytest.approx(median(rates[name]))
        ratios = [mine / theirs for mine, theirs in zip(rates["mlxrl"], rates[name], strict=True)]
        assert row["ratio"] == pytest.approx(median(ratios))
        assert row["peak_bytes"] > 0


def test_rollout_without_ends_is_the_same_number_of_tokens_for_all():
    report, table = bench("rollout", "--prompts", 2, "--max-tokens", 5, *SMALL, "--rounds", 2)
    assert list(by_name(report)) == ["mlxrl", "loop", "batch-generator"]
    # 2 prompts x 2 samples x 5 tokens, in each of 2 rounds
    assert [[one["tokens"] for one in row["rounds"]] for row in report["contestants"]] == [[20, 20]] * 3
    assert_follows_from_rounds(report)
    assert by_name(report)["loop"]["forwards"] == 5
    assert [one["forwards"] for one in by_name(report)["loop"]["rounds"]] == [5, 5]
    assert "forwards" in table
    assert report["failed"] == {}
    stats = report["last_rollout"]
    assert 0 < stats["launch_seconds"] + stats["device_seconds"] + stats["environment_seconds"] < stats["seconds"]
    assert {"mlx", "mlx-lm"} <= set(report["versions"])
    assert report["machine"]["device"] in ("cpu", "gpu")
    for name in by_name(report):
        assert name in table


def test_rollout_with_limits_spread_over_the_rows_is_their_sum_for_all():
    report, _ = bench("rollout", "--prompts", 2, "--max-tokens", 7, "--ends", "spread", *SMALL)
    # 4 rows of 1, 3, 5 and 7 tokens
    assert [row["tokens"] for row in report["contestants"]] == [16] * 3


def test_rollout_with_early_ends_draws_fewer_tokens():
    report, _ = bench("rollout", "--prompts", 2, "--max-tokens", 28, "--ends", "early", *SMALL, "--samples", 4)
    # 8 rows: at least a token each, and with a mean of 28 / 7 = 4 less than half of 8 x 28
    assert len(report["contestants"]) == 3
    assert all(8 <= row["tokens"] < 112 for row in report["contestants"])
    assert_follows_from_rounds(report)


def test_multiturn_is_the_same_number_of_action_tokens_for_all():
    report, table = bench("multiturn", "--tasks", 2, "--turns", 3, "--max-tokens", 4, *SMALL)
    # 2 tasks x 2 samples x 3 turns x 4 tokens; the loop reads its input along with drawing: a forward a token
    assert {name: row["tokens"] for name, row in by_name(report).items()} == {"mlxrl": 48, "loop": 48}
    assert by_name(report)["loop"]["forwards"] == 48
    assert_follows_from_rounds(report)
    assert "2 tasks x 2 samples, 3 turns of 4 tokens" in table


def test_update_trains_the_same_tokens_for_all():
    report, table = bench("update", "--prompts", 2, "--max-tokens", 5, *SMALL, "--samples", 3)
    # 2 prompts x 3 samples x 5 tokens
    assert {name: row["tokens"] for name, row in by_name(report).items()} == dict.fromkeys(
        ["mlxrl", "plain", "fused", "checkpointed"], 30
    )
    assert_follows_from_rounds(report)
    assert "2 prompts x 3 samples, 9 tokens and 5 more that are trained" in table
    # passes are not counted, and no column or key says that they were none
    assert "forwards" not in table
    assert not any("forwards" in row for row in [*report["contestants"], *report["contestants"][0]["rounds"]])
    alone, _ = bench("update", "--prompts", 1, "--max-tokens", 2, *SMALL, "--only", "plain")
    assert list(by_name(alone)) == ["mlxrl", "plain"]


def update_work(micro_batch_tokens=None):
    sizes = {"prompts": 2, "samples": 3, "prompt_len": 9, "max_tokens": 5, "seed": 0}
    return make_update_work(64, micro_batch_tokens=micro_batch_tokens, **sizes)


@pytest.mark.parametrize("micro_batch_tokens", [None, 30])
def test_every_step_has_the_same_gradient_and_leaves_the_policy_as_it_is(policy, micro_batch_tokens):
    before = {name: np.array(value) for name, value in adapter_parameters(policy.model).items()}
    norms = {name: step() for name, step in update_steps(policy, update_work(micro_batch_tokens)).items()}
    assert norms["mlxrl"] > 0
    assert norms["plain"] == pytest.approx(norms["mlxrl"], rel=1e-4)
    assert norms["fused"] == pytest.approx(norms["mlxrl"], rel=1e-4)
    assert norms["checkpointed"] == pytest.approx(norms["mlxrl"], rel=1e-4)
    for name, value in adapter_parameters(policy.model).items():
        np.testing.assert_array_equal(value, before[name])


def test_every_completion_of_an_update_has_an_advantage_and_whole_rows_keep_to_the_budget():
    work = update_work(micro_batch_tokens=30)
    # of a prompt's three the second is rewarded: none has the mean of a third
    assert work.rewards == [0, 1, 0, 0, 1, 0]
    # rows of 14 tokens: two fit in 30, and one always fits
    assert work.whole_rows() == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert update_work(micro_batch_tokens=1).whole_rows() == [slice(row, row + 1) for row in range(6)]
    assert update_work().whole_rows() == [slice(0, 6)]


def test_width_weights_and_quantized_weights_reach_the_engine():
    small = ["--prompts", 2, "--max-tokens", 5, *SMALL, "--only", "batch-generator"]
    wide, _ = bench("rollout", *small)
    narrow, _ = bench("rollout", *small, "--width", 1, "--weights", "merged", "--bits", 8)
    assert list(by_name(narrow)) == ["mlxrl", "batch-generator"]
    assert narrow["model"]["quantization"] == "8-bit"
    # 4 rows of 5 tokens, of which all but the last are read: one row at a time takes a forward for each
    assert by_name(narrow)["mlxrl"]["forwards"] >= 16 > by_name(wide)["mlxrl"]["forwards"]


def test_everything_is_written_to_a_file(tmp_path, monkeypatch):
    words = ["multiturn", "--tasks", 1, "--max-tokens", 2, "--turns", 1, *SMALL, "--json", tmp_path / "bench.json"]
    monkeypatch.setattr(sys, "argv", ["mlxrl-cli", "bench", *map(str, words)])
    with pytest.raises(SystemExit):
        main()
    assert json.loads((tmp_path / "bench.json").read_text())["settings"]["turns"] == 1


def test_a_bench_that_is_refused_leaves_no_file_and_changes_none(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        bench("multiturn", "--only", "nobody", "--json", tmp_path / name, expect=2)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.json", "{}")]


def test_prompts_have_the_asked_number_of_tokens_and_the_engine_reads_them_as_they_are(policy):
    prompts = make_texts(policy.tokenizer, 3, num_tokens=17, seed=0)
    ids = [policy.tokenizer.encode(prompt) for prompt in prompts]
    assert [len(row) for row in ids] == [17, 17, 17]
    assert len(set(prompts)) == 3
    engine = ours.make_engine(policy, RolloutWork(prompts, ids, samples=1, max_tokens=2, temperature=1.0), {})
    assert [engine.encoder.prompt(prompt) for prompt in prompts] == ids


def test_the_environment_shows_the_texts_that_the_loop_reads(policy):
    work = MultiturnWork(["red", "blue"], samples=1, turns=2, max_tokens=3, temperature=1.0)
    engine = ours.make_engine(policy, work, {})
    make = lambda task, seed, group_index: ours.AnsweringEnv(work, task)  # noqa: E731
    rollouts = engine.rollout(group_requests(work.tasks, make, group_size=1))
    for task, trajectory in zip(work.tasks, rollouts, strict=True):
        segment = trajectory.segments[0]
        shown = policy.tokenizer.encode(work.opening(task)) + policy.tokenizer.encode(work.answer)
        assert list(segment.token_ids[segment.roles != Role.ACTION]) == shown


def test_limits_are_spread_from_one_to_the_most():
    assert spread_limits(4, 10) == [1, 4, 7, 10]
    assert spread_limits(1, 10) == [10]


def test_ends_are_ids_that_come_as_often_as_asked():
    # of 12 tokens 4 are odd, one in three, and the first odd one of both rows is the third: what a mean of 3 asks for;
    # 2 is the smallest modulus with which anything does
    sampled = np.array([[0, 2, 3, 2, 0, 3], [2, 0, 3, 4, 2, 3]])
    assert choose_ends(sampled, mean_length=3, vocab_size=8) == [1, 3, 5, 7]


class Scripted:
    """A contestant whose results are given; an error among them is raised."""

    def __init__(self, name, *results):
        self.name, self.results = name, list(results)

    def run(self):
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def result(tokens, seconds):
    return Result(tokens, seconds, None, 1)


def test_rounds_go_in_turn_and_the_first_is_not_counted():
    told = []
    outcome = race(
        [Scripted("a", result(4, 9), result(4, 1), result(4, 2)), Scripted("b", *[result(4, 4)] * 3)], 2, told.append
    )
    assert told == [
        *("warm-up: a", "warm-up: b", "round 1 of 2: a", "round 1 of 2: b", "round 2 of 2: a", "round 2 of 2: b")
    ]
    assert [r.seconds for r in outcome.results["a"]] == [1, 2]
    # rates 4 and 2 against 1 and 1: ratios 4 and 2, their median 3
    assert median_ratio(outcome.results["a"], outcome.results["b"]) == 3


def test_who_breaks_or_does_other_work_leaves_the_race_and_the_others_go_on():
    broken = Scripted("broken", result(4, 1), ContestantError("it broke"))
    lazy = Scripted("lazy", result(3, 1))
    raising = Scripted("raising", ValueError("no such shape"))
    outcome = race([Scripted("a", *[result(4, 1)] * 3), broken, lazy, raising], 2, lambda _: None, expected_tokens=4)
    assert list(outcome.results) == ["a"]
    assert len(outcome.results["a"]) == 2
    assert outcome.failures == {
        "broken": "it broke",
        "lazy": "drew 3 tokens, the work is 4",
        "raising": "ValueError: no such shape",
    }


def test_a_model_whose_context_is_too_short_for_the_work_is_an_error(tmp_path):
    folder = make_tiny_model(tmp_path / "model", max_position_embeddings=12)
    _, message = bench("multiturn", "--model", folder, "--tasks", 1, "--max-tokens", 4, *SMALL, expect=1)
    assert "mlxrl drew" in message


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_are_timed(monkeypatch):
    for name in ("UV_NO_INDEX", "UV_OFFLINE", "UV_NO_CACHE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    arguments = ["--prompts", 1, "--max-tokens", 2, *SMALL, "--against", "inductive-mlxrl==0.0.0"]
    report, said = bench("rollout", *arguments, expect=1)
    assert list(by_name(report)) == ["mlxrl", "loop", "batch-generator"]
    assert list(report["failed"]) == ["inductive-mlxrl==0.0.0"]
    assert "cannot be installed" in report["failed"]["inductive-mlxrl==0.0.0"]
    assert "inductive-mlxrl==0.0.0: cannot be installed" in said


def test_a_peer_whose_process_ends_is_an_error_with_its_last_words(tmp_path):
    (tmp_path / "site").mkdir()  # without the package, the child finds our mlxrl, which has not what it looks for
    with pytest.raises(ContestantError, match="ended with exit code 1: ImportError: cannot import name"):
        peer.PeerProcess(tmp_path / "site", tmp_path / "errors.txt", {})


BAD = [
    (["rollout", "--ends", "sometimes"], ["--ends", "never, early or spread", "'sometimes'"]),
    (["rollout", "--against", "mlx-tune"], ["--against", "inductive-mlxrl", "'mlx-tune'"]),
    (["rollout", "--against", "inductive-mlxrl", "--ends", "spread"], ["--ends spread", "inductive-mlxrl cannot"]),
    (["rollout", "--only", "inductive-mlxrl:train"], ["--only", "loop, batch-generator", "inductive-mlxrl:train"]),
    (["multiturn", "--only", "batch-generator"], ["--only", "loop", "'batch-generator'"]),
    (["multiturn", "--weights", "mixed"], ["--weights", "shared or merged", "'mixed'"]),
    (["update", "--only", "loop"], ["--only", "plain, fused, checkpointed", "'loop'"]),
    (["multiturn", "--json", "no/folder/bench.json"], ["--json", "no/folder/bench.json", "No such file"]),
    (["multiturn", "--json", "/proc/bench.json"], ["--json", "/proc/bench.json", "that can be written"]),
    (["update", "--json", "/"], ["--json", "got /: Is a directory."]),
    (["multiturn", "--shape", "huge"], ["--shape", "tiny, tiny-32k, qwen3-0.6b", "'huge'"]),
    (["multiturn", "--bits", 3], ["--bits", "4, 8, 16 or 32", "3"]),
    (["multiturn", "--model", "embedded", "--bits", 4], ["--model embedded", "--bits 4", "exclude"]),
    (["rollout", "--temperature", 1e-9], ["--temperature must be 0", "0.0001", "1e-09"]),
    (["multiturn", "--model", "no/such/folder"], ["no/such/folder", "no folder"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(map(str, value))[:40])
def test_an_option_that_cannot_be_is_one_message(arguments, words):
    _, message = bench(*arguments, expect=2)
    assert len(message.strip().splitlines()) == 1, message
    for word in words:
        assert word in message
