"""Checkpoints in parts small enough to travel: bf16, its nearly constant exponent bytes deflated, nothing lost.

python -m train.shards PREFIX DIR TOKENIZER     join PREFIX.0, PREFIX.1, ... into a model directory that anything opens
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 15 * 2**20


def save(prefix: Path, tensors: dict[str, Tensor], config: dict) -> list[Path]:
    """Matrices as bf16, vectors as fp32. Rewrites the parts in place."""
    matrices, vectors, index = [], [], []
    for name, tensor in tensors.items():
        matrix = tensor.dim() > 1
        index.append((name, list(tensor.shape), matrix))
        flat = tensor.detach().to("cpu", torch.bfloat16 if matrix else torch.float32).flatten()
        (matrices if matrix else vectors).append(flat.view(torch.int16).numpy() if matrix else flat.numpy())
    words = np.concatenate(matrices).view(np.uint8).reshape(-1, 2)
    exponents = zlib.compress(words[:, 1].tobytes(), 6)
    header = json.dumps({"index": index, "config": config, "exponents": len(exponents)}).encode()
    blob = struct.pack("<I", len(header)) + header + exponents + words[:, 0].tobytes()
    blob += np.concatenate([np.zeros(0, np.float32), *vectors]).tobytes()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, start in enumerate(range(0, len(blob), PART_BYTES)):
        paths.append(prefix.with_name(f"{prefix.name}.{i}"))
        paths[-1].write_bytes(blob[start : start + PART_BYTES])
    return paths


def load(prefix: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors (bf16 and fp32) and the config that `save` was given."""
    parts = []
    while (part := prefix.with_name(f"{prefix.name}.{len(parts)}")).exists():
        parts.append(part.read_bytes())
    if not parts:
        raise FileNotFoundError(f"no {prefix}.0")
    blob = b"".join(parts)
    (length,) = struct.unpack_from("<I", blob)
    header = json.loads(blob[4 : 4 + length])
    start = 4 + length
    high = np.frombuffer(zlib.decompress(blob[start : start + header["exponents"]]), np.uint8)
    start += header["exponents"]
    low = np.frombuffer(blob, np.uint8, len(high), start)
    words = torch.from_numpy(np.stack([low, high], 1).reshape(-1).view(np.int16)).view(torch.bfloat16)
    floats = torch.from_numpy(np.frombuffer(blob, np.float32, offset=start + len(high)).copy())
    tensors, at = {}, {True: 0, False: 0}
    for name, shape, matrix in header["index"]:
        count = int(np.prod(shape))
        source = words if matrix else floats
        tensors[name] = source[at[matrix] : at[matrix] + count].reshape(shape).clone()
        at[matrix] += count
    return tensors, header["config"]


def join(prefix: Path, out: Path, tokenizer: Path) -> None:
    """Write the parts and a tokenizer's files as a directory that Hugging Face's tools and ours can open."""
    from safetensors.torch import save_file

    tensors, config = load(prefix)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in tokenizer.iterdir():
        shutil.copy(file, out)
    print(f"{out}: {len(tensors)} tensors, {sum(t.numel() for t in tensors.values()) / 1e6:.2f}M parameters")


if __name__ == "__main__":
    join(*map(Path, sys.argv[1:]))
