"""wisp, the small model that comes with the package, and a DFlash draft for it: see docs/wisp.md."""

from __future__ import annotations

from pathlib import Path

WISP = Path(__file__).with_name("wisp.gguf")
WISP_DRAFT = Path(__file__).with_name("wisp-dflash.gguf")
