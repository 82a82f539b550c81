"""Draw tokens: one key per row, so that a row's draws do not depend on its neighbours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any

import mlx.core as mx

# Below it logits are divided into infinities.
LEAST_TEMPERATURE = 1e-4

Drawing = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token (for evaluation only).
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1], and those as likely as the
            least of them; 1 keeps all.
        top_k: keep the top_k most likely tokens, and those as likely as the last of them; 0 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1); 0 keeps all.
        max_tokens: tokens per action, at least 1.
        stop: texts that end an action; the token that completes one is the action's last.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), Real) or isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}.")
            try:
                object.__setattr__(self, name, float(getattr(self, name)))
            except OverflowError as error:
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}.") from error
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be at least {LEAST_TEMPERATURE}, or 0 for the most likely token, got "
                f"{self.temperature}."
            )
        if not is_whole(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number of at least 0 (0 keeps every token), got {self.top_k}.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}.")
        if not is_whole(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number of at least 1, got {self.max_tokens}.")
        for name in ("top_k", "max_tokens"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}.")

    @property
    def full_support(self) -> bool:
        """Whether every token can be drawn, so that sampler and scorer see one distribution."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python's or NumPy's; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def draw(
    logits_B_V: mx.array, keys_B_2: mx.array, positions_B: mx.array, config: SamplingConfig
) -> tuple[mx.array, mx.array]:
    """One token per row and its log-probability under the distribution it was drawn from.

    Args:
        logits_B_V: logits `[B, V]` of any float type; the arithmetic is float32.
        keys_B_2: uint32 `[B, 2]`, the rows' keys.
        positions_B: uint32 `[B]`, how many tokens the row has drawn before.
        config: temperature and filters.

    Returns:
        Token ids int32 `[B]` and log-probabilities float32 `[B]`; with temperature 0, those at temperature 1.
    """
    logits_B_V = logits_B_V.astype(mx.float32)
    if config.temperature == 0:
        tokens_B = mx.argmax(logits_B_V, axis=-1)
    else:
        logits_B_V = _filtered(logits_B_V / config.temperature, config)
        keys_B_2 = mx.stack([keys_B_2[:, 0], keys_B_2[:, 1] + positions_B], axis=1)
        tokens_B = _categorical(logits_B_V, keys_B_2)
    chosen_B = mx.take_along_axis(logits_B_V, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B.astype(mx.int32), chosen_B - mx.logsumexp(logits_B_V, axis=-1)


def drawing(configs: Sequence[SamplingConfig]) -> Drawing:
    """`draw` for rows that have settings of their own; rows of equal settings are drawn together.

    Args:
        configs: a row's settings each, B of them.

    Returns:
        A function of logits `[B, V]`, keys `[B, 2]` and positions `[B]` that returns what `draw` returns.
    """
    rows_of: dict[SamplingConfig, list[int]] = {}
    for row, config in enumerate(configs):
        rows_of.setdefault(config, []).append(row)
    if len({_on_device(config) for config in rows_of}) == 1:
        compiled = mx.default_device().type == mx.DeviceType.gpu  # there the number of kernels is what a draw costs
        return _uniform_drawing(_on_device(configs[0]), compiled=compiled)
    order = mx.argsort(mx.array([row for rows in rows_of.values() for row in rows]))
    indices = [(config, mx.array(rows)) for config, rows in rows_of.items()]

    def draw_each(logits_B_V: mx.array, keys_B_2: mx.array, positions_B: mx.array) -> tuple[mx.array, mx.array]:
        drawn = [draw(logits_B_V[rows], keys_B_2[rows], positions_B[rows], config) for config, rows in indices]
        tokens_B, logprobs_B = (mx.concatenate([part[i] for part in drawn])[order] for i in (0, 1))
        return tokens_B, logprobs_B

    return draw_each


def _on_device(config: SamplingConfig) -> SamplingConfig:
    """What of a setting the device sees: limit and stop texts are the host's business."""
    return replace(config, max_tokens=1, stop=())


@lru_cache(maxsize=16)
def _uniform_drawing(config: SamplingConfig, *, compiled: bool) -> Drawing:
    function: Any = partial(draw, config=config)
    return mx.compile(function) if compiled else function


_categorical = mx.vmap(lambda logits_V, key_2: mx.random.categorical(logits_V, key=key_2))


def _filtered(logits_B_V: mx.array, config: SamplingConfig) -> mx.array:
    """Logits with -inf at the tokens that the filters drop; the filters act in the order top-k, top-p, min-p."""
    if 0 < config.top_k < logits_B_V.shape[-1]:
        least_B_1 = mx.min(mx.topk(logits_B_V, config.top_k, axis=-1), axis=-1, keepdims=True)
        logits_B_V = mx.where(logits_B_V >= least_B_1, logits_B_V, -mx.inf)
    if config.top_p < 1:
        sorted_B_V = -mx.sort(-logits_B_V, axis=-1)
        before_B_V = mx.cumsum(mx.softmax(sorted_B_V, axis=-1), axis=-1, inclusive=False)
        least_B_1 = mx.where(before_B_V < config.top_p, sorted_B_V, sorted_B_V[:, :1]).min(axis=-1, keepdims=True)
        logits_B_V = mx.where(logits_B_V >= least_B_1, logits_B_V, -mx.inf)
    if config.min_p > 0:
        least_B_1 = logits_B_V.max(axis=-1, keepdims=True) + math.log(config.min_p)
        logits_B_V = mx.where(logits_B_V >= least_B_1, logits_B_V, -mx.inf)
    return logits_B_V
