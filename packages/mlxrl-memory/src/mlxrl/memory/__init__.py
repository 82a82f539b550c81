"""Predicts the device memory of a reinforcement-learning run from a model's config.json."""

from mlxrl.memory.constants import Backend
from mlxrl.memory.estimation import MemoryEstimate, estimate
from mlxrl.memory.fitting import FitResult, Proposal, fit
from mlxrl.memory.known import known_config
from mlxrl.memory.machine import available_memory, human_bytes
from mlxrl.memory.mixers import UncountedError
from mlxrl.memory.model import ModelShape
from mlxrl.memory.run import RunShape

__all__ = [
    "Backend",
    "FitResult",
    "MemoryEstimate",
    "ModelShape",
    "Proposal",
    "RunShape",
    "UncountedError",
    "available_memory",
    "estimate",
    "fit",
    "human_bytes",
    "known_config",
]
