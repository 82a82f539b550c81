"""From messages to token ids; an answer is encoded again only as history that a template rewrites."""

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Message, as_messages

PROBE_TURNS = 5  # a window that drops old messages shows itself within so many
PREFIX = "▁"  # a space, and what SentencePiece puts before a text that begins without one
CHARACTERS = 16  # a token: of a text that is to be cut, so many are encoded at first
ROLES = ("system", "user", "assistant", "tool")  # of every template, whether or not it names them
PLACE = "\ue000"  # stands for text that is encoded apart; a character that no vocabulary merges with others


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


class _Part(NamedTuple):
    """A stretch of the text: the template's or a message's, as `EncodedObservation.content` tells them apart."""

    text: str
    is_plain: bool = False
    """Whether a control token that is spelled in it stays text."""
    is_content: bool = False


class ChatEncoder:
    """Encodes prompts and observations for one tokenizer.

    A control token that a message's content spells stays text. A template writes the other fields as they are, so there
    it would become one: such a message is refused with a ValueError.

    Args:
        tokenizer: mlx-lm's tokenizer.
        use_chat_template: False encodes plain text as it is; None uses the template where the tokenizer has one.
        template_kwargs: passed to the template, for example {"enable_thinking": False}.

    Raises:
        ValueError: a chat template is asked for and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        *,
        use_chat_template: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        if use_chat_template and not tokenizer.has_chat_template:
            raise ValueError("use_chat_template is true, but the tokenizer has no chat template; set it to false.")
        self.tokenizer = tokenizer
        self.templated = tokenizer.has_chat_template if use_chat_template is None else use_chat_template
        self.template_kwargs = template_kwargs or {}
        self.eos_ids = frozenset(tokenizer.eos_token_ids)
        added = tokenizer.added_tokens_decoder.values()
        control = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._thought = tokenizer.think_start or "<think>", tokenizer.think_end or "</think>"
        self._control = _any_of(control)
        self._control_ids = {*tokenizer.convert_tokens_to_ids(list(control))} - {tokenizer.unk_token_id}
        self._reach = max((len(token.content) for token in added), default=0)
        # a role that a template writes between "<|" and "|>" must not be the name of another control token
        named = re.findall(r"""['"](\w+)['"]""", str(tokenizer.chat_template))
        self._roles = dict.fromkeys((*ROLES, *named))
        # apart from its neighbours, each text would get a prefix that it has not in their midst
        self._prefixes = tokenizer.is_fast and "".join(tokenizer.tokenize("x")).startswith(PREFIX)
        # a template finds the thoughts of an answer by their marks, so there the marks are left to it
        self._control_in_answers = _any_of(token for token in control if token not in "".join(self._thought))
        self._mark = f"mlxrl-{uuid.uuid4().hex}-{{}}-here"  # stands for text that is encoded apart; nobody spells it

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the text of a longer conversation does not start with that of the shorter one and the answer to it.

        Tried on short conversations with and without thoughts; lost thoughts, earlier messages or words of the
        generation prompt count. Whitespace and end tokens do not, nor does a conversation that the template refuses.
        """
        systems: list[list[Message]] = [[], [{"role": "system", "content": "Be brief."}]]
        return self.templated and any(
            self._rewrites(system, thinks=thinks) for system in systems for thinks in (False, True)
        )

    def prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt, ending where the model is to speak."""
        return self.opening(prompt).token_ids

    def opening(self, prompt: str | Sequence[Message], *, max_content: int | None = None) -> EncodedObservation:
        """Tokens of an observation that the model sees alone, as the first of a segment.

        Args:
            prompt: the observation.
            max_content: most tokens of its own text; None keeps all.
        """
        return self._whole(self._messages(prompt), 0, max_content)

    def conversation(self, messages: Sequence[Message], *, max_content: int | None = None) -> EncodedObservation:
        """Tokens of a conversation so far, as the template writes it: thoughts that it drops from history are gone.

        Earlier answers are encoded anew from their text, so this begins a segment.

        Args:
            messages: all of it, up to the environment's latest.
            max_content: most tokens of the texts after the last assistant message; None keeps all.
        """
        messages = self._messages(messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return self._whole(messages, answers[-1] + 1 if answers else 0, max_content)

    def observation(
        self, observation: str | Sequence[Message], *, after_eos: bool, max_content: int | None = None
    ) -> EncodedObservation:
        """Tokens to append after an action, so that the sampled tokens before them stay as they were.

        Args:
            observation: what the environment answered.
            after_eos: whether the action ended with its end-of-sequence token; if not, the template's is added.
            max_content: most tokens of the observation's own text; None keeps all.
        """
        messages = self._messages(observation)
        if self.templated:
            before: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
            scaffold = self._pieces([*before, *messages])[2:]  # what stands before the action is there already
        else:
            scaffold = ["", *["\n"] * (len(messages) - 1), ""]
        parts = [_Part(scaffold[0])]
        for message, after in zip(messages, scaffold[1:], strict=True):
            parts += [_Part(message["content"], is_plain=True, is_content=True), _Part(after)]
        end = self.tokenizer.eos_token if after_eos else None
        encoded = self._encode(parts, max_content, before=end or PLACE)
        token_ids, content = encoded.token_ids, encoded.content
        ends = [i for i, token in enumerate(token_ids) if token in self.eos_ids]
        if after_eos and ends and not any(content[: ends[0]]) and not self.text(token_ids[: ends[0]]).strip():
            first = ends[0] + 1  # the action brought its own
            token_ids, content = token_ids[first:], content[first:]
        return EncodedObservation(token_ids, content, encoded.cut)

    def text(self, action_ids: Sequence[int]) -> str:
        """An action as text, without its end-of-sequence token."""
        return self.tokenizer.decode([token for token in action_ids if token not in self.eos_ids])

    def _messages(self, value: str | Sequence[Message]) -> tuple[Message, ...]:
        """The messages; none may spell a control token where a template would make it one."""
        messages = as_messages(value)
        for message in messages:
            if self.templated and message["role"] not in self._roles:
                raise ValueError(
                    f"role of a chat message must be {', '.join(ROLES)} or one that the chat template names, "
                    f"got {message['role']!r}."
                )
            control = self._control_of(message)
            for field, text in _texts({name: field for name, field in message.items() if name != "content"}):
                if spelled := control.search(text):
                    where = field.lstrip(".") or "a field's name"
                    raise ValueError(
                        f"{where} of a chat message spells the control token {spelled[0]!r}, got {text!r}; "
                        "only its content may, where that stays text."
                    )
        return messages

    def _control_of(self, message: Message) -> re.Pattern[str]:
        return self._control_in_answers if message["role"] == "assistant" else self._control

    def _pieces(self, messages: Sequence[Message]) -> list[str]:
        """The template's text before, between and after the contents of these messages."""
        shown: list[Message] = [{**message, "content": self._mark.format(i)} for i, message in enumerate(messages)]
        rest = self._render(shown)
        pieces = []
        for message in shown:
            piece, found, rest = rest.partition(message["content"])
            if not found:
                roles = [message["role"] for message in messages]
                raise ValueError(f"the chat template drops or reorders messages of the roles {roles}.")
            pieces.append(piece)
        return [*pieces, rest]

    def _whole(self, messages: Sequence[Message], new: int, max_content: int | None) -> EncodedObservation:
        """A rendered prompt; from the message `new` on the contents are limited."""
        special = not self.templated
        encoded = None
        if max_content is not None:
            encoded = self._encode(self._rendered(messages, new), max_content, add_special_tokens=special)
        if encoded is None or not encoded.cut:
            encoded = self._encode(self._rendered(messages, len(messages)), add_special_tokens=special)
        return EncodedObservation(encoded.token_ids, [False] * len(encoded.token_ids), encoded.cut)

    def _rendered(self, messages: Sequence[Message], new: int) -> list[_Part]:
        """The parts of a prompt: the contents from the message `new` on, what spells a control token, and the rest."""
        apart: list[_Part] = []

        def hold(text: str, *, is_content: bool = False) -> str:
            apart.append(_Part(text, is_plain=True, is_content=is_content))
            return self._mark.format(len(apart) - 1)

        shown: list[Message] = []
        for i, message in enumerate(messages):
            if i >= new:
                text = hold(message["content"], is_content=True)
            else:
                text = self._control_of(message).sub(lambda spelled: hold(spelled[0]), message["content"])
            shown.append({**message, "content": text})
        rendered = self._render(shown) if self.templated else "\n".join(message["content"] for message in shown)
        pieces = re.split(self._mark.format(r"(\d+)"), rendered)
        return [apart[int(piece)] if i % 2 else _Part(piece) for i, piece in enumerate(pieces)]

    def _encode(
        self,
        parts: Sequence[_Part],
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
        tokens = self._in_place(parts, before, add_special_tokens=add_special_tokens) if self._prefixes else None
        if tokens is None:
            tokens = []
            for i, part in enumerate(parts):
                if part.is_content and max_content is not None:
                    words = self._beginning(part.text, max_content)
                else:
                    words = self.tokenizer.encode(
                        part.text,
                        add_special_tokens=add_special_tokens and i == 0,
                        split_special_tokens=part.is_plain,
                    )
                tokens += [(token, part.is_content) for token in words]
        kept: list[tuple[int, bool]] = []
        room = len(tokens) if max_content is None else max_content
        for token, is_content in tokens:
            if not is_content or room > 0:
                kept.append((token, is_content))
            room -= is_content
        return EncodedObservation([token for token, _ in kept], [own for _, own in kept], len(kept) < len(tokens))

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
            if sure > most:
                return token_ids[:sure]
            length *= 8
        return self.tokenizer.encode(text, **options)

    def _in_place(
        self, parts: Sequence[_Part], before: str, *, add_special_tokens: bool
    ) -> list[tuple[int, bool]] | None:
        """The tokens of a text encoded in one go, and whether each holds a content's text.

        None: a token joins what must stay apart.
        """
        text, content = "", []
        places: dict[int, list[int]] = {}  # where a control token is spelled, the tokens of that text
        for part in parts:
            spans = self._control.split(part.text) if part.is_plain else [part.text]
            for i, span in enumerate(spans):
                if i % 2:
                    spelled = self._behind(PLACE, span, add_special_tokens=False, split_special_tokens=True)
                    if spelled is None:
                        return None
                    places[len(text)] = [token for token, _, _ in spelled]
                shown = PLACE if i % 2 else span
                text += shown
                content += [part.is_content] * len(shown)
        encoded = self._behind(before, text, add_special_tokens=add_special_tokens)
        if encoded is None:
            return None
        tokens: list[tuple[int, bool]] = []
        placed: set[int] = set()
        prefix = self.tokenizer.convert_tokens_to_ids(PREFIX)
        for token, start, end in encoded:
            own = "".join(text[i] for i in range(start, end) if content[i])
            is_control = token in self._control_ids
            if is_control and own.strip():
                return None
            is_content = bool(own) and not is_control  # some control tokens cover the whitespace around them
            if places.keys().isdisjoint(range(start, end)) or (token == prefix and end == start + 1):
                tokens.append((token, is_content))
            elif end > start + 1:
                return None
            elif start not in placed:  # a place may be several tokens: bytes
                placed.add(start)
                tokens += [(word, is_content) for word in places[start]]
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

    def _rewrites(self, system: Sequence[Message], *, thinks: bool) -> bool:
        messages: list[Message] = [*system, {"role": "user", "content": "question 0"}]
        begin, end = self._thought
        try:
            seen = self._render(messages)
            if seen.rstrip().endswith(begin):  # every answer goes on with the thoughts that the prompt began
                answer = f"reason\n{end}\n\nanswer"
            elif thinks and not seen.rstrip().endswith(end):
                answer = f"{begin}\nreason\n{end}\n\nanswer"
            else:
                answer = "answer"
            for turn in range(1, PROBE_TURNS + 1):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"question {turn}"}]
                longer = self._render(messages)
                if not _squeezed(longer).startswith(_squeezed(seen + answer)):
                    return True
                seen = longer
        except Exception:  # a template may refuse a role, or more than one turn, with any error
            return False
        return False

    def _render(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens))) or '(?!)'})")  # no token: matches nothing


def _texts(value: object, at: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested fields, names among them, by where it stands."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping):
        for name, field in value.items():
            yield from _texts(name, at)
            yield from _texts(field, f"{at}.{name}")
    elif isinstance(value, Sequence):
        for i, field in enumerate(value):
            yield from _texts(field, f"{at}[{i}]")


def _squeezed(text: str) -> str:
    return "".join(text.split())
