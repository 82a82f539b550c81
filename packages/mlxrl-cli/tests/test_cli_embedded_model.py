"""The shipped folder is what it claims to be, and the script beside the package makes its like from nothing."""

import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlxrl.cli.embedded import embedded_model_path
from mlxrl.env import ArithmeticSuite

TOOLS = Path(__file__).parents[1] / "tools"
FOLDER = embedded_model_path()


def load_folder(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer, as plain `mlx_lm.load` gives them."""
    return load(str(folder))[:2]


def parameters(model: Any) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


@pytest.fixture(scope="module")
def shipped():
    return load_folder(FOLDER)


@pytest.fixture
def tool(monkeypatch):
    """A function that imports one of the scripts in tools/, which is no package."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def test_the_folder_weighs_at_most_two_megabytes():
    assert 0 < sum(file.stat().st_size for file in FOLDER.iterdir()) <= 2_000_000


def test_every_row_of_the_vocabulary_is_a_token_that_can_be_decoded(shipped):
    model, tokenizer = shipped
    # 5 special tokens, 256 bytes, 59 merges and 6 tags
    assert len(tokenizer) == 326
    assert model.args.vocab_size == 326
    assert model(mx.array([[2]])).shape[-1] == 326
    assert None not in tokenizer.convert_ids_to_tokens(list(range(326)))


def test_it_has_the_parameters_that_its_shape_says(shipped):
    model, _ = shipped
    # Embedding 326 x 64, tied to the head. A layer: q and o 64 x 64 each, k and v 64 x 32 each, gate, up and down
    # 64 x 192 each, two norms of 64 and two of the head's 16. One norm of 64 at the end.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64 + 2 * 16
    assert sum(weight.size for weight in parameters(model).values()) == 326 * 64 + 3 * layer + 64


def test_the_chat_template_names_the_role_before_each_text_and_ends_it(shipped):
    _, tokenizer = shipped
    chat = [
        {"role": "system", "content": "Think step by step, then answer."},
        {"role": "user", "content": "What is 7+5+8?"},
    ]
    rendered = "<|system|>Think step by step, then answer.<|end|><|user|>What is 7+5+8?<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered
    # Specials 2 user, 4 end, 3 assistant; digits and signs are single tokens.
    ids = tokenizer.apply_chat_template(chat[1:], add_generation_prompt=True)
    pieces = ["<|user|>", "What", " is", " ", "7", "+", "5", "+", "8", "?", "<|end|>", "<|assistant|>"]
    assert [tokenizer.decode([token]) for token in ids] == pieces
    assert (ids[0], *ids[-2:]) == (2, 4, 3)


def test_tags_are_one_token_each_and_survive_decoding(shipped):
    _, tokenizer = shipped
    text = "<think>7+5=12</think><answer>12</answer><action>left</action>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    # The six tags follow the 320 learned entries, in the order of the text.
    assert [token for token in ids if token >= 320] == [320, 321, 322, 323, 324, 325]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_greedy_decoding_answers_a_sum_by_eye_and_stops(shipped):
    model, tokenizer = shipped
    question = [{"role": "user", "content": "What is 7+5+8+3?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    ids = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=44):
        ids.append(token)
        if token == tokenizer.eos_token_id:
            break
    assert all(0 <= token < len(tokenizer) for token in ids)
    # The corpus answers nearly half of the sums at once: an untrained greedy answer has the tags and no working.
    assert re.fullmatch(r"<answer>\d+</answer><\|end\|>", tokenizer.decode(ids))


def test_the_corpus_never_asks_a_held_out_sum(tool):
    corpus = tool("embedded_corpus")
    rng = random.Random(1)
    asked = [[int(d) for d in re.findall(r"\d", corpus.sum_chat(rng)[0][1])] for _ in range(3000)]
    assert not any(map(corpus.is_held_out, asked))
    # One checksum in ten: 300 of 3,000 free draws, with a standard deviation of 16.
    assert 220 < sum(corpus.is_held_out(corpus.draw_sum(rng)) for _ in range(3000)) < 380


def test_the_sums_a_run_evaluates_on_are_those_the_corpus_held_out(tool):
    corpus = tool("embedded_corpus")
    suite = ArithmeticSuite(seed=3)
    for tasks, held_out in ((suite.tasks("train"), False), (suite.tasks("eval"), True)):
        for task in tasks:
            digits = [int(digit) for digit in re.findall(r"\d", str(task.prompt))]
            assert corpus.sum_question(digits) == task.prompt
            assert corpus.is_held_out(digits) is held_out


def test_the_expert_opens_every_door_within_eight_turns_at_most(tool):
    corpus = tool("embedded_corpus")
    for seed in range(64):
        game = corpus.KeyDoorGame(random.Random(seed))
        while game.turns_left and not game.won:
            game.step(game.expert_action())
        # At most three moves to the key, take, three to the door, open: eight turns.
        assert game.won


def test_training_reads_a_chat_as_the_template_renders_it_and_weighs_the_assistant(tool, shipped):
    _, tokenizer = shipped
    chat = [("user", "9+1+4=?"), ("assistant", "<answer>14</answer>")]
    ids, weights = tool("make_embedded_model").encode(tokenizer, chat)
    messages = [{"role": role, "content": text} for role, text in chat]
    assert ids == tokenizer.apply_chat_template(messages)
    # What the assistant says counts in full: the tag, 1, 4, the tag and the end. Its role token is a prompt's part.
    assert weights == [0.1] * (len(ids) - 5) + [1.0] * 5


def test_a_batch_loss_is_the_weighted_mean_over_all_its_tokens(tool, shipped):
    model, _ = shipped
    maker = tool("make_embedded_model")
    rows = [[2, 10, 11, 4, 3, 12, 4], [2, 20, 4, 3, 21, 4, 0]]
    weights = [[0.1, 0.1, 0.1, 0.1, 0.1, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 0.0]]
    together = maker.weighted_loss(model, [(mx.array(rows), mx.array(weights))])
    first = maker.weighted_loss(model, [(mx.array(rows[:1]), mx.array(weights[:1]))])
    second = maker.weighted_loss(model, [(mx.array(rows[1:]), mx.array(weights[1:]))])
    # The first token of a row is never a target: weights 0.4 + 2 and 0.3 + 2, the padding 0.
    assert together.item() == pytest.approx((2.4 * first.item() + 2.3 * second.item()) / 4.7, rel=1e-5)


@pytest.fixture
def make_small(tool, monkeypatch):
    """The script's `make` with four chats a step instead of 94."""
    maker = tool("make_embedded_model")
    for task, count in {"sum": 2, "guess": 1, "keydoor": 1}.items():
        monkeypatch.setitem(maker.CHATS_PER_STEP, task, count)
    return maker.make


def test_the_script_makes_the_shipped_config_and_tokenizer_and_a_loadable_model(make_small, tmp_path):
    make_small(tmp_path, seed=0, steps=3, quantize=None)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in FOLDER.iterdir()}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((FOLDER / name).read_text()), name
    assert (tmp_path / "chat_template.jinja").read_text() == (FOLDER / "chat_template.jinja").read_text()
    model, tokenizer = load_folder(tmp_path)
    assert mx.isfinite(model(mx.array([tokenizer.encode("What is 1+2+3?")]))).all().item()


def test_the_seed_fixes_the_weights(make_small, tmp_path):
    def weights(name, seed):
        make_small(tmp_path / name, seed=seed, steps=2, quantize=None)
        return parameters(load_folder(tmp_path / name)[0])

    first, again, other = weights("first", 5), weights("again", 5), weights("other", 6)
    for path, weight in first.items():
        assert mx.array_equal(weight, again[path]).item(), path
    projection = "model.layers.0.mlp.up_proj.weight"
    assert not mx.allclose(first[projection], other[projection], atol=0.01).item()


def test_a_quantized_folder_loads_and_says_so(make_small, tmp_path):
    make_small(tmp_path, seed=0, steps=2, quantize=4)
    model, tokenizer = load_folder(tmp_path)
    assert model.model.layers[0].mlp.up_proj.bits == 4
    assert mx.isfinite(model(mx.array([tokenizer.encode("What is 1+2+3?")]))).all().item()
