"""Logits that are not numbers. Weights are checked where they are read, but finite ones can still overflow.

Every backend gives -1 for the argmax of a row that holds an infinity above or a NaN; the sampler looks at its row too.
"""

from __future__ import annotations

from warpsmith.errors import BadFile

NOT_FINITE = -1  # instead of a token


def not_finite(position: int) -> BadFile:
    return BadFile(
        f"The logits of the token at position {position} are not finite numbers: the model's numbers overflow.",
        "Use the original of this model, or weights of another type.",
    )
