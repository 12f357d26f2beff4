"""The repository itself: what its documents promise is so, and so are the house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from huggingface_hub import constants

from commands import ENVIRONMENT, VERBS, succeeds
from warpsmith import errors
from warpsmith.cli.prompt import history_path
from warpsmith.draft.costs import cache_directory

ROOT = Path(__file__).parents[1]


def test_the_tests_keep_out_of_the_users_own_folders() -> None:
    for path in (cache_directory(), history_path(), Path(constants.HF_HUB_CACHE)):
        assert path.is_relative_to(ROOT / ".pytest_cache")


def test_skipped_tests_say_why(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\ndef test_x(): pytest.skip('there is no abacus')\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert "there is no abacus" in result.stdout


def test_every_error_of_ours_has_a_fix() -> None:
    """But those about the contract between engine and backends, which no user breaks."""
    usual = {"BadFile"}
    for file in (ROOT / "src/warpsmith").rglob("*.py"):
        if "backend" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                ours = issubclass(getattr(errors, name, Exception), errors.WarpsmithError)
                assert not ours or name in usual or len(node.exc.args) == 2, f"{file}:{node.lineno}"
    assert all(getattr(errors, name)("A problem.").fix for name in usual)


def fenced(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def test_examples_in_the_documents_run(tmp_path: Path) -> None:
    for document in (ROOT / "docs/python-api.md", ROOT / "README.md"):
        program = "\n".join(fenced(document, "python"))
        assert program
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=300
        )
        assert result.returncode == 0, (document, result.stderr)


def test_the_readme_has_commands_for_a_fresh_machine() -> None:
    commands = [line for block in fenced(ROOT / "README.md", "sh") for line in block.splitlines() if "python3" in line]
    cpu, gpu, tests = commands
    assert cpu.endswith('pip install -q . && .venv/bin/warpsmith run -p "def fibonacci(n):"')
    assert gpu == cpu.replace("install -q .", "install -q '.[cuda]'")
    pattern = re.search(r"grep -E '(.*)' README.md", (ROOT / ".ci/run").read_text())
    assert pattern
    assert [line for line in commands if re.search(pattern[1], line)] == [tests]  # the one that CI runs


def test_the_chart_shows_the_numbers_beside_it() -> None:
    chart, readme = (ROOT / "docs/decode-speed.svg").read_text(), (ROOT / "README.md").read_text()
    rates = [int(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) tok/s<", chart)]
    bars = [int(width) for width in re.findall(r'<rect x="100" .*?width="(\d+)"', chart)]
    assert len(rates) == len(bars) == 3
    assert bars == [round(rate / 5) for rate in rates]
    assert all(f"{rate:,}" in readme for rate in rates)


def test_documented_flags_exist() -> None:
    known = set(
        re.findall(r"--[a-z][a-z-]+", "".join(succeeds(*verb.split(), "--help") for verb in (*VERBS, "bench spec")))
    )
    for name in ("README.md", "docs/cli.md"):
        text = re.sub(r"^python3 .*$", "", (ROOT / name).read_text(), flags=re.MULTILINE)
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known == set(), name
