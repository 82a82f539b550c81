"""The shape of a training run: how many rows of how many tokens, in which portions."""

import math
from dataclasses import dataclass, fields

from mlxrl.memory.constants import HEAD_CHUNK_LOGITS, HEAD_CHUNK_POSITIONS, HEAD_CHUNKS
from mlxrl.memory.layers import Recurrence


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
        rollout_width: rows decoded at once; None for all of a step.
        kv_budget_bytes: most bytes of the rows' caches, though one row always fits; None for no bound.
        has_merged_copy: whether rollouts sample from a dense copy of the model with the adapters merged into it.
        micro_batch_size: most rows in one backward pass; None for no cap.
        max_tokens_per_micro_batch: most tokens in one backward pass, though one row always fits; None for no cap.
        gradient_checkpointing: whether each block is recomputed in the backward pass.
        lora_rank: rank of the adapters, which sit on every linear layer of every block unless the model's shape says
            otherwise (`ModelShape.adapting`).
        use_dora: whether the adapters are DoRA, which multiplies by dense weights and keeps its layers' outputs.
        optimizer_states: float32 values the optimizer keeps per adapter element (Adam: 2).
        has_reference: whether a reference forward runs (kl_beta > 0): the same weights with the adapter off.
        has_reference_adapter: whether the reference has an adapter of its own, that the run started from.
        score_chunk: positions per chunk of the head; None for as many as give 2**22 logits, but 128 at least.
        recurrence: how gated-delta layers run in training: "unrolled" is mlx-lm's loop, which keeps two recurrent
            states a token; "fused" is a chunked kernel. Without such layers it means nothing.
    """

    max_prompt_len: int
    max_completion_len: int
    group_size: int = 8
    groups_per_step: int = 1
    max_turns: int = 1
    max_observation_len: int = 0
    max_context: int | None = None
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
    recurrence: Recurrence = "unrolled"

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            if field.name == "recurrence":
                if value not in ("unrolled", "fused"):
                    raise ValueError(f"recurrence must be 'unrolled' or 'fused', got {value!r}; choose one.")
            elif field.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be True or False, got {value!r}; choose one.")
            elif value is not None or field.default is not None:
                least = 0 if field.name in ("max_observation_len", "optimizer_states") else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(
                        f"{field.name} must be a whole number of at least {least}, got {value!r}; raise it."
                    )

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest row: prompt + turns * completion + (turns - 1) * observation, up to max_context."""
        tokens = (
            self.max_prompt_len
            + self.max_turns * self.max_completion_len
            + (self.max_turns - 1) * self.max_observation_len
        )
        return tokens if self.max_context is None else min(tokens, self.max_context)

    @property
    def rows(self) -> int:
        """Rows of one optimizer step."""
        return self.group_size * self.groups_per_step

    @property
    def width(self) -> int:
        """Rows decoded at once."""
        return self.rows if self.rollout_width is None else min(self.rows, self.rollout_width)

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens in one backward pass: shorter rows may fill the budget, and one full row always fits.

        An upper bound: a prompt is counted in each of its rows, though the policy mostly reads it once for all of them.
        """
        rows = self.rows if self.micro_batch_size is None else min(self.rows, self.micro_batch_size)
        tokens = rows * self.sequence_length
        if self.max_tokens_per_micro_batch is not None:
            tokens = min(tokens, self.max_tokens_per_micro_batch)
        return max(self.sequence_length, tokens)

    def head_positions(self, vocab_size: int) -> int:
        """Positions whose logits exist at once in the update."""
        by_default = max(HEAD_CHUNK_POSITIONS, HEAD_CHUNK_LOGITS // vocab_size)
        chunk = by_default if self.score_chunk is None else self.score_chunk
        return min(math.ceil(HEAD_CHUNKS * chunk), self.micro_batch_tokens)
