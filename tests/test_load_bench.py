"""The load program, on a small scale: its clients are the rude ones of the real run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "bench" / "load_server.py"


def test_nothing_is_lost_and_every_text_is_the_text_alone() -> None:
    small = ["--requests", "80", "--clients", "12", "--levels", "1", "2", "--tokens", "4", "--rounds", "1"]
    result = subprocess.run([sys.executable, PROGRAM, *small], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"^\| (finished|left|refused) +\| (\d+)", result.stdout, re.MULTILINE)
    counts = {name: int(n) for name, n in found}
    assert sum(counts.values()) == 80
    assert min(counts.values()) > 0
    assert len(re.findall(r"^\| (?:auto|none) +\| [12] ", result.stdout, re.MULTILINE)) == 4
