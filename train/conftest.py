"""Tiny shapes: a second thread only waits for the first, and oneDNN prepares longer than it computes."""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
