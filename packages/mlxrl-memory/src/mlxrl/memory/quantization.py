"""Bytes of quantised matrices: packed values, and the scales (and biases) of their groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mlxrl.memory.constants import DEFAULT_GROUP, ROUTER_BITS, ROUTER_GROUP
from mlxrl.memory.layers import Linear

BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE = "affine"  # a scale and a bias per group, both in the model's dtype; every other mode has one 8-bit scale
MODES = (AFFINE, "mxfp4", "mxfp8", "nvfp4")


def _no_overrides() -> Mapping[str, "Quantization | None"]:
    return {}


@dataclass(frozen=True)
class Quantization:
    """The `quantization` of a config.json: bits, group size, mode, and the layers that differ.

    `overrides` maps a layer's path (from its block number on, such as `3.mlp.down_proj`, or `embed_tokens`, `lm_head`)
    to its own quantization, None where the layer is left as it is.
    """

    bits: int
    group_size: int = DEFAULT_GROUP
    mode: str = AFFINE
    overrides: "Mapping[str, Quantization | None]" = field(default_factory=_no_overrides, hash=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Quantization":
        """Reads the mapping under `quantization`.

        Raises:
            ValueError: when bits, group_size or mode is no value MLX packs.
        """
        bits, group_size = config.get("bits"), config.get("group_size", DEFAULT_GROUP)
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
            raise ValueError(f"config.json field 'quantization.bits' must be one of {BITS}, got {bits!r}; correct it.")
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ValueError(
                f"config.json field 'quantization.group_size' must be a whole number above 0, got {group_size!r};"
                " 64 is the usual one."
            )
        mode = config.get("mode") or AFFINE
        if mode not in MODES:
            raise ValueError(f"config.json field 'quantization.mode' must be one of {MODES}, got {mode!r}; correct it.")
        overrides = {
            path.split("layers.")[-1] if "layers." in path else path.split(".")[-1]: (
                cls.from_config(cast("Mapping[str, Any]", own)) if isinstance(own, Mapping) else None
            )
            for path, own in config.items()
            if isinstance(own, Mapping) or own is False
        }
        return cls(bits, group_size, mode, overrides)

    def packs(self, linear: Linear, path: str) -> bool:
        """Whether `linear` is quantised; rows that do not divide into groups stay in the model's dtype."""
        return self._of(linear, path) is not None

    def bytes_of(self, linear: Linear, path: str, dtype_bytes: int) -> int:
        """Bytes of the matrices of `linear`."""
        own = self._of(linear, path)
        if own is None:
            return dtype_bytes * linear.weights
        per_group = 2 * dtype_bytes if own.mode == AFFINE else 1
        return linear.weights * own.bits // 8 + linear.weights // own.group_size * per_group

    def _of(self, linear: Linear, path: str) -> "Quantization | None":
        own = self.overrides.get(path, self)
        if own is self and linear.router and self.bits < ROUTER_BITS:
            own = Quantization(ROUTER_BITS, ROUTER_GROUP)
        return None if own is None or linear.inputs % own.group_size else own
