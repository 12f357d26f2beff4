"""What a hostile file says is shown, not obeyed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpsmith.checkpoint.convert import to_gguf
from warpsmith.cli.escape import printable
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import random_checkpoint

SMALL = replace(SIZES["tiny"], name="\x1b]0;owned\x07", layers=2, recurrent=(True, False), ffn=256, vocab=272)
EVIL = "\x1b[2J\x9b31mevil\rerror:\u202e\u2066\x00"


@given(st.text())
def test_printable_text_is_printable_and_unchanged_where_it_was(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("metadata", "command"),
    [
        ({f"a{EVIL}b": f"c{EVIL}d"}, ["show"]),
        ({"general.name": EVIL}, ["bench", "-p", "1", "-n", "1", "-r", "1", "-m"]),
        ({"tokenizer.chat_template": "{{ raise_exception('" + EVIL + "') }}"}, ["run", "--chat", "-p", "x", "-m"]),
        ({"tokenizer.chat_template": "{{ messages['" + EVIL + "'].x }}"}, ["run", "--chat", "-p", "x", "-m"]),
        ({"tokenizer.chat_template": "{% " + EVIL}, ["run", "--chat", "-p", "x", "-m"]),
        ({"general.sampling.temp": EVIL}, ["run", "-p", "x", "-m"]),
        ({"tokenizer.ggml.pre": EVIL}, ["run", "-p", "x", "-m"]),
        ({"general.architecture": EVIL}, ["run", "-p", "x", "-m"]),
    ],
)
def test_no_control_character_of_a_file_is_printed(
    tmp_path: Path, metadata: dict[str, str], command: list[str]
) -> None:
    source, path = random_checkpoint(SMALL), tmp_path / f"{EVIL[:-1]}.gguf"
    to_gguf(source, {**source.metadata, **metadata}, path)
    result = subprocess.run(
        [sys.executable, "-m", "warpsmith.cli", *command, str(path)], capture_output=True, timeout=120
    )
    text = (result.stdout + result.stderr).decode()
    assert r"\x1b" in text, "it was shown"
    assert all(line.isprintable() for line in text.split("\n")), text
