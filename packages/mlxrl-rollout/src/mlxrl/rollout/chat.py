"""From messages to token ids, once and without ever re-encoding what was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.env import Message, as_messages

# Stands for message i in a rendered template; no chat template changes it.
PLACEHOLDER = "mlxrl-message-{}-here"


@dataclass(frozen=True)
class EncodedObservation:
    """Tokens of an observation: template text around its own words.

    Args:
        token_ids: the tokens, ending where the model is to speak.
        content: per token, whether it is the observation's own text (True) or the template's (False).
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
        self._control_tokens = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._pieces_of_roles: dict[tuple[str, ...], list[str]] = {}

    def prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt, ending where the model is to speak."""
        return self.opening(prompt).token_ids

    def opening(self, prompt: str | Sequence[Message], *, max_content: int | None = None) -> EncodedObservation:
        """Tokens of an observation that the model sees alone, as the first of a segment.

        Args:
            prompt: the observation.
            max_content: most tokens of its own text; None keeps all.
        """
        messages = as_messages(prompt)
        texts = [message["content"] for message in messages]
        if not self.templated:
            token_ids = list(self.tokenizer.encode("\n".join(texts), split_special_tokens=True))
            kept = token_ids[:max_content]
            return EncodedObservation(kept, [True] * len(kept), cut=len(kept) < len(token_ids))
        if max_content is None and not any(token in text for token in self._control_tokens for text in texts):
            token_ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, **self.template_kwargs
            )
            return EncodedObservation(list(token_ids), [False] * len(token_ids), cut=False)
        return EncodedObservation(*self._woven(self._pieces([m["role"] for m in messages]), texts, max_content))

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
        texts = [message["content"] for message in messages]
        if not self.templated:
            pieces = [""] * (len(messages) + 1)
        else:
            action_and_roles = ["assistant", *(message["role"] for message in messages)]
            pieces = self._pieces(["user", *action_and_roles])[2:]  # what stands before the action is there already
        token_ids, content, cut = self._woven(pieces, texts, max_content)
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
            messages = [{"role": role, "content": PLACEHOLDER.format(i)} for i, role in enumerate(roles)]
            rest = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
            )
            pieces = []
            for message in messages:
                piece, found, rest = rest.partition(message["content"])
                if not found:
                    raise ValueError(f"the chat template drops or reorders messages of the roles {list(roles)}.")
                pieces.append(piece)
            self._pieces_of_roles[key] = [*pieces, rest]
        return self._pieces_of_roles[key]

    def _woven(
        self, pieces: Sequence[str], texts: Sequence[str], max_content: int | None
    ) -> tuple[list[int], list[bool], bool]:
        """pieces[0] texts[0] pieces[1] ...; a control token spelled inside a text stays text."""
        token_ids: list[int] = []
        content: list[bool] = []
        left, cut = max_content, False
        for i, piece in enumerate(pieces):
            scaffold = self.tokenizer.encode(piece, add_special_tokens=False) if piece else []
            token_ids += scaffold
            content += [False] * len(scaffold)
            if i < len(texts):
                words = self.tokenizer.encode(texts[i], add_special_tokens=False, split_special_tokens=True)
                if left is not None:
                    cut = cut or len(words) > left
                    words = words[:left]
                    left -= len(words)
                token_ids += words
                content += [True] * len(words)
        return token_ids, content, cut
