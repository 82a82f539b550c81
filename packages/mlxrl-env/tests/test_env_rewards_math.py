"""Mathematics by value, in processes that are ended when they take too long."""

# pyright: reportFunctionMemberAccess=false

import gc
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass

import pytest

from mlxrl.env import MathReward, StopReason, math_match, reward_function
from mlxrl.env.workers import WorkerError, WorkerPool

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify: pip install mlxrl-env[math]"
)

# Answers with the question; sleeps, dies or talks nonsense where it is asked to.
WORKER = """
import json, os, sys, time

print("true", flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question == "hang":
        time.sleep(3600)
    if question == "die":
        os._exit(3)
    print(json.dumps([question, os.getpid()]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    stop_reason: StopReason


@pytest.fixture
def pool():
    def make(count=1, seconds=20.0, source=WORKER):
        return WorkerPool([sys.executable, "-c", source], count, seconds)

    return make


def test_answers_come_in_the_order_of_the_questions_from_one_process_for_all(pool):
    workers = pool()
    answers = workers.ask([1, "two", None]) + workers.ask(["a\nb"])
    assert [answer[0] for answer in answers] == [1, "two", None, "a\nb"]
    assert len({answer[1] for answer in answers}) == 1


def test_several_processes_share_the_questions(pool):
    answers = pool(count=2).ask(list(range(20)))
    assert [answer[0] for answer in answers] == list(range(20))
    assert len({answer[1] for answer in answers}) <= 2


@pytest.mark.parametrize(("question", "reason"), [("hang", "took longer than 2 s"), ("die", "its process died")])
def test_a_question_without_an_answer_costs_its_process_and_no_other_question(pool, question, reason):
    workers = pool(seconds=2.0 if question == "hang" else 20.0)
    before, error, after = workers.ask([1, question, 2])
    assert isinstance(error, WorkerError)
    assert str(error) == reason
    assert (before[0], after[0]) == (1, 2)
    assert before[1] != after[1]


def test_a_process_that_cannot_start_fails_its_questions(pool):
    answers = pool(source="raise SystemExit(1)").ask([1, 2])
    assert [str(answer) for answer in answers] == ["its process died"] * 2


def test_processes_end_with_their_pool(pool):
    workers = pool()
    ((_, process),) = workers.ask([1])
    del workers
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_without_math_verify_answers_are_compared_as_they_are_written():
    function = MathReward(comparison="as-written")
    completions, answer = [r"\boxed{\frac12}", r"\boxed{2(x+1)}", "5", "x"], ["0.5", "2x+2", "6", None]
    assert function(["?"] * 4, completions, answer=answer) == math_match(["?"] * 4, completions, answer=answer)
    assert function(["?"] * 4, completions, answer=answer) == [1.0, 0.0, 0.0, None]
    assert function.scored_by == "answers as they are written"


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="math-verify is installed")
def test_where_math_verify_is_missing_the_reward_says_so():
    assert reward_function("math").scored_by == "answers as they are written; math-verify is not installed"
    with pytest.raises(ValueError, match=r'math-verify\' is not installed; pip install "mlxrl-env\[math\]"'):
        reward_function("math", comparison="math-verify")


def test_options_that_cannot_be_meant_are_refused():
    with pytest.raises(ValueError, match="comparison must be one of auto, math-verify, as-written, got 'sympy'"):
        reward_function("math", comparison="sympy")
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        reward_function("math", seconds=0)


@pytest.fixture(scope="module")
def by_value():
    return MathReward(seconds=20.0)


@needs_math_verify
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{2(x+1)}", "2x+2", 1.0),  # equal in value, not as written
        ("So it is $2(x+1)$.", "2x+2", 1.0),
        ("<answer>$x^2$</answer>", "x^2", 1.0),
        (r"\boxed{\{1, 2, 3\}}", r"\{3, 2, 1\}", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        ("the answer is 5", "5", 1.0),
        ("the answer is 5", "#### 5", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        ("1/3", "0.3333", 0.0),
        (r"\boxed{x^2+1}", "x^2", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        # nothing is marked: all of it is the answer, as it is without math-verify
        ("x+1", "x+1", 1.0),
        ("1+x", "x+1", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        ("2x", "2x", 1.0),
        ("2", "2x", 0.0),
        ("Paris", "Paris", 1.0),
        ("London", "Paris", 0.0),
        (r"\sqrt{2}", r"\sqrt{2}", 1.0),
        ("2x <answer>3x</answer>", "2x", 0.0),
        ("5", None, None),
        ("5", " ", None),
    ],
)
def test_math_verify_compares_by_value(by_value, completion, answer, reward):
    assert by_value(["?"], [completion], answer=[answer]) == [reward]
    assert by_value.scored_by.startswith("math-verify ")


@needs_math_verify
def test_truncated_rows_get_nothing_and_are_not_compared(by_value):
    ends = [Ended(StopReason.length), Ended(StopReason.stop), Ended(StopReason.context)]
    assert by_value(["?"] * 3, ["5"] * 3, None, ends, answer=["5", "5", None]) == [0.0, 1.0, None]


@needs_math_verify
def test_a_comparison_without_end_fails_its_row_alone_from_any_thread():
    function, rewards = MathReward(seconds=5.0), []
    function(["?"], ["1"], answer=["1"])  # its process has started
    completions = ["5", r"\boxed{9^{9^{9^{9}}}}", "6"]
    thread = threading.Thread(target=lambda: rewards.extend(function(["?"] * 3, completions, answer=["5"] * 3)))
    thread.start()
    thread.join()
    assert (rewards[0], str(rewards[1]), rewards[2]) == (1.0, "took longer than 5 s", 0.0)
    assert isinstance(rewards[1], WorkerError)
