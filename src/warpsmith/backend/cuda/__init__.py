"""The CUDA engine: hand-written kernels, built by NVRTC for the chip at hand, one dispatch a forward pass."""

from warpsmith.backend.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
