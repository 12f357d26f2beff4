"""The one form in which weights reach a backend, whatever file they came from.

Canonical tensors carry GGUF's names and conventions, because quantised blocks cannot be changed without loss:
  * value heads in tiled order: value head h pairs with key head h mod nk;
  * norm weights with their +1 folded in (`ssm_norm`, the gated norm, is plain);
  * `ssm_a` = -exp(A_log); `ssm_conv1d` is [channels, taps], oldest tap first;
  * matrices are [out, in], row-major, in the block type the file stores.
Metadata uses GGUF's keys too (`qwen35.block_count`, ...), so the configuration has one reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from warpsmith.checkpoint.blocks import BlockType, dequantize
from warpsmith.checkpoint.finite import finite
from warpsmith.errors import BadFile, ModelNotFound

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class Tensor:
    """A weight that has not been read yet. `read` returns uint8 [rows, row_bytes], a view where it can be."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] = field(repr=False)

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.elements // self.type.elems * self.type.bytes

    def raw(self) -> np.ndarray:
        """The stored blocks, uint8 [rows, row_bytes]; rows are all dimensions but the last."""
        return self.read()

    def float32(self) -> np.ndarray:
        """The values, dequantised exactly as llama.cpp does."""
        return dequantize(self.type, self.raw()).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: canonical metadata and tensors, and where its tokenizer is."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: dict[str, Tensor]
    tokenizer_dir: Path | None = None  # a directory with tokenizer.json; None: look in the metadata
    chat_template: str | None = None

    @property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one) or a directory of safetensors or of one GGUF model."""
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        raise BadFile(f"{brief(str(path))} cannot be read: {error.strerror}.", "Check the path.") from None


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        if (path / "config.json").exists():
            from warpsmith.checkpoint.safetensors import open_directory

            return open_directory(path)
        files = sorted(path.glob("*.gguf"))
        models = {_SPLIT.sub("", file.name) for file in files}
        if len(models) == 1:
            return _open_gguf(files[0])
        what = f"holds {len(models)} GGUF models" if files else "has no config.json and no GGUF file"
        raise BadFile(f"{path} {what}.", "Name the file to load.")
    if not path.exists():
        raise ModelNotFound(f"There is no model at {path}.", "Check the path, or pull one with `warpsmith pull`.")
    if path.suffix == ".safetensors":
        raise BadFile(f"{path} is one file of a model directory.", f"Pass the directory instead: {path.parent}.")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    from warpsmith.checkpoint.gguf import open_gguf

    file = open_gguf(path)
    tensors: dict[str, Tensor] = {}
    for stored in file.tensors.values():
        # Ollama's converter leaves the suffix off
        name = stored.name + ".bias" if stored.name.endswith(".ssm_dt") else stored.name
        read = finite(path, name, stored.type, stored.raw)
        tensors[name] = Tensor(name, stored.type, stored.shape, read)
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(path, file.metadata, tensors, None, template if isinstance(template, str) else None)


def rope_sections(rotary_dim: int) -> list[int]:
    """How many frequencies take the time, height, width and an unused axis. Text gives all axes one position, so
    only other engines, which insist on the numbers, see a difference."""
    half = rotary_dim // 2
    return [(half + 2) // 3, (half + 1) // 3, half // 3, 0]


def brief(value: object) -> str:
    """A value from a file in the words of an error message, however large or deep it is."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
