"""One schedule, and formats that know nothing of it: a stage that is added reaches every consumer or fails; nothing but
a format's class and header names it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from warpsmith.backend.cpu import loading as cpu_loading
from warpsmith.backend.cuda import schedule
from warpsmith.backend.cuda.build.compiler import compile_source, sources, target
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.builds import build_constants
from warpsmith.backend.cuda.memory.driver import Chip
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.schedule import OPERATIONS, Operation, Schedule
from warpsmith.backend.cuda.shape import WIDE
from warpsmith.backend.cuda.weights.formats import FORMATS
from warpsmith.errors import NoDevice, WarpsmithError
from warpsmith.model import plan
from warpsmith.model.config import SIZES, Config
from warpsmith.model.plan import Stage

MODEL = SIZES["0.8B"]
CUDA = Path(str(files("warpsmith.backend.cuda")))
REAL_PLAN = plan.forward_plan


def with_a_stage(config: Config) -> list[Stage]:
    """The plan with one stage more in every layer, before the MLP: its matrix is the gate's."""
    stages = []
    for stage in REAL_PLAN(config):
        if stage.op == "mlp_in":
            stages.append(Stage("extra", stage.layer, ("x",), ("e",), {"project": stage.weights["gate"]}))
        stages.append(stage)
    return stages


@pytest.fixture
def longer_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, cpu_loading):
        monkeypatch.setattr(module, "forward_plan", with_a_stage)


EXTRA = Operation(
    slot="EXTRA", reads=("x",), writes=("e",), takes="mid", publishes="h", tile_rows=WIDE, parts=(("project",),)
)


# -- a stage that is added ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("longer_plan")
def test_a_stage_that_no_kernel_runs_is_refused() -> None:
    with pytest.raises(WarpsmithError, match=r"no stage extra\.0"):
        Schedule(MODEL, 132)
    with pytest.raises(WarpsmithError, match="extra"):
        cpu_loading.check_plan(MODEL)


def test_a_stage_with_other_weights_or_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"weights": {"gate": "a"}}, {"reads": ("y",)}, {"writes": ("h", "g")}):
        changed = [replace(s, **changes) if s.name == "mlp_in.5" else s for s in REAL_PLAN(MODEL)]  # type: ignore[arg-type]
        monkeypatch.setattr(plan, "forward_plan", lambda config, changed=changed: changed)
        with pytest.raises(WarpsmithError, match=r"no stage mlp_in\.5"):
            Schedule(MODEL, 132)


def test_a_layer_of_its_own_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [s for s in REAL_PLAN(MODEL) if s.name != "mlp_out.3"]
    monkeypatch.setattr(plan, "forward_plan", lambda config: shorter if config is MODEL else REAL_PLAN(config))
    with pytest.raises(WarpsmithError, match="same slots in every layer"):
        Schedule(MODEL, 132)


@pytest.mark.usefixtures("longer_plan")
def test_a_described_stage_reaches_the_stream_and_the_traces_and_fails_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPERATIONS, "extra", EXTRA)
    layout = Layout(MODEL, 132)
    assert layout.schedule.number("extra.2") == 1 + 2 * 6 + 3
    assert [held.stage.slot for held in layout.stream.parts][3:6] == ["MIX_OUT", "EXTRA", "MLP_IN"]
    header = layout.headers()["schedule.cuh"]
    assert "enum Slot { MIX_IN, MIX, MIX_OUT, EXTRA, MLP_IN, MLP_OUT," in header  # who reads the table has it
    assert "if (!visit(StageOf<EXTRA>(), layer)) return false;" in header  # the producer and the lookout
    profile = load_profiles()["h200"]
    chip = Chip(profile.name, profile.capability, profile.sms, profile.shared_memory)
    name = "forward/forward.cu"
    try:
        architecture = target((9, 0))
    except NoDevice as error:
        pytest.skip(str(error))
    with pytest.raises(WarpsmithError, match="the stages of a layer that forward_pass runs"):
        compile_source(sources()[name], name, architecture, build_constants(layout, chip, profile, 1))


def test_the_cpu_engine_runs_the_plan() -> None:
    for config in (MODEL, replace(MODEL, recurrent=(False,) * 24), replace(MODEL, mtp_layers=1)):
        cpu_loading.check_plan(config)


# -- who may know of whom ----------------------------------------------------------------------------------------------


def imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_schedules_know_nothing_of_formats_and_formats_nothing_of_schedules() -> None:
    assert not any("cuda.weights" in name for name in imports(CUDA / "schedule.py"))
    known = {name for name in imports(CUDA / "weights" / "formats.py") if "cuda" in name}
    assert known == {"warpsmith.backend.cuda.shape"}
    assert not {name for name in vars(schedule) if "format" in name.lower()}


def test_a_format_s_header_includes_only_what_is_below_it() -> None:
    allowed = {"common/ptx.cuh", "common/tiles.cuh", "formats/format.cuh"}
    for name, text in sources().items():
        if name.startswith("formats/"):
            assert set(re.findall(r'#include "(.*?)"', text)) <= allowed, name
    for name in ("common/tiles.cuh", "common/ptx.cuh", "formats/format.cuh"):
        assert set(re.findall(r'#include "(.*?)"', sources()[name])) <= allowed, name


def test_nothing_else_names_a_format() -> None:
    names = {format.struct for format in FORMATS} | {format.type.name for format in FORMATS}
    pattern = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b")
    headers = {format.header for format in FORMATS}
    for name, text in sources().items():
        code = re.sub(r"//.*", "", text)
        assert name in headers or not pattern.search(code), name
    for file in CUDA.rglob("*.py"):
        if file.name != "formats.py":
            strings = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
            assert not strings & names, file


def test_every_format_has_its_header_and_its_number() -> None:
    for format in FORMATS:
        text = sources()[format.header]
        assert f"struct {format.struct} {{" in text
        assert f"NUMBER = {format.type.ggml_id};" in text
