"""From one format to another: a checkpoint as a GGUF file or as a directory of safetensors, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpsmith.checkpoint.blocks import TYPES, BlockType, dequantize
from warpsmith.checkpoint.canonical import Checkpoint, Tensor
from warpsmith.checkpoint.gguf_writer import GGUFWriter, Typed
from warpsmith.checkpoint.quantize import RECIPES, quantize, recipe_type
from warpsmith.checkpoint.safetensors_writer import write_directory
from warpsmith.errors import BadRequest

FLOATS = ("F32", "F16", "BF16")

# Numbers that llama.cpp gives the recipes in `general.file_type`.
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32}

_PIECE = 1 << 22  # weights converted at a time
_LAYER = re.compile(r"blk\.(\d+)\.")


def to_gguf(
    checkpoint: Checkpoint,
    metadata: Mapping[str, Any],
    path: str | Path,
    recipe: str | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a checkpoint as GGUF under `metadata`; without a recipe every tensor keeps its type.

    `metadata` is the whole of it, tokenizer and chat template included. `progress` hears of bytes read.
    """
    types = {name: _target(tensor, recipe, checkpoint) for name, tensor in checkpoint.tensors.items()}
    if recipe:
        metadata = {**metadata, **recipe_metadata(recipe)}
    pieces = (
        (name, types[name], tensor.shape, converted(tensor, types[name], progress))
        for name, tensor in checkpoint.tensors.items()
    )
    write_pieces(path, metadata, list(pieces))


def write_pieces(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, BlockType, tuple[int, ...], Iterable[NDArray[np.uint8]]]],
) -> None:
    """Write a GGUF file of (name, type, shape, stored bytes in pieces)."""
    with GGUFWriter(path, _writable(metadata)) as writer:
        for name, block_type, shape, _ in tensors:
            writer.declare(name, block_type, shape)
        for name, _, _, pieces in tensors:
            writer.write(name, pieces)


def _writable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without what belonged to the file it came from, and with a type for lists that show none."""
    return {
        key: Typed("str", value) if value == [] else value
        for key, value in metadata.items()
        if key != "general.alignment" and not key.startswith("split.")
    }


def to_safetensors(checkpoint: Checkpoint, path: str | Path, dtype: str = "BF16") -> None:
    """Write the weights and config.json as Hugging Face names them. The tokenizer's files are the caller's."""
    if dtype not in FLOATS:
        raise BadRequest(f"Safetensors directories hold no {dtype} blocks.", "Use bf16, f16 or f32, or GGUF.")
    write_directory(Path(path), checkpoint.metadata, checkpoint.tensors, dtype)


def exact_dtype(checkpoint: Checkpoint) -> str:
    """The type of a safetensors directory that holds a float model's matrices to the bit: their own, or where they have
    several the narrowest that does."""
    matrices = [tensor for name, tensor in checkpoint.tensors.items() if is_matrix(name, tensor.shape)]
    kinds = {tensor.type.name for tensor in matrices}
    if blocks := sorted(kinds - set(FLOATS)):
        raise BadRequest(
            f"{checkpoint.path} holds {', '.join(blocks)} weights, which a directory of safetensors cannot.",
            "Add --type f32 to hold them exactly, --type bf16 to have them rounded, or write a .gguf file.",
        )
    candidates = kinds if len(kinds) == 1 else ("BF16", "F16", "F32")
    return next(dtype for dtype in candidates if all(_survives(tensor, dtype) for tensor in matrices))


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not name.endswith("ssm_conv1d.weight")


def _survives(tensor: Tensor, dtype: str) -> bool:
    """Whether a float tensor comes back the same from `dtype`. Files in bf16 often keep some tensors in f32."""
    if tensor.type.name == dtype or dtype == "F32":
        return True
    if tensor.type.name != "F32":
        return False
    values = tensor.float32()
    return np.array_equal(dequantize(TYPES[dtype], quantize(TYPES[dtype], values)), values)


def rounded_types(tensors: Iterable[Tensor], recipe: str | None) -> list[str]:
    """Block types of tensors that lose bits when widened as the recipe says: all but float32 round them."""
    if recipe not in ("bf16", "f16"):
        return []
    return sorted({tensor.type.name for tensor in tensors} - set(FLOATS))


def tensor_type(recipe: str, name: str, shape: tuple[int, ...], layers: int, tied: bool) -> BlockType:
    """What `recipe` stores a tensor as; `layers` counts MTP layers too."""
    if recipe not in RECIPES:
        raise BadRequest(f"There is no weight type {recipe!r}.", f"Use one of {', '.join(RECIPES)}.")
    layer = _LAYER.match(name)
    return TYPES[recipe_type(recipe, name, int(layer[1]) if layer else None, layers, tied, shape)]


def recipe_metadata(recipe: str) -> dict[str, Any]:
    """What a file says about how its weights are stored."""
    return {"general.file_type": FILE_TYPES[recipe], "general.quantization_version": 2}


def _target(tensor: Tensor, recipe: str | None, checkpoint: Checkpoint) -> BlockType:
    if recipe is None:
        return tensor.type
    tied = "output.weight" not in checkpoint.tensors
    layers = checkpoint.metadata["qwen35.block_count"]
    return target_type(tensor, tensor_type(recipe, tensor.name, tensor.shape, layers, tied), str(checkpoint.path))


def target_type(tensor: Tensor, target: BlockType, source: str) -> BlockType:
    """The type, unless the tensor would be quantised a second time."""
    if target != tensor.type and target.name not in FLOATS and tensor.type.name not in FLOATS:
        raise BadRequest(
            f"{source}: {tensor.name} is {tensor.type.name} already, and quantising it again as "
            f"{target.name} would lose twice.",
            "Convert the bf16 original, or choose bf16, f16 or f32.",
        )
    return target


def converted(tensor: Tensor, target: BlockType, progress: Callable[[int], object]) -> Iterator[NDArray[np.uint8]]:
    """A tensor's bytes in the target type. Blocks that have it already are passed on untouched."""
    rows = tensor.raw()
    step = max(1, _PIECE // tensor.shape[-1])
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        yield piece if tensor.type == target else quantize(target, dequantize(tensor.type, piece))
        progress(piece.nbytes)
