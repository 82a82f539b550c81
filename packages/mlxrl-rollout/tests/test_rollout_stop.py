"""What ends an action: stop texts, however they are cut into tokens, and end tokens, however many there are."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxrl.env import StopReason
from mlxrl.policy.testing import EOS, PAD, character_tokenizer
from mlxrl.rollout import Role, SamplingConfig, group_requests

from .comparing import engine_of
from .environments import converse


def play(policy, stop, *lines, max_tokens=12, **options):
    engine = engine_of(policy, SamplingConfig(max_tokens=max_tokens, stop=stop), use_chat_template=False, **options)
    (trajectory,) = engine.rollout(group_requests([lines], converse, group_size=1))
    return trajectory


def says(scripted, *tokens, tokenizer=None):
    """A policy that answers "a" with these tokens, which differ from one another, and the end token."""
    follows = dict(zip(("a", *tokens), tokens, strict=False))
    tokenizer = tokenizer or character_tokenizer(
        merges=[token for token in tokens if len(token) > 1 or not token.isascii()]
    )
    return scripted(follows, tokenizer=tokenizer)


SPELLED = {
    # what: (tokens that the policy would say, stop texts, how many of the tokens it gets to say)
    "one token": (("x", ";", "y"), (";",), 2),
    "the first token": ((";", "y"), (";",), 1),
    "in the middle of a token": (("x", "ySTOPz", "w"), ("STOP",), 2),
    "over several tokens": (("x", "S", "T", "O", "P", "y"), ("STOP",), 5),
    "from the middle of a token to the middle of another": (("xST", "OPy", "z"), ("STOP",), 2),
    "after a part that went on otherwise": (("STO", "-", "ST", "OP", "y"), ("STOP",), 4),
    "after a part of itself": (("aa", "ab", "c"), ("aab",), 2),
    "the shorter of two": (("x", "END", "STOP"), ("STOP", "END"), 2),
    "one within another": (("x", "ST", "OP", "PING"), ("STOPPING", "STOP"), 3),
    "the longer where the shorter is no part": (("x", "STOP", "PING", "y"), ("STOPPING", "END"), 3),
    "more than one byte a character": (("x", "日", "本", "y"), ("日本",), 3),
    "a line": (("x", "y\n", "\nz", "w"), ("\n\n",), 3),
}


@pytest.mark.parametrize("what", SPELLED)
def test_an_action_ends_with_the_token_that_completes_a_stop_text(scripted, what):
    tokens, stop, num_tokens = SPELLED[what]
    policy = says(scripted, *tokens)
    trajectory = play(policy, stop, "a")
    said = policy[1].convert_tokens_to_ids(list(tokens[:num_tokens]))
    assert trajectory.completion_ids == said
    assert trajectory.segments[0].roles[-1] == Role.ACTION  # the completing token is trained
    (turn,) = trajectory.turns
    assert turn.action == "".join(tokens[:num_tokens])
    assert (trajectory.stop_reason, turn.action_cut, trajectory.truncated) == (StopReason.stop, False, False)


@pytest.mark.parametrize("stop", [(), ("STOPS",), ("stop",), ("aST",), ("STO P", "TOPS")])
def test_other_texts_do_not_end_an_action(scripted, stop):
    # the prompt's own "a" is no part of the action
    policy = says(scripted, "ST", "OP", "x")
    trajectory = play(policy, stop, "a")
    assert trajectory.turns[0].action == "STOPx"
    assert trajectory.num_sampled == 4  # and the end token


def test_a_stop_text_completed_by_the_last_allowed_token_is_no_cut(scripted):
    policy = says(scripted, "x", "ST", "OP", "y")
    trajectory = play(policy, ("STOP",), "a", max_tokens=3)
    assert (trajectory.stop_reason, trajectory.turns[0].action_cut) == (StopReason.stop, False)
    trajectory = play(policy, ("OPy",), "a", max_tokens=3)
    assert (trajectory.stop_reason, trajectory.turns[0].action_cut) == (StopReason.length, True)


def test_a_stop_text_does_not_reach_across_turns(scripted):
    policy = scripted({"a": "x", "x": "ST", "b": "OP", "OP": "y"}, tokenizer=character_tokenizer(merges=["ST", "OP"]))
    # nor does it reach from the observation into the action
    trajectory = play(policy, ("STOP", "bOP"), "a", "b", max_tokens=2)
    assert [(turn.action, turn.action_cut) for turn in trajectory.turns] == [("xST", True), ("OPy", True)]


def test_an_episode_goes_on_after_a_stop_text(scripted):
    policy = says(scripted, "x", ";", "y")
    trajectory = play(policy, (";",), "a", "a", "a")
    assert [turn.action for turn in trajectory.turns] == ["x;", "x;", "x;"]
    assert trajectory.stop_reason == StopReason.env_done
    assert policy[1].decode(trajectory.segments[0].token_ids.tolist()) == "ax;ax;ax;"


def byte_tokenizer():
    """A token a byte, so that a character of several is complete with its last one only."""
    vocabulary = {EOS: 0, PAD: 1}
    vocabulary |= {byte: i + 2 for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (EOS, PAD)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


@pytest.mark.parametrize(
    ("text", "stop", "num_bytes"),
    [
        ("é!", "é", 2),
        ("€!", "€", 3),
        ("x🙂y", "🙂", 5),
        ("🙂é!", "🙂é", 6),
        ("é€!", "!", 6),
    ],
)
def test_a_stop_text_may_have_characters_of_several_tokens(scripted, text, stop, num_bytes):
    tokenizer = byte_tokenizer()
    tokens = tokenizer.tokenize(text)
    assert len(set(tokens)) == len(tokens) == len(text.encode())
    trajectory = play(says(scripted, *tokens, tokenizer=tokenizer), (stop,), "a")
    assert trajectory.num_sampled == num_bytes
    assert trajectory.turns[0].action.endswith(stop)
    assert trajectory.stop_reason == StopReason.stop


def falling_back_tokenizer():
    """Tokens for a few characters, and for the bytes of all others, as SentencePiece makes them."""
    special = (EOS, PAD, "<unk>")
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁axy!"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, unk_token="<unk>")


@pytest.mark.parametrize(
    ("text", "stop", "num_tokens"),
    # a tail that begins within a character has no character of its run of bytes
    [
        ("x日é🙂", "🙂", 10),
        ("日é🙂", "🙂", 9),
        ("日é🙂", "é", 5),
        ("é日🙂!", "日", 5),
        ("x日é🙂y!", "y", 11),
        ("日🙂!", "x", 9),  # and the end token
    ],
)
def test_a_stop_text_of_single_bytes_is_found_behind_others(scripted, text, stop, num_tokens):
    tokenizer = falling_back_tokenizer()
    tokens = tokenizer.tokenize(text)
    assert len(set(tokens)) == len(tokens)
    trajectory = play(says(scripted, *tokens, tokenizer=tokenizer), (stop,), "a")
    assert trajectory.num_sampled == num_tokens


def test_bytes_that_are_no_text_do_not_spell_a_stop_text(scripted):
    tokenizer = falling_back_tokenizer()
    # a lone byte makes all of its run no text, though a tail that begins behind it would be one
    tokens = ("<0xE6>", "<0xC3>", "<0xA9>", "x", "y")
    trajectory = play(says(scripted, *tokens, tokenizer=tokenizer), ("é",), "a")
    assert trajectory.turns[0].action == "\ufffd\ufffd\ufffdxy"
    assert trajectory.stop_reason == StopReason.stop
    assert trajectory.num_sampled == 6


def test_any_of_several_end_tokens_ends_an_action(scripted):
    model, tokenizer = scripted({"a": "x", "x": ";", "b": "."})
    ends = tokenizer.convert_tokens_to_ids([";", ".", EOS])
    several = TokenizerWrapper(character_tokenizer(), eos_token_ids=ends)
    for prompt, said in (("a", ["x", ";"]), ("b", ["."]), ("c", [EOS])):
        trajectory = play((model, several), (), prompt)
        assert trajectory.completion_ids == tokenizer.convert_tokens_to_ids(said)
        assert trajectory.stop_reason == StopReason.stop
        assert trajectory.turns[0].action == "".join(said[:-1])  # the text is without its end
