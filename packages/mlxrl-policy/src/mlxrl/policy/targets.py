"""Which layers of a model are adapted."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import blocks_of

EXPERT_TYPES = (SwitchLinear, QuantizedSwitchLinear)
LINEAR_TYPES = (nn.Linear, nn.QuantizedLinear, *EXPERT_TYPES)
# Linear layers whose model takes their weight out by name, past any adapter around them: of kimi_k3 and of gemma3n.
READ_BY_NAME = ("self_attention_res_proj", "mlp_res_proj", "altup.prediction_coefs", "altup.correction_coefs")


def is_target(path: str, targets: Sequence[str]) -> bool:
    """Whether a layer is one of the targets; without targets every layer is.

    A target is whole names of the path in a row: its end ("q_proj"), its beginning ("model.layers.3"), or between
    ("self_attn", "layers.3.mlp"). `*` stands for any text, dots included, `?` for a character, `[12]` for one of these.

    Args:
        path: full name of the layer, e.g. "model.layers.3.self_attn.q_proj".
        targets: names or patterns.
    """
    return not targets or any(fnmatchcase(f".{path}.", f"*.{target}.*") for target in targets)


def select_layers(
    model: nn.Module, targets: Sequence[str], last_layers: int | None
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """The linear layers to adapt.

    Args:
        model: an mlx-lm model.
        targets: see `is_target`.
        last_layers: blocks from the end to look in; None looks in all.

    Returns:
        The layers by their full names, and the same as mlx-lm's `keys`, sorted: names within a block where every block
        looked in has all of its layers of these names adapted, full names otherwise.

    Raises:
        ModelError: a target names no linear layer, or the model has fewer blocks than last_layers.
    """
    blocks = blocks_of(model)
    if last_layers is not None and last_layers > len(blocks):
        raise ModelError(f"last_layers = {last_layers} exceeds the {len(blocks)} blocks of the model; lower it.")
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, tuple[str, nn.Module]] = {}
    for block in blocks[-(last_layers or len(blocks)) :]:
        for name, module in block.named_modules():
            if isinstance(module, LINEAR_TYPES) and name not in READ_BY_NAME:
                found[paths[id(module)]] = name, module
    if missing := [target for target in targets if not any(is_target(path, [target]) for path in found)]:
        where = "model" if last_layers is None else f"last {last_layers} of the {len(blocks)} blocks"
        names = sorted({name for name, _ in found.values()})
        raise ModelError(
            f"LoRA targets {missing} name no linear layer of the {where}, which has {names} in its blocks, "
            f"in full for example {min(found)!r}."
        )
    chosen = {path: name for path, (name, _) in found.items() if is_target(path, targets)}
    names = set(chosen.values())
    uniform = all(path in chosen for path, (name, _) in found.items() if name in names)
    return {path: found[path][1] for path in chosen}, tuple(sorted(names if uniform else chosen))
