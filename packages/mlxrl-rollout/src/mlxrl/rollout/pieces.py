"""Texts of several hands to tokens: a template's, whose control tokens act, and others', where they stay text."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

PREFIX = "▁"  # a space, and what SentencePiece puts before a text that begins without one
CHARACTERS = 16  # a token: of a text that is to be cut, so many are encoded at first
PLACE = "\ue000"  # stands for text that is encoded apart; a character that no vocabulary merges with others
WORD_END = re.compile(r"(?<=[\w!-~])(?= )")


@dataclass(frozen=True)
class EncodedObservation:
    """Tokens of an observation: template text around its own words.

    Args:
        token_ids: the tokens, ending where the model is to speak.
        content: per token, whether it is the observation's own text (True) or the template's (False); in a whole
            prompt, where no token is an observation's alone, all are False.
        cut: whether the text was cut to the allowed number of tokens.
    """

    token_ids: list[int]
    content: list[bool]
    cut: bool


class Part(NamedTuple):
    """A stretch of the text: the template's or a message's, as `EncodedObservation.content` tells them apart."""

    text: str
    is_plain: bool = False
    """Whether a control token that is spelled in it stays text."""
    is_content: bool = False


class PieceEncoder:
    """Encodes a text that is put together from parts.

    Args:
        tokenizer: mlx-lm's tokenizer.

    Attributes:
        control: the spellings of its control tokens.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        ends = tokenizer.eos_token_ids
        named = {token.content for number, token in added.items() if token.special or number in ends}
        # one character, which some tokenizers pad with, is text wherever it stands
        self.control = {token for token in named.union(tokenizer.all_special_tokens) if len(token) > 1}
        self._spelled = any_of(self.control)
        self._control_ids = {*tokenizer.convert_tokens_to_ids(list(self.control))} - {tokenizer.unk_token_id}
        self._reach = max((len(token.content) for token in added.values()), default=0)
        # apart from its neighbours, each text would get a prefix that it has not in their midst
        self._prefixes = tokenizer.is_fast and "".join(tokenizer.tokenize("x")).startswith(PREFIX)

    def encode(
        self,
        parts: Sequence[Part],
        max_content: int | None = None,
        *,
        before: str = "",
        add_special_tokens: bool = False,
    ) -> EncodedObservation:
        """The tokens of a text, of its contents the first max_content.

        Args:
            parts: the text.
            max_content: most tokens of the contents; None keeps all.
            before: what the text stands behind; its own tokens are not returned.
            add_special_tokens: whether the tokenizer's beginning is added; a template brings its own.
        """
        tokens = None
        if self._prefixes:
            most = math.inf if max_content is None else max_content
            tokens = self._in_place(parts, most, before, add_special_tokens=add_special_tokens)
        if tokens is None:
            tokens = []
            for i, part in enumerate(parts):
                if part.is_content and max_content is not None:
                    words = self._beginning(part.text, max_content)
                elif part.is_plain:
                    words = self._as_text(part.text)
                else:
                    begins = add_special_tokens and i == 0
                    words = self.tokenizer.encode(part.text, add_special_tokens=begins)
                    words = words[: len(words) - self._num_behind] if begins else words
                tokens += [(token, part.is_content) for token in words]
        kept: list[tuple[int, bool]] = []
        room = len(tokens) if max_content is None else max_content
        for token, is_content in tokens:
            if not is_content or room > 0:
                kept.append((token, is_content))
            room -= is_content
        return EncodedObservation([token for token, _ in kept], [own for _, own in kept], len(kept) < len(tokens))

    @cached_property
    def _num_behind(self) -> int:
        """How many tokens the tokenizer adds behind a text: an end, after which there is nothing to say."""
        alone, framed = self.tokenizer.encode("x", add_special_tokens=False), self.tokenizer.encode("x")
        ends = range(len(framed), 0, -1)
        return len(framed) - next((end for end in ends if framed[:end][-len(alone) :] == alone), len(framed))

    def _as_text(self, text: str) -> list[int]:
        """The tokens of a text none of which is a control token; one that the vocabulary itself spells is cut in two.

        Raises:
            ValueError: the tokenizer knows a control token that cannot be cut.
        """
        options = {"add_special_tokens": False, "split_special_tokens": True}
        token_ids = self.tokenizer.encode(text, **options)
        if self._control_ids.isdisjoint(token_ids):
            return token_ids
        spans = [half for i, span in enumerate(self._spelled.split(text)) for half in _halves(span, whole=i % 2 == 0)]
        token_ids = [token for span in spans for token in self.tokenizer.encode(span, **options)]
        if control := self._control_ids.intersection(token_ids):
            spelled = self.tokenizer.convert_ids_to_tokens(min(control))
            raise ValueError(f"the tokenizer reads the control token {spelled!r} in the text {text[:80]!r}")
        return token_ids

    def _beginning(self, text: str, most: int) -> list[int]:
        """The tokens of a content, or its first ones: more than `most`, and the same as those of the whole text.

        A token depends on its word alone, as the tokenizer splits texts. So the beginning of a text has the tokens of
        the whole, except in its last word, and in what may become the spelling of an added token with spaces before it.
        """
        options = {"add_special_tokens": False, "split_special_tokens": True}
        length = CHARACTERS * (most + 1) + self._reach
        while self.tokenizer.is_fast and length < len(text):
            encoded = self.tokenizer._tokenizer(text[:length], return_offsets_mapping=True, **options)
            token_ids, words = encoded["input_ids"], encoded.word_ids()
            settled = len(text[: length - self._reach].rstrip())
            ends = [end for _, end in encoded["offset_mapping"]]
            sure = next((i for i, end in enumerate(ends) if end > settled or words[i] == words[-1]), len(ends))
            if not self._control_ids.isdisjoint(token_ids):
                break
            if sure > most:
                return token_ids[:sure]
            length *= 8
        return self._as_text(text)

    def _in_place(
        self, parts: Sequence[Part], most: float, before: str, *, add_special_tokens: bool
    ) -> list[tuple[int, bool]] | None:
        """The tokens of a text encoded in one go, and whether each holds a content's text; see `_placed`.

        Of long contents the words in the middle are left out, where the first `most` tokens do not reach as far.
        """
        length = CHARACTERS * (most + 1) + self._reach
        while True:
            shorter, sure = (parts, math.inf) if length == math.inf else self._without_middles(parts, int(length))
            tokens = self._placed(shorter, before, add_special_tokens=add_special_tokens)
            if tokens is None:
                return None
            if sure == math.inf or sum(own and end <= sure for _, own, end in tokens) > most:
                return [(token, own) for token, own, _ in tokens]
            length *= 8

    @cached_property
    def _knows_words(self) -> bool:
        """Whether no token of the vocabulary holds the end of a word and the space behind it.

        Then texts before and behind a word's end have their tokens apart, whether or not the tokenizer splits there.
        """
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        vocabulary = self.tokenizer.get_vocab().keys() - added
        return not any(PREFIX in token.lstrip(PREFIX) or " " in token for token in vocabulary)

    def _without_middles(self, parts: Sequence[Part], length: int) -> tuple[list[Part], float]:
        """The parts, of long contents only some `length` characters and the last words.

        And up to where, in the text that `_placed` encodes, tokens are those of the whole; infinite where nothing is
        left out.
        """
        shorter: list[Part] = []
        position, sure = 0, math.inf
        for part in parts:
            text = part.text
            begin = WORD_END.search(text, min(length, len(text))) if part.is_content and self._knows_words else None
            last = len(text) - self._reach
            if begin is not None and (ends := list(WORD_END.finditer(text, max(begin.end(), last - length), last))):
                head = text[: begin.start()]
                sure = min(sure, position + len(self._spelled.sub(PLACE, head)) - self._reach)
                part = part._replace(text=head + text[ends[-1].start() :])
            position += len(self._spelled.sub(PLACE, part.text) if part.is_plain else part.text)
            shorter.append(part)
        return shorter, sure

    def _placed(
        self, parts: Sequence[Part], before: str, *, add_special_tokens: bool
    ) -> list[tuple[int, bool, int]] | None:
        """The tokens of a text, whether each holds a content's text, and where it ends.

        None: a token joins what must stay apart.
        """
        text, content = "", []
        places: dict[int, list[int]] = {}  # where a control token is spelled, the tokens of that text
        for part in parts:
            spans = self._spelled.split(part.text) if part.is_plain else [part.text]
            for i, span in enumerate(spans):
                if i % 2:
                    spelled = self._behind(PLACE, span, add_special_tokens=False, split_special_tokens=True)
                    if spelled is None or not self._control_ids.isdisjoint(token for token, _, _ in spelled):
                        return None
                    places[len(text)] = [token for token, _, _ in spelled]
                shown = PLACE if i % 2 else span
                text += shown
                content += [part.is_content] * len(shown)
        encoded = self._behind(before, text, add_special_tokens=add_special_tokens)
        if encoded is None:
            return None
        if add_special_tokens:
            encoded = encoded[: len(encoded) - self._num_behind]
        tokens: list[tuple[int, bool, int]] = []
        placed: set[int] = set()
        prefix = self.tokenizer.convert_tokens_to_ids(PREFIX)
        for token, start, end in encoded:
            own = "".join(text[i] for i in range(start, end) if content[i])
            is_control = token in self._control_ids
            if is_control and own.strip():
                return None
            is_content = bool(own) and not is_control  # some control tokens cover the whitespace around them
            if places.keys().isdisjoint(range(start, end)) or (token == prefix and end == start + 1):
                tokens.append((token, is_content, end))
            elif end > start + 1:
                return None
            elif start not in placed:  # a place may be several tokens: bytes
                placed.add(start)
                tokens += [(word, is_content, end) for word in places[start]]
        return tokens if placed == places.keys() else None

    def _behind(self, before: str, text: str, **options: bool) -> list[tuple[int, int, int]] | None:
        """Each token of a text that stands behind another, and the characters that it covers: from, to.

        None: a token covers words of both.
        """
        # mlx-lm's wrapper cannot be called, and `encode` does not tell what a token covers
        encoded = self.tokenizer._tokenizer(before + text, return_offsets_mapping=True, **options)
        tokens: list[tuple[int, int, int]] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if start >= len(before):
                tokens.append((token, start - len(before), end - len(before)))
            elif text[: max(end - len(before), 0)].strip():
                return None
        return tokens


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens))) or '(?!)'})")  # no token: matches nothing


def _halves(text: str, *, whole: bool) -> list[str]:
    return [text] if whole else [text[:1], text[1:]]
