"""Prompts through kernels of their own (kernels/prefill)."""

from warpsmith.backend.cuda.prefill.plan import buffer_bytes, suits
from warpsmith.backend.cuda.prefill.run import Prefill

__all__ = ["Prefill", "buffer_bytes", "suits"]
