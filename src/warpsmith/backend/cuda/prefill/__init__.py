"""Prompts through kernels of their own (kernels/prefill)."""

from warpsmith.backend.cuda.prefill.plan import buffer_bytes
from warpsmith.backend.cuda.prefill.run import Prefill
from warpsmith.backend.cuda.prefill.streams import RowTiles, SlabStream

__all__ = ["Prefill", "RowTiles", "SlabStream", "buffer_bytes"]
