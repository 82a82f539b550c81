"""Load a model from a folder or the hub, ready to train."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlxrl.policy.checkpointing import checkpoint_blocks
from mlxrl.policy.column_major import lay_out_by_columns
from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import split_head
from mlxrl.policy.lora import LoRAConfig, PolicyReport, attach_lora, describe, refuse_unscorable
from mlxrl.policy.rows import flatten_quantized_rows

_registered: dict[str, Path] = {}


def load_policy_with_lora(
    model_id: str | Path, config: LoRAConfig | None = None
) -> tuple[nn.Module, TokenizerWrapper, PolicyReport]:
    """Load a causal language model, freeze it, and attach a LoRA adapter to the linear layers of every block.

    On MLX's CPU backend, where 16-bit arithmetic is ten to forty times slower, 16-bit parameters are cast to float32,
    and dense weights laid out for its products (`mlxrl.policy.column_major`).
    On CUDA, quantized layers read their weights once for all rows of a batch (`flatten_quantized_rows`).

    Args:
        model_id: a folder in mlx-lm format, or the name of a model on the hub.
        config: the adapter; by default rank 16, scale 2, on every linear layer.

    Returns:
        The model (in evaluation mode, only the adapter trainable), its tokenizer, and a report.

    Raises:
        ModelError: the model cannot be found or read, cannot be scored or trained, or the adapter does not fit it.
    """
    config = config or LoRAConfig()
    folder = find_model(model_id)
    fields = read_config(folder)
    try:
        model, tokenizer, *_ = mlx_lm.load(str(folder))
    except Exception as error:  # whatever mlx-lm meets in a config, weights or tokenizer that are broken or do not fit
        raise ModelError(
            f"model_id {str(model_id)!r} was found but cannot be loaded; see whether config.json, weights and "
            f"tokenizer in {folder} are whole and of one model. mlx-lm says {type(error).__name__}: {error}"
        ) from error
    refuse_unscorable(model)
    if mx.default_device().type == mx.cpu:
        model.set_dtype(mx.float32)
        lay_out_by_columns(model)
    if mx.cuda.is_available():
        flatten_quantized_rows(model)
    separable = split_head(model) is not None
    keys = attach_lora(model, config)
    if config.grad_checkpoint:
        checkpoint_blocks(model)
    mx.eval(model.parameters())
    return (
        model,
        tokenizer,
        describe(
            model,
            model_type=fields["model_type"],
            context_length=context_length(fields),
            keys=keys,
            separable_head=separable,
        ),
    )


def context_length(config: Mapping[str, Any]) -> int | None:
    """Most tokens that a model was made for, or None where it does not say.

    Args:
        config: the fields of its config.json, or those that mlx-lm keeps of them (`vars(model.args)`).
    """
    text: Any = config.get("text_config") or {}
    of_text = text if isinstance(text, Mapping) else getattr(text, "__dict__", {})
    return config.get("max_position_embeddings") or of_text.get("max_position_embeddings")


def register_model(name: str, folder: Path) -> None:
    """Let `name`, which has no slash as hub names have, stand for a model folder wherever a model_id is asked for."""
    if "/" in name:
        raise ModelError(f"a registered model name must not have a slash, got {name!r}.")
    _registered[name] = folder


def find_model(model_id: str | Path, *, config_only: bool = False) -> Path:
    """The folder of a model: a local one, the hub's cached copy, or a fresh download.

    Args:
        model_id: a folder, a name given to `register_model`, or a hub name like `mlx-community/Qwen3-0.6B-4bit`.
        config_only: fetch config.json alone.

    Raises:
        ModelError: there is no such folder, or the hub has no such model or cannot be reached.
    """
    folder = _registered.get(str(model_id), Path(model_id).expanduser())
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model_id {str(model_id)!r} is a folder without config.json; name a model in mlx-lm format."
            )
        return folder
    name = str(model_id)
    if name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ModelError(f"model_id {name!r} is no folder, and no hub name like 'mlx-community/Qwen3-0.6B-4bit'.")
    # wider patterns than mlx-lm's would miss files in the cache that it did not fetch
    patterns = ["config.json"] if config_only else DEFAULT_ALLOW_PATTERNS
    reason = ""
    for cached in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=cached))
            missing = _missing_file(folder, config_only=config_only)
        except Exception as error:  # whatever the hub client raises: not cached, no network, no access, no such model
            reason = type(error).__name__
            continue
        if missing is None:
            return folder
        reason = f"{missing} is missing"
    raise ModelError(
        f"model_id {name!r} is neither a local folder nor in the hub cache, and the hub did not give it "
        f"({reason}); check the name and the network, or name a local folder."
    )


def _missing_file(folder: Path, *, config_only: bool) -> str | None:
    """A file that a snapshot lacks: other programs, and downloads that were cut short, leave parts in the cache."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if config_only:
        return None
    found = {path.name for path in folder.glob("model*.safetensors")}  # as mlx-lm looks for them
    if not found:
        return "model*.safetensors"
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" in found or not index.is_file():
        return None
    shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return min(set(shards.values()) - found, default=None)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        ModelError: the file is not valid JSON or has no `model_type`.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:  # no JSON, no text, or nested beyond all measure
        raise ModelError(f"{folder / 'config.json'} is not valid JSON: {error}.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{folder / 'config.json'} has no model_type; it does not describe a language model.")
    return config
