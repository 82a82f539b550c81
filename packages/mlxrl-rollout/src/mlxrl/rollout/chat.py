"""From messages to token ids; an answer is encoded again only as history that a template rewrites."""

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Message, as_messages

PROBE_TURNS = 5  # a window that drops old messages shows itself within so many


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


class ChatEncoder:
    """Encodes prompts and observations for one tokenizer.

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
        # a template finds the thoughts of an answer by their marks, so there the marks are left to it
        self._control_in_answers = _any_of(token for token in control if token not in "".join(self._thought))
        self._mark = f"mlxrl-{uuid.uuid4().hex}-{{}}-here"  # stands for text that is encoded apart; nobody spells it
        self._pieces_of_roles: dict[tuple[str, ...], list[str]] = {}

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
        return self._whole(as_messages(prompt), 0, max_content)

    def conversation(self, messages: Sequence[Message], *, max_content: int | None = None) -> EncodedObservation:
        """Tokens of a conversation so far, as the template writes it: thoughts that it drops from history are gone.

        Earlier answers are encoded anew from their text, so this begins a segment.

        Args:
            messages: all of it, up to the environment's latest.
            max_content: most tokens of the texts after the last assistant message; None keeps all.
        """
        messages = as_messages(messages)
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
        messages = as_messages(observation)
        words, cut = self._limited([message["content"] for message in messages], max_content)
        if not self.templated:
            pieces = [""] * (len(messages) + 1)
        else:
            action_and_roles = ["assistant", *(message["role"] for message in messages)]
            pieces = self._pieces(["user", *action_and_roles])[2:]  # what stands before the action is there already
        token_ids: list[int] = []
        content: list[bool] = []
        for piece, own in zip(pieces, [*words, []], strict=True):
            scaffold = self._encoded(piece)
            token_ids += [*scaffold, *own]
            content += [False] * len(scaffold) + [True] * len(own)
        if after_eos and token_ids and token_ids[0] in self.eos_ids:  # the action brought its own
            token_ids, content = token_ids[1:], content[1:]
        return EncodedObservation(token_ids, content, cut)

    def text(self, action_ids: Sequence[int]) -> str:
        """An action as text, without its end-of-sequence token."""
        return self.tokenizer.decode([token for token in action_ids if token not in self.eos_ids])

    def _pieces(self, roles: Sequence[str]) -> list[str]:
        """The template's text before, between and after messages of these roles."""
        key = tuple(roles)
        if key not in self._pieces_of_roles:
            messages: list[Message] = [{"role": role, "content": self._mark.format(i)} for i, role in enumerate(roles)]
            rest = self._render(messages)
            pieces = []
            for message in messages:
                piece, found, rest = rest.partition(message["content"])
                if not found:
                    raise ValueError(f"the chat template drops or reorders messages of the roles {list(roles)}.")
                pieces.append(piece)
            self._pieces_of_roles[key] = [*pieces, rest]
        return self._pieces_of_roles[key]

    def _whole(self, messages: Sequence[Message], new: int, max_content: int | None) -> EncodedObservation:
        """A rendered prompt; what must not be read as part of the template is encoded apart, a mark in its place."""
        words, cut = self._limited([message["content"] for message in messages[new:]], max_content)
        apart: list[list[int]] = []

        def hold(token_ids: list[int]) -> str:
            apart.append(token_ids)
            return self._mark.format(len(apart) - 1)

        shown: list[Message] = []
        for i, message in enumerate(messages):
            if cut and i >= new:
                text = hold(words[i - new])
            else:
                control = self._control_in_answers if message["role"] == "assistant" else self._control
                text = control.sub(lambda spelled: hold(self._words(spelled[0])), message["content"])
            shown.append({**message, "content": text})
        rendered = self._render(shown) if self.templated else "\n".join(message["content"] for message in shown)
        first, *rest = re.split(self._mark.format(r"(\d+)"), rendered)
        token_ids = self._encoded(first, add_special_tokens=not self.templated)
        for index, text in zip(rest[::2], rest[1::2], strict=True):
            token_ids += [*apart[int(index)], *self._encoded(text)]
        return EncodedObservation(token_ids, [False] * len(token_ids), cut)

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

    def _limited(self, texts: Sequence[str], max_content: int | None) -> tuple[list[list[int]], bool]:
        """The tokens of each text, at most max_content in all, and whether some had to go."""
        words = [self._words(text) for text in texts]
        if max_content is None:
            return words, False
        kept: list[list[int]] = []
        for token_ids in words:
            kept.append(token_ids[: max_content - sum(map(len, kept))])
        return kept, kept != words

    def _words(self, text: str) -> list[int]:
        """Text in which a spelled control token stays text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text in which a control token is one; a template brings its own beginning, plain text the tokenizer's."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens))) or "(?!)")  # no token: matches nothing


def _squeezed(text: str) -> str:
    return "".join(text.split())
