"""The kernels of prompts, built for a model and its chip side by side, and loaded when they are first launched."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.prefill.plan import header, kernels_of
from warpsmith.backend.cuda.prefill.streams import PromptStream

Key = tuple[str, tuple[tuple[str, object], ...]]  # a kernel's name, and what its build is told besides the model


class PromptKernels:
    def __init__(self, device: Device, weights: PromptStream, options: Mapping[str, object]) -> None:
        """Start all builds. `options`: what every one is told besides."""
        self._device = device
        self._images: dict[Key, Future[bytes]] = {}
        self.loaded: dict[Key, Any] = {}
        pool = ThreadPoolExecutor(8)
        model = header(weights) | dict(options)
        for name, extra in kernels_of(weights):
            job = pool.submit(build, f"prefill/{name}.cu", weights.architecture, model | extra)
            self._images[name, tuple(extra.items())] = job
        pool.shutdown(wait=False)

    def get(self, name: str, shared: int = 0, **extra: object) -> Any:
        key = (name, tuple(extra.items()))
        if key not in self.loaded:
            self.loaded[key] = self._device.load(self._images[key].result()).kernel(name, shared)
        return self.loaded[key]

    def product(self, name: str, shared: int, constants: dict[str, object]) -> Any:
        """As `Product` asks for one."""
        return self.get(name, shared, **constants)
