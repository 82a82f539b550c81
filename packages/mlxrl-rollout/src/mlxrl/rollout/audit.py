"""What of the engine's ways a model can go: compared, once a model, with plain passes that keep nothing.

The texts compared are short: faults that show only in long ones, or that move logits little, are listed by module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrl.rollout.caches import Cache, RowBytes, join, new_cache, select
from mlxrl.rollout.decoder import Prefilled, Reader

# Three rows of different length, so that positions and masks matter: a prompt, two steps, more to read, and a step.
PROMPTS = ([1], [2, 3, 4], [3, 1, 4, 1, 5])
STEPS = (2, 3)
MORE = ([6, 2], [2], [1, 5, 3, 2])
LAST = 4
# Share of the logits' own size; float16 rounding stays within 0.01, a wrong mask or position is far outside.
TOLERANCE = 0.05
# Through many layers of 16 bits rounding takes more: this many times what it takes between plain passes is tolerated,
# up to a cap, for known faults are of 0.3 and more.
ROUNDING_MULTIPLE, MOST_TOLERANCE = 3, 0.2
# What passes of one shape may differ by in what they say of the same tokens.
SAME = 0.01
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
        row_bytes: bytes that a row of so many tokens keeps in its cache; None where not even one row can be played.
    """

    batched: bool
    ragged: bool
    reason: str = ""
    row_bytes: RowBytes | None = None


def audit(model: nn.Module) -> Audit:
    """Play a few tokens in each of the engine's ways, the fastest first, and take the first that gives the truth.

    A way that is known to fail on longer texts is not tried. The verdict is kept with the model, for as long as its
    weights are of the same types.

    Args:
        model: an mlx-lm causal language model.
    """
    weights: Any = tree_flatten(model.parameters())
    dtypes = {name: weight.dtype for name, weight in weights}
    kept: Any = getattr(model, "_rollout_audit", None)
    if kept is None or kept[0] != dtypes:
        kept = dtypes, _audit(model)
        object.__setattr__(model, "_rollout_audit", kept)
    verdict: Audit = kept[1]
    return verdict


def _audit(model: nn.Module) -> Audit:
    module = type(model).__module__.rsplit(".", 1)[-1]
    if module in REFUSED:
        return Audit(batched=False, ragged=False, reason=REFUSED[module])
    reason = ROW_BY_ROW.get(module, "")
    texts = [[*prompt, *STEPS, *more, LAST] for prompt, more in zip(PROMPTS, MORE, strict=True)]
    truth = [_plain(model, text) for text in texts]
    tolerance = _tolerance(model, texts, truth)
    for groups, ragged in WAYS[-1:] if reason else WAYS:
        try:
            cache: Cache = []
            distances: list[float] = []
            for rows in groups:
                cache, played = _play(model, rows, ragged=ragged)
                for row, logits in played.items():
                    distances += _distances(mx.stack(logits), truth[row][_places(row)])
        except Exception as error:  # each model's code refuses in its own way what it cannot do
            reason = f"{type(error).__name__}: {error}"
            continue
        if max(distances) <= tolerance:
            return Audit(batched=len(groups) == 1, ragged=ragged, reason=reason, row_bytes=RowBytes.of(cache))
        reason = (
            f"its logits differ from those of a pass over the whole text by {max(distances):.2g} of their size, "
            f"where rounding may take {tolerance:.2g}"
        )
    return Audit(batched=False, ragged=False, reason=reason)


def _plain(model: nn.Module, text: Sequence[int]) -> mx.array:
    """Logits float32 `[T, V]` of a pass over a text alone, without a cache."""
    return model(mx.array([text]))[0].astype(mx.float32)


def _tolerance(model: nn.Module, texts: Sequence[list[int]], truth: Sequence[mx.array]) -> float:
    """How far from the truth logits may be, by how far rounding alone takes this model's, where it is 16-bit.

    Rounding shows where a text is read alone, as far as its first token, or as the beginning of a longer text: what is
    said of the tokens that both have is the same, but other kernels compute it. What comes after them changes nothing,
    to the bit where as much comes; else the model sees the future, and that is no rounding.
    """
    if model(mx.array([texts[0]])).dtype == mx.float32:
        return TOLERANCE
    rounding: list[float] = []
    future: list[float] = []
    for text, truth_T_V in zip(texts, truth, strict=True):
        longer_T_V, other_T_V = (
            _plain(model, [*text, *tail])[: len(text)] for tail in (3 * text, 3 * len(text) * [LAST])
        )
        rounding += _distances(_plain(model, text[:1]), truth_T_V[:1]) + _distances(longer_T_V, truth_T_V)
        future += _distances(other_T_V, longer_T_V)
    if max(future) > SAME:
        return TOLERANCE
    return min(max(TOLERANCE, ROUNDING_MULTIPLE * max(rounding)), MOST_TOLERANCE)


def _play(model: nn.Module, rows: Sequence[int], *, ragged: bool) -> tuple[Cache, dict[int, list[mx.array]]]:
    """What the engine does with rows; their cache, and per row the logits after each thing it read."""
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
    return cache, played


def _places(row: int) -> mx.array:
    """After which tokens of a row's text the engine's logits are."""
    end = len(PROMPTS[row])
    more = end + len(STEPS) + len(MORE[row])
    return mx.array([end - 1, end, end + 1, more - 1, more])


def _distances(logits_T_V: mx.array, truth_T_V: mx.array) -> list[float]:
    """How far from the truth logits are, as shares of its own size, by position; infinite where they are no numbers."""
    distance_T = mx.linalg.norm(logits_T_V.astype(mx.float32) - truth_T_V, axis=-1)
    size_T = mx.linalg.norm(truth_T_V - truth_T_V.mean(axis=-1, keepdims=True), axis=-1)
    shares: Any = mx.nan_to_num(distance_T / mx.maximum(size_T, 1e-9), nan=mx.inf, posinf=mx.inf).tolist()
    return shares
