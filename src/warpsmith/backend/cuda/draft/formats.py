"""What the matrices of a draft are held as."""

from __future__ import annotations

from warpsmith.backend.cuda.large.formats import SOURCES

HELD = "Q8_0"  # where they are wider in the file, unless asked otherwise


def handed_over(kind: str, held: str | None = HELD) -> str:
    """What a type of a file is handed over as, for weights that are held as it is in the file, or with `held`, if they
    are wider than that, rounded."""
    if held == "Q8_0" and kind in ("BF16", "F32"):
        return "BF16 to Q8_0"
    if held == "Q8_0" and kind == "F16":
        return "F16 to Q8_0"
    return kind if kind in SOURCES else "Q8_0" if held else "BF16"
