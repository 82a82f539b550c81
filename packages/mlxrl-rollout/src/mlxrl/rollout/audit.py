"""Whether a model's rows stay apart when they decode in one batch; in mlx-lm a few models' do not."""

import mlx.core as mx
import mlx.nn as nn

from mlxrl.rollout.decoder import merge, prefill

PROMPTS = ([1], [2, 3, 4], [3, 1, 4, 1, 5])  # of different lengths, so that positions and masks matter
# Share of the logits' own size; float16 rounding stays within 0.01, a wrong mask or position is far outside.
TOLERANCE = 0.05


def rows_are_independent(model: nn.Module) -> bool:
    """Whether rows of different lengths get, side by side, the logits that each gets alone.

    Two steps of three short prompts are compared, once for a model.

    Args:
        model: an mlx-lm causal language model.
    """
    if not hasattr(model, "_rows_are_independent"):
        object.__setattr__(model, "_rows_are_independent", _same_together(model))
    return bool(model._rows_are_independent)


def _same_together(model: nn.Module) -> bool:
    caches = [prefill(model, prompt) for prompt in PROMPTS]
    try:
        together_2_B_V = _two_steps(model, merge(caches), [prompt[-1] for prompt in PROMPTS])
    except (ValueError, NotImplementedError):  # the model's own code refuses the shapes of a batch
        return False
    alone = [_two_steps(model, merge([prefill(model, prompt)]), [prompt[-1]]) for prompt in PROMPTS]
    alone_2_B_V = mx.concatenate(alone, axis=1)
    distance = mx.linalg.norm(together_2_B_V - alone_2_B_V, axis=-1)
    size = mx.linalg.norm(alone_2_B_V - alone_2_B_V.mean(axis=-1, keepdims=True), axis=-1)
    return bool(mx.all(distance <= TOLERANCE * size).item())


def _two_steps(model: nn.Module, cache: list, inputs: list[int]) -> mx.array:
    first_B_V = model(mx.array(inputs)[:, None], cache=cache)[:, -1]
    second_B_V = model(mx.array([2] * len(inputs))[:, None], cache=cache)[:, -1]
    return mx.stack([first_B_V, second_B_V]).astype(mx.float32)
