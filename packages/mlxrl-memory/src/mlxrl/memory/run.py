"""The shape of a training run: how many rows of how many tokens, in which portions."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from mlxrl.memory.constants import (
    BACKENDS,
    CACHE_STEP,
    SHARING,
    Backend,
    BackendConstants,
)


class Reading(NamedTuple):
    """How one backward pass reads its rows.

    Args:
        tokens: that the trunk reads.
        at_once: those of the longest pass; the others wait as they were left.
        forked: positions of prompts of which rows hold copies, keys and values.
    """

    tokens: int
    at_once: int
    forked: int


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What the memory of a run depends on besides the model.

    Attributes:
        max_prompt_len: tokens of the longest prompt.
        max_completion_len: tokens of the longest answer of one turn.
        group_size: rows per prompt.
        groups_per_step: prompts per optimizer step.
        max_turns: answers in one row.
        max_observation_len: tokens of the longest observation between two answers.
        max_context: tokens at which a row ends whatever its turns; None where only these bound it.
        eval_tasks: tasks of a held-out evaluation, each played once with prompts and answers as long as a step's; 0
            where there is none.
        rollout_width: rows decoded at once; None for all of a step, or of an evaluation.
        kv_budget_bytes: most bytes of the rows' caches, though one row always fits; None for no bound.
        has_merged_copy: whether rollouts sample from a dense copy of the model with the adapters merged into it.
        micro_batch_size: most rows in one backward pass; None for no cap.
        max_tokens_per_micro_batch: most tokens in one backward pass, though one row always fits; None for no cap.
        gradient_checkpointing: whether each block is recomputed in the backward pass.
        lora_rank: rank of the adapters, which sit on every linear layer of every block unless the model's shape says
            otherwise (`ModelShape.adapting`).
        use_dora: whether the adapters are DoRA, which has magnitudes besides and keeps its layers' outputs.
        optimizer_states: float32 values the optimizer keeps per adapter element (Adam: 2).
        has_reference: whether a reference forward runs (kl_beta > 0): the same weights with the adapter off.
        has_reference_adapter: whether the reference has an adapter of its own, that the run started from.
        score_chunk: positions per chunk of the head; None for as many as the backend's chunk has.
        shares_prompts: whether a prompt goes through the trunk once for all its rows, where that saves a fifth of the
            tokens; adapters with dropout do not allow it.
        backend: what computes: MLX's "cpu", "cuda" or "metal".
    """

    max_prompt_len: int
    max_completion_len: int
    group_size: int = 8
    groups_per_step: int = 1
    max_turns: int = 1
    max_observation_len: int = 0
    max_context: int | None = None
    eval_tasks: int = 0
    rollout_width: int | None = None
    kv_budget_bytes: int | None = None
    has_merged_copy: bool = False
    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None
    gradient_checkpointing: bool = True
    lora_rank: int = 16
    use_dora: bool = False
    optimizer_states: int = 2
    has_reference: bool = False
    has_reference_adapter: bool = False
    score_chunk: int | None = None
    shares_prompts: bool = True
    backend: Backend = "metal"

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            if field.name == "backend":
                if value not in BACKENDS:
                    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {value!r}; choose one.")
            elif field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, got {value!r}; choose one.")
            elif value is not None or field.default is not None:
                least = 0 if field.name in ("max_observation_len", "eval_tasks", "optimizer_states") else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(
                        f"{field.name} must be a whole number of at least {least}, got {value!r}; raise it."
                    )

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest row: prompt + turns * completion + (turns - 1) * observation, up to max_context."""
        tokens = self.max_prompt_len + self.rest_length
        return tokens if self.max_context is None else min(tokens, self.max_context)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt, up to max_context."""
        return min(self.max_prompt_len, self.sequence_length)

    @property
    def rest_length(self) -> int:
        """Most tokens behind a prompt, for prompts so short that max_context does not cut them."""
        tokens = self.max_turns * self.max_completion_len + (self.max_turns - 1) * self.max_observation_len
        return tokens if self.max_context is None else min(tokens, self.max_context)

    @property
    def rows(self) -> int:
        """Rows of one optimizer step."""
        return self.group_size * self.groups_per_step

    @property
    def width(self) -> int:
        """Rows decoded at once, by a step or by an evaluation, whichever has more."""
        rows = max(self.rows, self.eval_tasks)
        return rows if self.rollout_width is None else min(rows, self.rollout_width)

    @property
    def constants(self) -> BackendConstants:
        """The numbers of the backend."""
        return BACKENDS[self.backend]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What one backward pass may have to read; the one that takes the most memory counts.

        Rows whole; or, where prompts are read once for their rows, the prompts first and then the rest of every row.
        That is done where it leaves at most `SHARING` of the tokens: for prompts up to a length not, and neither for
        the only row of a group whose others cannot move the policy; for rests up to a length it is. A bound on rows may
        cut groups anywhere, so under one rows may share as little as is worthwhile. Shorter rows may fill a budget of
        tokens.
        """
        rows = self.rows if self.micro_batch_size is None else min(self.rows, self.micro_batch_size)
        prompt, rest = self.prompt_length, self.rest_length
        saved = SHARING * rows - self.groups_per_step
        every = self._within_budget(rows * self.sequence_length)
        if not self.shares_prompts or min(rows, self.group_size) == 1:
            return (every,)
        if self.micro_batch_size is not None:
            least_shared = self._within_budget(math.ceil(SHARING * rows * self.sequence_length))
            return every, least_shared._replace(forked=self._forked(rows * prompt))
        if saved <= 0:
            return (every,)
        ratio = (1 - SHARING) * rows / saved  # of a prompt to the rest of its rows, above which it is read once
        whole = self._within_budget(math.ceil(rows * min(self.sequence_length, (1 + ratio) * rest)))
        alone = self._within_budget(self.groups_per_step * self.sequence_length)
        prompts, rests = self.groups_per_step * prompt, round(rows * min(rest, prompt / ratio))
        forked = self._forked(rows * prompt)
        shared = self._within_budget(prompts + rests).tokens
        return whole, alone, Reading(shared, min(shared, max(prompts, rests)), forked)

    def _forked(self, positions: int) -> int:
        """Positions of prompts that rows hold copies of: prompts beyond a budget are not read together."""
        if self.max_tokens_per_micro_batch is None:
            return positions
        most = max(self.max_tokens_per_micro_batch, self.sequence_length)  # one row always fits
        return min(positions, self.group_size * (most + self.prompt_length))

    def _within_budget(self, tokens: int) -> Reading:
        """A reading in one pass; one full row always fits."""
        if self.max_tokens_per_micro_batch is not None:
            tokens = min(tokens, self.max_tokens_per_micro_batch)
        tokens = max(self.sequence_length, tokens)
        return Reading(tokens, tokens, 0)

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of one backward pass."""
        return max(reading.tokens for reading in self.readings)

    @property
    def row_positions(self) -> int:
        """Positions that a row's cache has room for at its longest: a fork of the prompt's, grown in whole steps."""
        return self.prompt_length + math.ceil(self.rest_length / CACHE_STEP) * CACHE_STEP

    def head_positions(self, vocab_size: int) -> int:
        """Positions whose logits exist at once in the update."""
        logits, positions = self.constants.chunk
        chunk = self.score_chunk or max(positions, logits // vocab_size)
        scored = self.rows * self.rest_length
        return min(math.ceil(self.constants.head_chunks * chunk), scored, self.micro_batch_tokens)
