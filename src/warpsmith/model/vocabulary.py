"""What vocabularies of the family have in common, whatever file they came from."""

from __future__ import annotations

import numpy as np

# Token types as GGUF numbers them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# How text is cut before BPE. The two differ in \p{M}: qwen35 keeps combining marks with their letters.
SPLIT = {
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

MAX_IDS = 1 << 20  # four times the family's vocabulary; bounds what a hostile id can make us allocate
REFETCH = "Download or convert the model again."


def filler(id: int) -> str:
    return f"[PAD{id}]"


def is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
