"""Which types of weights the activations-first pass multiplies, and what each is in its stream of slabs.

A type is its slab in kernels/large/slab.cuh, its way there in kernels/large/pack.cu, and its lines here.
"""

from __future__ import annotations

SLABS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "HALF")  # SlabType
SLAB_BYTES = {"Q4_K": 2368, "Q5_K": 2880, "Q6_K": 3360, "Q8_0": 4416, "HALF": 8256}
# What a type of a file is in the stream, exactly, and its number for `pack`.
SOURCES = {
    "Q4_K": ("Q4_K", 0), "Q5_K": ("Q5_K", 1), "Q6_K": ("Q6_K", 2), "Q8_0": ("Q8_0", 3), "F16": ("HALF", 4),
    "BF16": ("HALF", 5), "Q4_0": ("Q8_0", 6), "Q5_0": ("Q8_0", 7), "IQ4_NL": ("Q8_0", 8),
}  # fmt: skip
EMBEDDINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # EmbeddingType
ROUNDED = "BF16"  # what any other type is handed over as
