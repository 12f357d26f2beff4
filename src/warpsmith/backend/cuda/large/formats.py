"""Which types of weights the activations-first pass multiplies, and what each is in its stream of slabs.

A type is its slab in kernels/large/slab.cuh, its way there in kernels/large/pack.cu, and its lines here.
"""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """How rows are handed over: what they are in the stream, their number for `pack`, the type of their blocks."""

    slab: str
    number: int
    type: str


SLABS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "HALF")  # SlabType
SLAB_BYTES = {"Q4_K": 2368, "Q5_K": 2880, "Q6_K": 3360, "Q8_0": 4416, "HALF": 8256}
SLAB_WEIGHTS = 16 * 256  # rows x k
# Superblocks of 64 rows that are copied at once, where an SM has room for that.
PARCEL_BLOCKS = {name: 2 if 2 * 4 * slab <= 28 << 10 else 1 for name, slab in SLAB_BYTES.items()}
# What a type of a file is in the stream: exactly, or rounded on the device.
_EXACT = {"Q4_K": "Q4_K", "Q5_K": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0", "F16": "HALF", "BF16": "HALF", "Q4_0": "Q8_0",
          "Q5_0": "Q8_0", "IQ4_NL": "Q8_0"}  # fmt: skip
_ROUNDED = {"F16": "Q8_0", "BF16": "Q8_0"}
SOURCES = {kind: Source(slab, number, kind) for number, (kind, slab) in enumerate(_EXACT.items())} | {
    f"{kind} to {slab}": Source(slab, len(_EXACT) + number, kind)
    for number, (kind, slab) in enumerate(_ROUNDED.items())
}
EMBEDDINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # EmbeddingType
ROUNDED = "BF16"  # what any other type is handed over as
