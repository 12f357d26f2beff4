"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "warpsmith.cli"]
VERBS = ("run", "chat", "serve", "launch", "bench", "show", "pull", "convert", "synth", "doctor")
# one thread for numpy: on a busy machine many threads wait for each other most of the time
ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def warpsmith(*args: str | Path, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *map(str, args)], input=stdin, capture_output=True, timeout=300, env=ENVIRONMENT | environment
    )
    out, err = result.stdout.decode(), result.stderr.decode()
    return subprocess.CompletedProcess(result.args, result.returncode, out, err)


def succeeds(*args: str | Path, stdin: bytes = b"") -> str:
    result = warpsmith(*args, stdin=stdin)
    assert result.returncode == 0, result.stderr
    return result.stdout


def fails(code: int, *args: str | Path, stdin: bytes = b"") -> str:
    """The command fails as it should: its code, nothing on stdout, no traceback. Returns what it says."""
    result = warpsmith(*args, stdin=stdin)
    assert result.returncode == code, (result.returncode, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr
