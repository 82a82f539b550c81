"""Rewards for choices, texts, patterns, lengths and JSON: what scores, and which options are refused."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrl.env import StopReason, reward_function
from mlxrl.env.json_schema import schema_check


@dataclass(frozen=True)
class Ended:
    stop_reason: StopReason


def score(name, completion, answer=None, **options):
    columns = {} if answer is None else {"answer": [answer]}
    function = reward_function(name, **options)
    (reward,) = function(prompts=["?"], completions=[completion], completion_ids=[[1]], trajectories=None, **columns)
    return reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("B", "B", 1.0),
        (" (b).\n", "B", 1.0),
        ("B. Paris", "B", 1.0),
        ("**B**", "B", 1.0),
        ("<answer>B</answer>", "B", 1.0),
        ("<answer>(B) Paris</answer>", "B", 1.0),
        (r"So it is \boxed{\text{B}}.", "B", 1.0),
        ("A is wrong, so\n#### B", "B", 1.0),
        ("The answer is B.", "B", 1.0),
        ("Answer: (B)", "(B)", 1.0),
        ("First I thought the answer is C, but the answer is **B**", "B", 1.0),
        ("A man is in Paris", "A", 0.0),  # an article
        ("The answer is Berlin", "B", 0.0),
        ("The answer is a mystery", "A", 0.0),
        ("C", "B", 0.0),
        ("<answer>B</answer> no, <answer>C</answer>", "B", 0.0),
        ("AB", "A", 0.0),
        ("", "B", 0.0),
        ("B", "Paris", None),  # an answer that is no letter
        ("B", "", None),
        ("1", "B", 0.0),
    ],
)
def test_choice_finds_the_letter_that_a_completion_settles_on(completion, answer, reward):
    assert score("choice", completion, answer) == reward


def test_choice_leaves_out_other_letters_and_rows_that_were_cut():
    assert [score("choice", letter, letter, letters="AB") for letter in "ABC"] == [1.0, 1.0, None]
    function = reward_function("choice")
    for reason, reward in ((StopReason.stop, 1.0), (StopReason.length, 0.0)):
        assert function(["?"], ["B"], None, [Ended(reason)], answer=["B"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "options", "reward"),
    [
        ("room 101", {"pattern": r"\d{3}"}, 1.0),
        ("room 10", {"pattern": r"\d{3}"}, 0.0),
        ("YES", {"pattern": "yes"}, 0.0),
        ("YES", {"pattern": "yes", "ignore_case": True}, 1.0),
        ("two\nlines", {"pattern": "^lines"}, 0.0),
        ("two\nlines", {"pattern": "(?m)^lines"}, 1.0),
    ],
)
def test_regex_finds_a_pattern_anywhere(completion, options, reward):
    assert score("regex", completion, **options) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "options", "reward"),
    [
        ("It is Paris, of course.", "Paris", {}, 1.0),
        ("It is paris.", "Paris", {}, 0.0),
        ("It is paris.", "Paris", {"ignore_case": True}, 1.0),
        ("It is 42.", 42, {}, 1.0),
        ("anything", " ", {}, None),
        ("a and b", None, {"texts": ["a", "b"]}, 1.0),
        ("a and c", None, {"texts": ["a", "b"]}, 0.0),
        ("yes", None, {"texts": "yse"}, 0.0),  # one text, and not its letters
        ("yes", None, {"texts": "yes"}, 1.0),
        ("STRASSE", None, {"texts": ["stra\N{LATIN SMALL LETTER SHARP S}e"], "ignore_case": True}, 1.0),
    ],
)
def test_contains_wants_every_text_or_the_answer(completion, answer, options, reward):
    assert score("contains", completion, answer, **options) == reward


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        # of 0, 2, 4, 6, 8 and 9 tokens
        ({"target": 4}, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]),
        ({"least": 4}, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        ({"most": 4}, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        ({"least": 2, "most": 8}, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_length_counts_sampled_tokens(options, rewards):
    lengths = [0, 2, 4, 6, 8, 9]
    function = reward_function("length", **options)
    assert function(["?"] * 6, ["text"] * 6, [[5] * n for n in lengths]) == pytest.approx(rewards)


PERSON = {
    "title": "a person",
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\nDone.', 1.0),
        ('```json\n{"name": 3}\n```\n\n```\n{"name": "Ada"}\n```', 1.0),  # the last block
        ('{"name": "Ada", "age": 36.0}', 1.0),
        ('{"name": "Ada", "age": 36.5}', 0.0),
        ('{"name": "Ada", "age": true}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": 1e999}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "", "age": 36}', 0.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "job": "x"}', 0.0),
        ('["name"]', 0.0),
        ('{"name": "Ada"', 0.0),
        ('I say {"name": "Ada"}', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema_wants_json_of_the_shape(completion, reward):
    assert score("json-schema", completion, schema=PERSON) == reward


def test_a_schema_may_be_a_file(tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    assert score("json-schema", '{"name": "Ada"}', schema=str(tmp_path / "person.json")) == 1.0
    with pytest.raises(ValueError, match=r"schema '.*none\.json' cannot be read"):
        reward_function("json-schema", schema=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        (True, [1, None], []),
        (False, [], [1, None]),
        ({"type": ["null", "number"]}, [None, 1, 0.5], [True, "1", [], {}]),
        ({"type": "boolean"}, [True], [1, 0, None]),
        ({"enum": [1, "a", None]}, [1, 1.0, "a", None], [True, 2, "b"]),
        ({"const": [1, {"a": True}]},
         [[1, {"a": True}], [1.0, {"a": True}]], [[1, {"a": 1}], [1], [True, {"a": True}]]),
        ({"minimum": 2, "exclusiveMaximum": 5}, [2, 4.9, "x", None], [1.9, 5]),
        ({"exclusiveMinimum": 2, "maximum": 5}, [2.1, 5], [2, 5.1]),
        ({"minLength": 1, "maxLength": 2, "pattern": "^a"}, ["a", "ab", 3], ["", "abc", "b"]),
        ({"minItems": 1, "maxItems": 2, "items": {"type": "string"}}, [["a"], ["a", "b"], 1], [[], ["a"] * 3, [1]]),
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "string"}},
         [{}, {"a": None, "b": "x"}, 3], [{"a": 1}, {"b": 1}]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["a", 3, None], [2]),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
        ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, [0, 4], [2]),
        ({"not": {"type": "string"}, "description": "no text"}, [1], ["a"]),
    ],
)  # fmt: skip
def test_each_keyword_of_a_schema_means_what_the_standard_says(schema, fits, fails):
    check = schema_check(schema)
    assert [value for value in fits if not check(value)] == []
    assert [value for value in fails if check(value)] == []


REFUSED = {
    "a letter twice": ("choice", {"letters": "ABA"}, "letters must be letters, each another, got 'ABA'"),
    "no letter": ("choice", {"letters": "A1"}, "letters must be letters, each another, got 'A1'"),
    "no pattern": ("regex", {}, r"reward 'regex' needs the option 'pattern'; set it under \[\[rewards\]\] options"),
    "a broken pattern": ("regex", {"pattern": "("}, r"pattern must be a regular expression, got '\(': missing"),
    "an empty text": ("contains", {"texts": ["a", ""]}, r"texts\[1\] must be text, and not empty, got ''"),
    "texts that are a number": (
        "contains",
        {"texts": 5},
        "reward 'contains': texts must be a text or a list of texts, got 5",
    ),
    "a broken form": (
        "format",
        {"pattern": "("},
        r"reward 'format': pattern must be a regular expression, got '\(': missing",
    ),
    "a form that is none": ("format", {"pattern": 5}, "reward 'format': pattern must be text, and not empty, got 5"),
    "a misspelt option": (
        "length",
        {"targte": 3},
        "unknown option of reward 'length': 'targte'; did you mean 'target'",
    ),
    "no length": ("length", {}, "set target, or least and most, got target None, least None, most None"),
    "two kinds of length": ("length", {"target": 3, "most": 4}, "set target, or least and most"),
    "a length of half a token": ("length", {"target": 0.5}, "target must be a whole number of at least 1, got 0.5"),
    "lengths in the wrong order": ("length", {"least": 5, "most": 4}, "least must not exceed most, got 5 and 4"),
    "an unknown keyword": ("json-schema", {"schema": {"$ref": "#"}}, r"schema\.\$ref is a keyword that is not known"),
    "a keyword deep inside": (
        "json-schema",
        {"schema": {"properties": {"a": {"items": {"typ": "string"}}}}},
        r"schema\.properties\.a\.items\.typ is a keyword",
    ),
    "an unknown type": ("json-schema", {"schema": {"type": "text"}}, r"schema\.type must be one of array, .* 'text'"),
    "a limit that is none": ("json-schema", {"schema": {"minimum": "1"}}, r"schema\.minimum must be a number, got '1'"),
    "no list": ("json-schema", {"schema": {"required": "a"}}, r"schema\.required must be a list, got 'a'"),
    "no table": ("json-schema", {"schema": {"properties": ["a"]}}, r"schema\.properties must be a table"),
    "no schema": ("json-schema", {"schema": 3}, "schema must be a table or true or false, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_that_cannot_be_meant_is_refused_when_the_reward_is_built(case):
    name, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        reward_function(name, **options)


TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(["B", "<answer>B</answer>", '{"name": "a"}', "x" * 9]))


@given(rows=st.lists(st.tuples(TEXTS, st.sampled_from(["A", "B", None, ""]))))
def test_every_row_is_scored_by_itself_with_0_1_or_nothing(rows):
    completions, answers = [completion for completion, _ in rows], [answer for _, answer in rows]
    for name, options in (
        ("choice", {}),
        ("contains", {}),
        ("contains", {"texts": ["a"]}),
        ("regex", {"pattern": "a"}),
        ("json-schema", {"schema": PERSON}),
    ):
        function = reward_function(name, **options)
        together = function(["?"] * len(rows), completions, None, None, answer=answers, level=[1] * len(rows))
        assert together == [function(["?"], [c], None, None, answer=[a], level=[1])[0] for c, a in rows]
        assert all(reward in (0.0, 1.0, None) for reward in together)
