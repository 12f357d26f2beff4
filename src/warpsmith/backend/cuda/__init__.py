"""The CUDA engine: hand-written kernels, built by NVRTC for the chip at hand, one dispatch a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.large.layout import takes
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.shape import LARGEST_HIDDEN
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import Config

__all__ = ["CudaBackend", "LargeBackend", "open_backend"]

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FEW_BYTES = 2048  # hidden size up to which a model of K-quants is faster when it is held in BF16


def open_backend(config: Config, tensors: Mapping[str, Tensor], **settings: Any) -> CudaBackend:
    """The model on the GPU, with the forward pass that suits it: activations first for models too wide for the other,
    and for K-quants, which stay as they are in the file. That one is written for compute capability 9.0."""
    wide = config.hidden > LARGEST_HIDDEN
    quantised = config.hidden > FEW_BYTES and any(tensor.type.name in K_QUANTS for tensor in tensors.values())
    if (wide or quantised) and takes(config) and Device().chip.capability == (9, 0):
        return LargeBackend(config, tensors, **settings)
    return CudaBackend(config, tensors, **settings)
