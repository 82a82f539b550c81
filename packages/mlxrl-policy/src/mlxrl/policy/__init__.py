"""A language model as a policy: load it with LoRA, score tokens, save and load adapters."""

from mlxrl.policy import _cuda_graphs, _platform  # noqa: F401  (first: before MLX computes, and it may be missing)
from mlxrl.policy.adapters import adapter_parameters, load_adapter, save_adapter
from mlxrl.policy.checkpointing import checkpoint_blocks
from mlxrl.policy.decoding import decoding
from mlxrl.policy.errors import ModelError
from mlxrl.policy.head import split_head
from mlxrl.policy.load import context_length, find_model, load_policy_with_lora, read_config, register_model
from mlxrl.policy.lora import LoRAConfig, PolicyReport, adapter_replaced, adapters_disabled, dropout_active
from mlxrl.policy.merged import MergedPolicy
from mlxrl.policy.rows import flatten_quantized_rows, on_cuda
from mlxrl.policy.score import Scores, score
from mlxrl.policy.shared_prefix import Reading, plan_reading, shares_prefixes, whole_rows
from mlxrl.policy.targets import is_target

__all__ = [
    "LoRAConfig",
    "MergedPolicy",
    "ModelError",
    "PolicyReport",
    "Reading",
    "Scores",
    "adapter_parameters",
    "adapter_replaced",
    "adapters_disabled",
    "checkpoint_blocks",
    "context_length",
    "decoding",
    "dropout_active",
    "find_model",
    "flatten_quantized_rows",
    "is_target",
    "load_adapter",
    "load_policy_with_lora",
    "on_cuda",
    "plan_reading",
    "read_config",
    "register_model",
    "save_adapter",
    "score",
    "shares_prefixes",
    "split_head",
    "whole_rows",
]
