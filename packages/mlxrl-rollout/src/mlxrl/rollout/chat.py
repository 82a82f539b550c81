"""From messages to token ids; an answer is encoded again only as history that a template rewrites."""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Message, as_messages
from mlxrl.rollout.pieces import PLACE, EncodedObservation, Part, PieceEncoder, any_of

PROBE_TURNS = 5  # a window that drops old messages shows itself within so many
ROLES = ("system", "user", "assistant", "tool")  # of every template, whether or not it names them


class ChatEncoder:
    """Encodes prompts and observations for one tokenizer.

    A control token that a message's content spells stays text. A template writes the other fields as they are, so there
    it would become one: such a message is refused with a ValueError.

    Args:
        tokenizer: mlx-lm's tokenizer.
        use_chat_template: False encodes plain text as it is; None uses the template where the tokenizer has one.
        template_kwargs: passed to the template, for example {"enable_thinking": False}.

    Raises:
        ValueError: the tokenizer is not mlx-lm's, a chat template is asked for and it has none, or template_kwargs has
            what is set here.
    """

    RESERVED_KWARGS = frozenset(
        {"messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
    )
    """What the encoder itself passes to the template, or what does not go with it."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        *,
        use_chat_template: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        if not isinstance(tokenizer, TokenizerWrapper):
            raise ValueError(
                "tokenizer must be mlx-lm's TokenizerWrapper, as mlx_lm.load returns it, got a "
                f"{type(tokenizer).__name__}; wrap it."
            )
        if use_chat_template and not tokenizer.has_chat_template:
            raise ValueError("use_chat_template is true, but the tokenizer has no chat template; set it to false.")
        named = {} if template_kwargs is None else template_kwargs
        is_named = isinstance(named, dict) and all(isinstance(name, str) for name in named)
        if not is_named or not self.RESERVED_KWARGS.isdisjoint(named):
            taken = ", ".join(sorted(self.RESERVED_KWARGS))
            raise ValueError(f"template_kwargs must be a dict by name, none of {taken} in it, got {template_kwargs!r}.")
        self.tokenizer = tokenizer
        self.templated = tokenizer.has_chat_template if use_chat_template is None else use_chat_template
        self.template_kwargs = named
        self.eos_ids = frozenset(tokenizer.eos_token_ids)
        self._encoder = PieceEncoder(tokenizer)
        self._thought = tokenizer.think_start or "<think>", tokenizer.think_end or "</think>"
        control = self._encoder.control
        self._control = any_of(control)
        # a role that a template writes between "<|" and "|>" must not be the name of another control token
        named = re.findall(r"""['"](\w+)['"]""", str(tokenizer.chat_template))
        self._roles = dict.fromkeys((*ROLES, *named))
        # a template finds the thoughts of an answer by their marks, so there the marks are left to it
        self._control_in_answers = any_of(token for token in control if token not in "".join(self._thought))
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
            whole = [*before, *messages]
            scaffold = self._pieces(whole)
            texts = [self._written(whole, scaffold, i) for i in range(2, len(whole))]
            scaffold = scaffold[2:]  # what stands before the action is there already
        else:
            scaffold = ["", *["\n"] * (len(messages) - 1), ""]
            texts = [message["content"] for message in messages]
        parts = [Part(scaffold[0])]
        for text, after in zip(texts, scaffold[1:], strict=True):
            parts += [Part(text, is_plain=True, is_content=True), Part(after)]
        end = self.tokenizer.eos_token if after_eos else None
        encoded = self._encoder.encode(parts, max_content, before=end or PLACE)
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
        shown = self._marked(messages)
        rest = self._render(shown)
        pieces = []
        for message in shown:
            piece, found, rest = rest.partition(message["content"])
            if not found:
                roles = [message["role"] for message in messages]
                raise ValueError(f"the chat template drops, changes or reorders the texts of the roles {roles}.")
            pieces.append(piece)
        return [*pieces, rest]

    def _marked(self, messages: Sequence[Message]) -> list[Message]:
        return [{**message, "content": self._mark.format(i)} for i, message in enumerate(messages)]

    def _written(self, messages: Sequence[Message], pieces: Sequence[str], i: int) -> str:
        """The text of message `i > 0` as the template writes it between its pieces, which may strip or escape it.

        A text whose surroundings depend on it is taken as it is.
        """
        shown = self._marked(messages)
        shown[i] = messages[i]
        _, _, rest = self._render(shown).partition(self._mark.format(i - 1))
        rest, _, _ = rest.partition(self._mark.format(i + 1))
        is_framed = len(rest) >= len(pieces[i] + pieces[i + 1]) and rest.startswith(pieces[i])
        if not is_framed or not rest.endswith(pieces[i + 1]):
            return messages[i]["content"]
        return rest[len(pieces[i]) : len(rest) - len(pieces[i + 1])]

    def _whole(self, messages: Sequence[Message], new: int, max_content: int | None) -> EncodedObservation:
        """A rendered prompt; from the message `new` on the contents are limited."""
        special = not self.templated
        encoded = None
        if max_content is not None:
            encoded = self._encoder.encode(self._rendered(messages, new), max_content, add_special_tokens=special)
        if encoded is None or not encoded.cut:
            encoded = self._encoder.encode(self._rendered(messages, len(messages)), add_special_tokens=special)
        return EncodedObservation(encoded.token_ids, [False] * len(encoded.token_ids), encoded.cut)

    def _rendered(self, messages: Sequence[Message], new: int) -> list[Part]:
        """The parts of a prompt: the contents from the message `new` on, what spells a control token, and the rest."""
        apart: list[Part] = []

        def hold(text: str, *, is_content: bool = False) -> str:
            apart.append(Part(text, is_plain=True, is_content=is_content))
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
        return [apart[int(piece)] if i % 2 else Part(piece) for i, piece in enumerate(pieces)]

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
