"""The CUDA engine: hand-written kernels, built by NVRTC for the chip at hand, one dispatch a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.choice import activations_first
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config

__all__ = ["CudaBackend", "LargeBackend", "WeightsFirstBackend", "open_backend"]


def open_backend(
    config: Config,
    tensors: Mapping[str, Tensor],
    *,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    **settings: Any,
) -> CudaBackend:
    """The model on the GPU, with the forward pass that suits it."""
    stored = {name: tensor.type.name for name, tensor in tensors.items()}
    if activations_first(config, stored):
        return LargeBackend(config, tensors, cache_type_k=cache_type_k, cache_type_v=cache_type_v, **settings)
    if (cache_type_k, cache_type_v) != ("f16", "f16"):
        raise NoDevice(
            "The GPU keeps keys and values of this model in f16 only.", "Leave -ctk and -ctv out, or use --device cpu."
        )
    return WeightsFirstBackend(config, tensors, **settings)
