"""The law of imports: a floor of the house knows those below it, and nothing of those above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import warpsmith

HOUSE = Path(warpsmith.__file__).parent
FLOORS = ("cli", "serve", "measure", "llm", "engine", "draft", "backend", "model", "checkpoint", "wisp", "errors")
DEVICES = ("reference", "cpu", "cuda")


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere in it, with their parents left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            found |= {f"warpsmith.{alias.name}" for alias in node.names} if module == "warpsmith" else {module}
    return {name for name in found if name.startswith("warpsmith.")}


FILES = sorted(path for path in HOUSE.rglob("*.py") if path.parent != HOUSE or path.stem in FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_point_down(path: Path) -> None:
    floor = path.relative_to(HOUSE).parts[0].removesuffix(".py")
    for name in imported(path):
        other = name.split(".")[1]
        if other in FLOORS:
            assert FLOORS.index(other) >= FLOORS.index(floor), f"{floor} must not know {name}"


@pytest.mark.parametrize("device", DEVICES)
def test_devices_know_nothing_of_each_other(device: str) -> None:
    """But for the reference's numpy, which others fall back on or are compared with."""
    for path in (HOUSE / "backend" / device).rglob("*.py"):
        for other in {"cpu", "cuda"} - {device}:
            assert not any(name.startswith(f"warpsmith.backend.{other}") for name in imported(path)), path


def test_the_floors_are_all_there_are() -> None:
    here = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here - {"__init__"} <= set(FLOORS)
