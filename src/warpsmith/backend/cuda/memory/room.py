"""How much of a GPU's memory may still be taken, and why no more."""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT_BYTES = 527 << 20  # what CUDA takes before anything is loaded, on an H200


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Room:
    """What is left for buffers. Printed, it says so as the end of a sentence."""

    device: str
    on_gpu: int  # bytes that nobody has taken
    limit: int | None = None  # of all bytes that this process takes, CUDA's own among them
    held: int = 0  # bytes of its buffers

    @property
    def free(self) -> int:
        left = self.on_gpu if self.limit is None else self.limit - CONTEXT_BYTES - self.held
        return max(0, min(self.on_gpu, left))

    @property
    def limited(self) -> bool:
        """Whether the GPU has more."""
        return self.free < self.on_gpu

    def __str__(self) -> str:
        if self.limit is None or not self.limited:
            return f"{self.device} has {gib(self.free)} free"
        loaded = f" and {gib(self.held)} of buffers" if self.held else ""
        return (
            f"a --memory-limit of {gib(self.limit)} leaves {gib(self.free)} after the CUDA context "
            f"({gib(CONTEXT_BYTES)}){loaded}"
        )
