"""Reward functions: what they score, what they leave unscored, and how they are found."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import (
    StopReason,
    answer_tag,
    exact_match,
    format_reward,
    make_env,
    math_match,
    numeric_match,
    register_reward,
    reward_function,
    reward_names,
    rewards,
)

ANSWER_REWARDS = (exact_match, numeric_match, math_match, answer_tag)


@dataclass(frozen=True)
class Ended:
    stop_reason: StopReason


def score(function, completion, answer):
    (reward,) = function(["?"], [completion], None, None, answer=[answer])
    return reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris ", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("4", 4, 1.0),
        ("", "Paris", 0.0),
    ],
)
def test_exact_match_compares_all_but_the_white_space_around(completion, answer, reward):
    assert score(exact_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("72.0", "72", 1.0),
        (".5", "5", 0.0),
        ("1/2", "0.5", 1.0),
        ("0.3333", "1/3", 0.0),  # exact, not near
        ("0.30000000000000004", 0.3, 0.0),
        ("0.3", 0.3, 1.0),  # a float is meant as it is written
        ("so it is 1,000", 1000, 1.0),
        ("#### 18", "She has 9 a day. 9 * 2 = 18\n#### 18", 1.0),  # an answer that is a whole solution
        ("50%", "50", 1.0),
        ("50%", "0.5", 0.0),
        ("-5", "5", 0.0),
        ("", "0", 0.0),
        ("none", "0", 0.0),
        ("<answer></answer> 72", "72", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),  # equal as floats
        ("1e999999999", "1", 0.0),
    ],
)
def test_numeric_match_compares_exact_numbers(completion, answer, reward):
    assert score(numeric_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{\dfrac12}", r"A solution that ends in $\boxed{\frac{1}{2}}$.", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{90^{\circ}}", "90", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{3\sqrt2}", r"3\sqrt{2}", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"<answer>$x^2 + 1$</answer>", "x^2+1", 1.0),
        ("x^2 + 1.", "x^2+1", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{x^2+1}", "x^2", 0.0),
        (r"\boxed{2^{10}}", "10", 0.0),
        (r"\boxed{2^{10}}", "2^{10}", 1.0),
        (r"\boxed{5 or 6}", "6", 0.0),  # more than the number
        (r"\boxed{2\sqrt{3}}", "3", 0.0),
        (r"\boxed{evelyn}", "Evelyn", 0.0),
        (r"\boxed{2(x+1)}", "2x+2", 0.0),  # equal in value, but not as written
        (r"\boxed{} 5", "5", 0.0),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math_match_compares_numbers_by_value_and_the_rest_as_written(completion, answer, reward):
    assert score(math_match, completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>23</answer>", 1.0),
        ("<think>7+5=12 12+8=20 20+3=23</think><answer>23</answer>", 1.0),
        ("<answer>23</answer>\n", 1.0),
        ("<answer>023</answer>", 1.0),
        ("<answer>24</answer>", 0.0),
        ("<answer>23</answer>.", 0.0),  # does not end with it
        ("<answer>23</answer><answer>23</answer>", 0.0),  # two
        ("<answer>22</answer><answer>23</answer>", 0.0),
        ("<answer><answer>23</answer>", 0.0),
        ("</answer><answer>23</answer>", 0.0),
        ("<answer>23", 0.0),
        ("<answer>it is 23</answer>", 0.0),
        ("<answer>20+3</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("The answer is 23.", 0.0),
        ("23", 0.0),
        ("", 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 0.0),
    ],
)
def test_answer_tag_wants_one_tag_at_the_end_with_the_right_number(completion, reward):
    assert score(answer_tag, completion, "23") == reward


def test_the_sums_of_the_arithmetic_suite_are_scored_by_answer_tag():
    tasks = make_env("arithmetic", size=20).tasks("train")
    answers = [str(task.columns["answer"]) for task in tasks]
    right = [f"<answer>{answer}</answer>" for answer in answers]
    wrong = [f"<answer>{int(answer) + 1}</answer>" for answer in answers]
    assert answer_tag(["?"] * 20, right, None, None, answer=answers) == [1.0] * 20
    assert answer_tag(["?"] * 20, wrong, None, None, answer=answers) == [0.0] * 20


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>2+2</think><answer>4</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("\n<think>\n2+2\n</think>\n\n<answer>\n4\n</answer>\n", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<answer>4</answer><think>2+2</think>", 0.0),
        ("<think>2+2</think><answer>4</answer> done", 0.0),
        ("So <think>2+2</think><answer>4</answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_thinking_then_an_answer_and_nothing_else(completion, reward):
    assert reward_function("format")(["?"], [completion], None, None) == [reward]


def test_format_takes_another_pattern():
    assert format_reward(r"\d+.")(["?"] * 3, ["42!", "42\n", "a42!"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("function", ANSWER_REWARDS)
@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_not_scored(function, answer):
    assert function(["?"] * 2, ["", "4"], None, None, answer=[answer, "5"]) == [None, 0.0]


@pytest.mark.parametrize("function", [numeric_match, answer_tag])
def test_an_answer_without_a_number_is_not_scored(function):
    assert score(function, "4", "four") is None


@pytest.mark.parametrize("function", [numeric_match, math_match])
@pytest.mark.parametrize(
    ("reason", "reward"),
    [(reason, 0.0 if reason in ("length", "context") else 1.0) for reason in StopReason],
)
def test_a_truncated_trajectory_gets_nothing(function, reason, reward):
    assert function(["?"], ["72"], [[5]], [Ended(reason)], answer=["72"]) == [reward]
    assert function(["?"], ["72"], [[5]], [Ended(reason)], answer=[None]) == [None]


@pytest.mark.parametrize("function", ANSWER_REWARDS)
def test_the_answer_column_must_be_there_and_as_long_as_the_batch(function):
    with pytest.raises(TypeError, match="'answer'"):
        function(["?"], ["4"], None, None, level=[1], final=["4"])
    with pytest.raises(ValueError, match="is longer than"):
        function(["?"], ["4"], None, None, answer=["4", "5"])


@pytest.mark.parametrize("function", [*ANSWER_REWARDS, format_reward()])
@given(
    rows=st.lists(st.tuples(st.sampled_from(["4", "<answer>4</answer>", "", "5"]), st.sampled_from(["4", "5", None])))
)
def test_rows_are_scored_each_by_itself_whatever_other_columns_there_are(function, rows):
    completions, answers = [completion for completion, _ in rows], [answer for _, answer in rows]
    together = function(["?"] * len(rows), completions, None, None, answer=answers, level=[1] * len(rows))
    assert together == [function(["?"], [c], None, None, answer=[a], level=[1])[0] for c, a in rows]
    assert all(reward in (None, 0.0, 1.0) for reward in together)


def test_the_shipped_names_are_found():
    assert {"answer-tag", "exact", "format", "math-match", "numeric"} < set(reward_names())
    assert reward_function("numeric_match") is reward_function("numeric-match") is numeric_match
    assert reward_function("exact") is exact_match


def test_a_function_in_a_users_file_is_found(tmp_path):
    (tmp_path / "mine.py").write_text(
        "n = 3\ndef length(prompts, completions, **_): return [len(c) for c in completions]"
    )
    length = reward_function(f"{tmp_path}/mine.py:length")
    assert length(prompts=["?"], completions=["four"], completion_ids=None, trajectories=None) == [4]
    with pytest.raises(TypeError, match="must be a function, got int"):
        reward_function(f"{tmp_path}/mine.py:n")
    with pytest.raises(ValueError, match=r"'lenght'; did you mean 'length'\?"):
        reward_function(f"{tmp_path}/mine.py:lenght")


def test_options_of_a_users_function_are_bound_by_its_keywords(tmp_path):
    (tmp_path / "near.py").write_text(
        "def near(completions, *, width=1, **_): return [len(c) / width for c in completions]"
    )
    near = reward_function(f"{tmp_path}/near.py:near", width=2)
    assert near(prompts=["?"], completions=["four"], answer=["x"]) == [2.0]
    with pytest.raises(ValueError, match=r"unknown option of reward '.*near': 'widht'; did you mean 'width'\?"):
        reward_function(f"{tmp_path}/near.py:near", widht=2)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("numeric", {"answer": "5"}, "reward 'numeric': 'answer' is no option, but a column; data.columns"),
        ("numeric", {"completion_ids": 1}, "'completion_ids' is no option, but what every reward function gets; leave"),
        ("numeric", {"anwser": "5"}, r"unknown option of reward 'numeric': 'anwser' \(known: none\)"),
        ("mine", {"answer": "5"}, "'answer' is no option, but a column; data.columns"),
        ("mine", {"completions": []}, "'completions' is no option"),
        ("mine", {"prompts": []}, "'prompts' is no option"),
        ("mine", {"widht": 5}, r"'widht'; did you mean 'width'\? \(known: width\)"),
        ("math", {"answer": "5"}, r"unknown option of reward 'math': 'answer' \(known: comparison, seconds\)"),
    ],
)
def test_options_never_take_the_place_of_what_a_function_scores(tmp_path, name, options, words):
    (tmp_path / "mine.py").write_text("def mine(completions, answer, prompts=None, width=1): return [width]")
    with pytest.raises(ValueError, match=words):
        reward_function(f"{tmp_path}/mine.py:mine" if name == "mine" else name, **options)


def test_a_function_that_cannot_be_called_by_keyword_is_refused_when_it_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(prompts, completions, answer, /): return [1.0]")
    with pytest.raises(TypeError, match=r"mine.py:mine' takes 'prompts' by position alone, .*; remove the '/'"):
        reward_function(f"{tmp_path}/mine.py:mine")


def test_an_unknown_name_is_refused_with_the_alternatives():
    with pytest.raises(ValueError, match=r"unknown reward 'numerical'; did you mean 'numeric'\? \(known: "):
        reward_function("numerical")


def test_a_registered_name_is_known_and_not_taken_twice():
    register_reward("always", lambda prompts, completions, **columns: [1.0] * len(completions))
    try:
        assert reward_function("always")(["?"], ["a"]) == [1.0]
        with pytest.raises(ValueError, match="name must be new and without a colon, got 'always'"):
            register_reward("always", exact_match)
    finally:
        del rewards._REWARDS["always"]
