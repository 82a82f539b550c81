"""What of the engine's ways a model can go: compared, once a model, with plain passes that keep nothing.

The texts compared are short: faults that show only in long ones, or that move logits little, are listed by module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.rollout.caches import Cache, join, new_cache, row_bytes, select
from mlxrl.rollout.decoder import Prefilled, Reader

# Three rows of different length, so that positions and masks matter: a prompt, two steps, more to read, and a step.
PROMPTS = ([1], [2, 3, 4], [3, 1, 4, 1, 5])
STEPS = (2, 3)
MORE = ([6, 2], [2], [1, 5, 3, 2])
LAST = 4
# Share of the logits' own size; float16 rounding stays within 0.01, a wrong mask or position is far outside.
TOLERANCE = 0.05
# The ways to play the three rows, the fastest first: which of them share a cache, and whether they are read padded.
WAYS = (([[0, 1, 2]], True), ([[0, 1, 2]], False), ([[0], [1], [2]], False))

# Faults that these texts may not show at full size, by module of mlx_lm.models: what a cache gets wrong in any row, ...
REFUSED = {
    "gemma3n": "without a cache, layers that share keys and values compute their own",
    "phi3small": "a boolean mask is added to the scores, so that a pass over a whole text sees the future",
    "plamo3": "its mask lets one more token through than the cache of a window keeps",
}
# ... and what it gets wrong only where rows of different length are batched.
ROW_BY_ROW = {
    "afm7": "layers that reuse keys turn their queries to the padded length, not to the row's own",
    "longcat_flash_ngram": "rows remember their last tokens, padding among them",
    "minimax_m3_vl": "blocks of keys are cut over padded places, not over the row's own",
}


@dataclass(frozen=True)
class Audit:
    """What the engine may do with a model.

    Args:
        batched: rows of different length may decode side by side.
        ragged: texts of different length may be read in one padded pass.
        reason: why not, where something is False; empty otherwise.
        sample: a cache of one row that has read something, to measure by; None where not even one row can be played.
    """

    batched: bool
    ragged: bool
    reason: str = ""
    sample: Cache | None = None

    @property
    def playable(self) -> bool:
        """Whether the model can be played at all."""
        return self.sample is not None

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes that a row of `num_tokens` tokens keeps in its cache."""
        return row_bytes(self.sample or [], num_tokens)


def audit(model: nn.Module) -> Audit:
    """Play a few tokens in each of the engine's ways, the fastest first, and take the first that gives the truth.

    A way that is known to fail on longer texts is not tried. The verdict is kept with the model.

    Args:
        model: an mlx-lm causal language model.
    """
    if not hasattr(model, "_rollout_audit"):
        object.__setattr__(model, "_rollout_audit", _audit(model))
    verdict: Any = model._rollout_audit
    return verdict


def _audit(model: nn.Module) -> Audit:
    module = type(model).__module__.rsplit(".", 1)[-1]
    if module in REFUSED:
        return Audit(batched=False, ragged=False, reason=REFUSED[module])
    reason = ROW_BY_ROW.get(module, "")
    texts = [[*prompt, *STEPS, *more, LAST] for prompt, more in zip(PROMPTS, MORE, strict=True)]
    truth = [model(mx.array([text]))[0].astype(mx.float32) for text in texts]
    for groups, ragged in WAYS[-1:] if reason else WAYS:
        try:
            played: dict[int, list[mx.array]] = {}
            sample: Cache | None = None
            for rows in groups:
                sample, logits = _play(model, rows, ragged=ragged)
                played |= logits
            differing = [row for row, logits in played.items() if not _agree(logits, truth[row], row)]
        except Exception as error:  # each model's code refuses in its own way what it cannot do
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        if not differing:
            return Audit(batched=len(groups) == 1, ragged=ragged, reason=reason, sample=sample)
        reason = reason or "its logits differ from those of a pass over the whole text"
    return Audit(batched=False, ragged=False, reason=reason)


def _play(model: nn.Module, rows: Sequence[int], *, ragged: bool) -> tuple[Cache, dict[int, list[mx.array]]]:
    """What the engine does with rows; a cache of one of them, and per row the logits after each thing it read."""
    reader = Reader(model)

    def read(caches: Sequence[Cache], texts: Sequence[list[int]]) -> Prefilled:
        if ragged:
            return reader(join(caches), texts)
        apart = [reader(cache, [text]) for cache, text in zip(caches, texts, strict=True)]
        return Prefilled(join([part.cache for part in apart]), mx.concatenate([part.logits for part in apart]))

    def step(cache: Cache, token: int, num_rows: int) -> mx.array:
        return model(mx.array([[token]] * num_rows), cache=cache)[:, -1]

    cache, logits_B_V = read([new_cache(model, 1) for _ in rows], [PROMPTS[row] for row in rows])
    seen = [logits_B_V, *(step(cache, token, len(rows)) for token in STEPS)]
    # the row with one more token decodes it, the others leave the batch to read theirs, and join it again
    steps = [place for place, row in enumerate(rows) if len(MORE[row]) == 1]
    reads = [place for place, row in enumerate(rows) if len(MORE[row]) > 1]
    parts: list[Prefilled] = []
    if steps:
        decoding = select(cache, steps)
        parts.append(Prefilled(decoding, step(decoding, MORE[rows[steps[0]]][0], len(steps))))
    if reads:
        parts.append(read([select(cache, [place]) for place in reads], [MORE[rows[place]] for place in reads]))
    cache = join([part.cache for part in parts])
    after_B_V = mx.concatenate([part.logits for part in parts])
    last_B_V = step(cache, LAST, len(rows))
    order = [*steps, *reads]
    played: dict[int, list[mx.array]] = {}
    for place, row in enumerate(rows):
        later = order.index(place)
        played[row] = [*(logits_B_V[place] for logits_B_V in seen), after_B_V[later], last_B_V[later]]
    return select(cache, [0]), played


def _agree(logits: Sequence[mx.array], truth_T_V: mx.array, row: int) -> bool:
    end = len(PROMPTS[row])
    more = end + len(STEPS) + len(MORE[row])
    true_5_V = truth_T_V[mx.array([end - 1, end, end + 1, more - 1, more])]
    distance_5 = mx.linalg.norm(mx.stack(list(logits)).astype(mx.float32) - true_5_V, axis=-1)
    size_5 = mx.linalg.norm(true_5_V - true_5_V.mean(axis=-1, keepdims=True), axis=-1)
    return bool(mx.all(distance_5 <= TOLERANCE * size_5).item())
