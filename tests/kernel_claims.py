"""What the host says of a kernel, asserted in the kernel's own source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from warpsmith.backend.cuda.build.compiler import compile_source
from warpsmith.errors import WarpsmithError

LAST = "all that was claimed before holds"


def check_claims(source: str, claims: Iterable[str], architecture: str, constants: Mapping[str, object]) -> None:
    """One assertion more fails always, so that the compiler ends where code would be made, which takes far longer; no
    other may fail."""
    asserted = [f'static_assert({claim}, "{claim}");' for claim in claims]
    text = "\n".join([source, *asserted, f'static_assert(sizeof(int) == 0, "{LAST}");'])
    with pytest.raises(WarpsmithError) as refused:
        compile_source(text, "claims.cu", architecture, constants)
    assert LAST in str(refused.value)
    assert str(refused.value).count("error:") == 1, refused.value
