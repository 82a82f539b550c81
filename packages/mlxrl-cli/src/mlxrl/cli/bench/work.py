"""The work that every contestant is given: the same tokens to read and the same tokens to draw."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl.policy import ModelError

WORDS = ["red", "blue", "green", "black", "small", "large", "old", "new", "good", "cold", "warm", "light", "dark"]
OBSERVATION = "Go on."


@dataclass(frozen=True)
class RolloutWork:
    """Completions of plain prompts, the samples of a prompt next to each other.

    Args:
        prompts: the texts, as they are, without a chat template.
        prompt_ids: their tokens, equally many each.
        samples: rows of each prompt.
        max_tokens: most tokens of a row.
        temperature: sampling temperature; no filters.
        limits: per row its own limit; None gives every row `max_tokens`.
    """

    prompts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    samples: int
    max_tokens: int
    temperature: float
    limits: Sequence[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are drawn if no row ends before its limit."""
        return sum(self.row_limits)

    @property
    def row_limits(self) -> Sequence[int]:
        """Per row, the most tokens it draws."""
        return self.limits or [self.max_tokens] * (len(self.prompts) * self.samples)


@dataclass(frozen=True)
class MultiturnWork:
    """Episodes of `turns` actions in an environment that always answers `OBSERVATION`.

    The texts around task and observation are those that inductive-mlxrl writes, so that all read the same tokens.

    Args:
        tasks: the texts of the tasks.
        samples: episodes of each task.
        turns: actions of an episode.
        max_tokens: tokens of an action.
        temperature: sampling temperature; no filters.
        observation: what the environment answers.
    """

    tasks: Sequence[str]
    samples: int
    turns: int
    max_tokens: int
    temperature: float
    observation: str = OBSERVATION

    @property
    def num_tokens(self) -> int:
        """Tokens of all actions."""
        return len(self.tasks) * self.samples * self.turns * self.max_tokens

    def opening(self, task: str) -> str:
        """What the model reads before its first action."""
        return f"Task:\n{task}{self.answer}"

    @property
    def answer(self) -> str:
        """What the model reads before each later action."""
        return f"\nObservation:\n{self.observation}\nAction:\n"


@dataclass(frozen=True)
class UpdateWork:
    """Completions to take a training step on, those of a prompt next to each other.

    Args:
        prompt_ids: tokens of the prompts, equally many each.
        completion_ids: tokens of all rows' completions, equally many each.
        samples: completions of a prompt.
        rewards: one a row.
        micro_batch_tokens: most tokens of a pass; None is no limit.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    samples: int
    rewards: Sequence[float]
    micro_batch_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return sum(map(len, self.completion_ids))

    @property
    def prompts_of_rows(self) -> list[Sequence[int]]:
        """Per row its prompt."""
        return [prompt for prompt in self.prompt_ids for _ in range(self.samples)]

    def whole_rows(self) -> list[slice]:
        """The rows of each pass where rows are read whole; one always fits."""
        rows = len(self.completion_ids)
        row_tokens = len(self.prompt_ids[0]) + len(self.completion_ids[0])
        step = rows if self.micro_batch_tokens is None else max(1, self.micro_batch_tokens // row_tokens)
        return [slice(start, start + step) for start in range(0, rows, step)]


def make_update_work(
    vocab_size: int,
    prompts: int,
    samples: int,
    prompt_len: int,
    max_tokens: int,
    micro_batch_tokens: int | None,
    seed: int,
) -> UpdateWork:
    """Random tokens; every second completion of a prompt is rewarded, so that none has the mean reward."""
    generator = np.random.default_rng(seed)
    return UpdateWork(
        prompt_ids=generator.integers(vocab_size, size=(prompts, prompt_len)).tolist(),
        completion_ids=generator.integers(vocab_size, size=(prompts * samples, max_tokens)).tolist(),
        samples=samples,
        rewards=[float(row % samples % 2) for row in range(prompts * samples)],
        micro_batch_tokens=micro_batch_tokens,
    )


def make_texts(tokenizer: TokenizerWrapper, count: int, num_tokens: int, seed: int) -> list[str]:
    """Texts of exactly `num_tokens` tokens each.

    Raises:
        ModelError: the tokenizer gives no such text.
    """
    generator = random.Random(seed)
    return [_text_of(tokenizer, num_tokens, generator) for _ in range(count)]


def _text_of(tokenizer: TokenizerWrapper, num_tokens: int, generator: random.Random) -> str:
    for _ in range(100):  # a cut within a word may be read as other tokens: then the next words
        words = " ".join(generator.choices(WORDS, k=num_tokens))
        text = tokenizer.decode(tokenizer.encode(words)[:num_tokens], skip_special_tokens=True)
        if len(tokenizer.encode(text)) == num_tokens:
            return text
    raise ModelError(f"the model's tokenizer gives no text of --prompt-len {num_tokens} tokens; choose another length.")


def spread_limits(rows: int, max_tokens: int) -> list[int]:
    """Row i of n gets the i-th of n limits spread evenly over 1 to `max_tokens`; a single row gets `max_tokens`."""
    if rows == 1:
        return [max_tokens]
    return [1 + row * (max_tokens - 1) // (rows - 1) for row in range(rows)]


def declare_ends(tokenizer: TokenizerWrapper, token_ids: Sequence[int]) -> None:
    """Let these tokens, and no others, end a row; for whoever asks mlx-lm's tokenizer or the one inside it."""
    tokenizer.eos_token = None
    tokenizer.eos_token_ids = token_ids


def choose_ends(sampled_B_T: np.ndarray, mean_length: float, vocab_size: int) -> list[int]:
    """End tokens that leave rows like these `mean_length` tokens on average: all ids that are r modulo m.

    Random weights give every id a share and none a meaning, so any set of ids will do; one of this form has its share
    among ids that were never drawn here, too. m and r are those with which the first end and the ends after it come
    closest to one in `mean_length` tokens: ends that come in bursts would tell little about the next rows.

    Args:
        sampled_B_T: int `[B, T]`, rows drawn without an end.
        mean_length: tokens of a row, end token included.
        vocab_size: ids are below it.
    """
    length = sampled_B_T.shape[1]

    def miss(choice: tuple[int, int]) -> float:
        hits_B_T = sampled_B_T % choice[0] == choice[1]
        lengths_B = np.where(hits_B_T.any(axis=1), hits_B_T.argmax(axis=1) + 1, length)
        return abs(float(lengths_B.mean()) / mean_length - 1) + abs(float(hits_B_T.mean()) * mean_length - 1)

    modulus, remainder = min(((m, r) for m in range(1, min(vocab_size, 128) + 1) for r in range(m)), key=miss)
    return list(range(remainder, vocab_size, modulus))
