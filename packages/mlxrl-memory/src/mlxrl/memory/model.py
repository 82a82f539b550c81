"""The shape of a model, read from its config.json: parameters, bytes of weights, and its blocks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mlxrl.memory.blocks import read_blocks
from mlxrl.memory.constants import Backend
from mlxrl.memory.families import FAMILIES, Family
from mlxrl.memory.fields import DTYPE_BYTES, Fields
from mlxrl.memory.layers import Block, Linear
from mlxrl.memory.mixers import refuse_other_mixers
from mlxrl.memory.quantization import Quantization


@dataclass(frozen=True)
class ModelShape:
    """What the memory of a language model depends on; the text part alone, since a vision tower is not loaded.

    Attributes:
        model_type: as in config.json.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding, columns of the logits.
        blocks: the transformer blocks, first to last.
        tied: whether the head is the embedding.
        head_bias: whether the head has a bias (Phi).
        final_norm: elements of the norm before the head.
        dtype: type of an activation and of an element that is not quantised, such as "bfloat16".
        quantization: how linear layers and embeddings are packed; None for a plain 16 or 32-bit model.
        context_length: tokens that the model was made for; None where its config does not say.
        blocks_path: what mlx-lm calls its list of blocks, for `adapting` by full names.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    blocks: tuple[Block, ...]
    tied: bool
    head_bias: bool
    final_norm: int
    dtype: str
    quantization: Quantization | None
    context_length: int | None = None
    blocks_path: str = "model.layers"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads a config.json that has been parsed.

        Dense models (Llama, Mistral, Qwen, Gemma, Phi), mixtures of experts, hybrids with gated-delta layers
        (`text_config` nesting, `layer_types` or `full_attention_interval`), sliding windows, tied embeddings, and
        `quantization`. An unknown `model_type` is counted as a Llama-like model and `known_family` is False.

        Raises:
            ValueError: a field is missing or of no use, or the model's attention is not counted yet.
        """
        fields = Fields(config)
        refuse_other_mixers(fields)
        family = FAMILIES.get(fields.model_type, Family())
        hidden = fields.number("hidden_size")
        packed = fields.get("quantization")
        if packed is not None and not isinstance(packed, Mapping):
            raise ValueError(
                f"config.json field 'quantization' must be an object with bits, got {packed!r}; correct it."
            )
        tied = fields.flag("tie_word_embeddings", family.tied)
        return cls(
            model_type=fields.model_type,
            hidden_size=hidden,
            vocab_size=fields.number("vocab_size"),
            blocks=read_blocks(fields, family),
            tied=tied,
            head_bias=family.head_bias and not tied,
            final_norm=hidden * (1 + family.norm_bias),
            dtype=fields.dtype(),
            quantization=Quantization.from_config(cast("Mapping[str, Any]", packed)) if packed else None,
            context_length=fields.context_length(),
            blocks_path="language_model.model.layers" if fields.nested else "model.layers",
        )

    @classmethod
    def from_path(cls, path: str | Path) -> "ModelShape":
        """Reads a config.json, or the one inside a model's folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not JSON, or lacks a field.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"path must be a model's folder or its config.json, got {str(path)!r}; download it."
            )
        try:
            config: Any = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} must hold JSON, but reading it failed ({error}); download it again.") from error
        if not isinstance(config, Mapping):
            raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}; download it again.")
        if "model_type" not in config:
            raise ValueError(f"{file} must hold 'model_type', but the field is missing; name a language model.")
        return cls.from_config(cast("Mapping[str, Any]", config))

    def on(self, backend: Backend) -> "ModelShape":
        """The model as `mlxrl.policy` loads it there: 16-bit weights are cast to float32 on the CPU."""
        return replace(self, dtype="float32") if backend == "cpu" else self

    @property
    def known_family(self) -> bool:
        """Whether the biases and norms of this `model_type` are known rather than guessed."""
        return self.model_type in FAMILIES

    @property
    def measured(self) -> tuple[Backend, ...]:
        """The backends on which the activations of this `model_type` are measured."""
        return FAMILIES[self.model_type].measured if self.known_family else ()

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an activation and of an element that is not quantised."""
        return DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Elements of all weights; a tied head counts once."""
        tables = sum(table.weights + table.bias_weights for table in self._tables())
        return tables + sum(block.parameters for block in self.blocks) + self.final_norm

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: packed values, scales and biases of quantised matrices, the rest in the dtype."""
        matrices = [(table, table.name) for table in self._tables()]
        matrices += [pair for block in self._linears() for pair in block]
        plain = self.parameters - sum(linear.weights for linear, _ in matrices)
        return plain * self.dtype_bytes + sum(self._matrix_bytes(linear, path) for linear, path in matrices)

    @property
    def merged_copy_bytes(self) -> int:
        """Bytes that a dense copy with the adapters merged adds: float16 for a 16-bit model, float32 for a float32 one.

        New are the weights that are adapted or quantised; of a bfloat16 model all others too, for they are cast.
        """
        if self.dtype == "bfloat16":
            return self.dtype_bytes * self.parameters
        adapted = sum(linear.weights for block in self.blocks for linear in block.adapted_linears)
        others = [(table, table.name) for table in self._tables()]
        others += [(x, path) for block in self._linears() for x, path in block if not x.adapted]
        return self.dtype_bytes * (adapted + sum(x.weights for x, path in others if self._is_packed(x, path)))

    @property
    def unpacked_block_bytes(self) -> int:
        """Bytes of the blocks' adapted and quantised matrices once dequantised."""
        packed = [x for block in self._linears() for x, path in block if x.adapted and self._is_packed(x, path)]
        return self.dtype_bytes * sum(x.weights for x in packed)

    @property
    def unpacked_head_bytes(self) -> int:
        """Bytes of a quantised head once dequantised; 0 where it is not quantised."""
        head = self._tables()[-1]
        return self.dtype_bytes * head.weights * self._is_packed(head, head.name)

    def cache_bytes(self, positions: int) -> int:
        """Bytes of one row's cache with room for so many tokens."""
        return sum(block.cache_bytes(positions, self.dtype_bytes) for block in self.blocks)

    def adapting(self, select: Callable[[int, str], bool]) -> "ModelShape":
        """The same model with adapters on some of its linear layers only.

        Args:
            select: whether the layer of a block, by its number from 0, and of a name in it, such as "mlp.down_proj",
                has one.
        """
        blocks = tuple(
            replace(block, linears=tuple(replace(x, adapted=select(number, x.name)) for x in block.linears))
            for number, block in enumerate(self.blocks)
        )
        return replace(self, blocks=blocks)

    def lora_parameters(self, rank: int, use_dora: bool = False) -> int:
        """Elements of LoRA pairs of this rank on every adapted linear layer, and of DoRA's magnitudes."""
        return sum(linear.lora_parameters(rank, use_dora) for block in self.blocks for linear in block.linears)

    def _linears(self) -> list[list[tuple[Linear, str]]]:
        """Per block its linear layers and their paths, as `quantization` names them."""
        return [[(x, f"{number}.{x.name}") for x in block.linears] for number, block in enumerate(self.blocks)]

    def _tables(self) -> tuple[Linear, ...]:
        embedding = Linear("embed_tokens", self.hidden_size, self.vocab_size)
        head = Linear("lm_head", self.hidden_size, self.vocab_size, self.head_bias)
        return (embedding,) if self.tied else (embedding, head)

    def _is_packed(self, linear: Linear, path: str) -> bool:
        return self.quantization is not None and self.quantization.packs(linear, path)

    def _matrix_bytes(self, linear: Linear, path: str) -> int:
        if self.quantization is None:
            return self.dtype_bytes * linear.weights
        return self.quantization.bytes_of(linear, path, self.dtype_bytes)
