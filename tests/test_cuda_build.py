"""The CUDA kernels for every chip we know, compiled without a GPU; and the cache that keeps what was compiled."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import kernel_claims
from cuda_draft_cases import draft_of_the_27b
from warpsmith.backend.cuda import shape, structures, top
from warpsmith.backend.cuda.build.compiler import DIGEST_BYTES, build, cache_directory, compile_source, sources, target
from warpsmith.backend.cuda.build.profiles import Profile, load_profiles
from warpsmith.backend.cuda.builds import VARIANTS, build_constants, build_options
from warpsmith.backend.cuda.draft import step
from warpsmith.backend.cuda.draft import structures as of_drafts
from warpsmith.backend.cuda.draft.formats import handed_over
from warpsmith.backend.cuda.draft.layout import DraftLayout, DraftStream
from warpsmith.backend.cuda.draft.network import copies_for
from warpsmith.backend.cuda.large.formats import EMBEDDINGS
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.driver import Chip
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.shape import threads_of
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import expected_shapes as draft_shapes
from warpsmith.checkpoint.dflash_writer import to_gguf_name
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import expected_shapes

MODEL = SIZES["0.8B"]
REGISTERS = 65536  # of an SM, on every chip since 8.0
MAX_SPILL, MAX_TREE_SPILL = 256, 1280  # bytes of registers put aside, or fetched back
PROFILES = list(load_profiles())


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    try:
        target((9, 0))
    except NoDevice as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes, in the compiler's words."""

    registers: int
    static_shared: int
    spill_stores: int
    spill_loads: int


def usage(log: str) -> Usage:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Usage(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),  # type: ignore[index]
        static_shared=number(r"(\d+) bytes smem"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
    )


# How a model's tensors are stored: all in one type, or with the DeltaNet's gates in another, as some files have them.
FILES = {
    "BF16": dict.fromkeys(expected_shapes(MODEL), "BF16"),
    "Q8_0": dict.fromkeys(expected_shapes(MODEL), "Q8_0"),
    "mixed": {n: "F32" if "ssm_alpha" in n or "ssm_beta" in n else "Q8_0" for n in expected_shapes(MODEL)},
}


def layout_for(profile: Profile, model: Config = MODEL, file: str = "BF16") -> Layout:
    return Layout(model, min(profile.sms, busy_sms(model)), FILES[file])


def constants_for(profile: Profile, nodes: int, model: Config = MODEL, file: str = "BF16") -> dict[str, object]:
    chip = Chip(profile.name, profile.capability, profile.sms, profile.shared_memory)
    return build_constants(layout_for(profile, model, file), chip, profile, nodes)


def compiled(source: str, profile: Profile, nodes: int, model: Config = MODEL, file: str = "BF16") -> Usage:
    architecture = target(profile.capability)
    options = ("--ptxas-options=-v", *build_options(source, layout_for(profile, model, file), architecture))
    return _compiled(source, architecture, tuple(constants_for(profile, nodes, model, file).items()), options)


@cache  # some chips differ in memory only
def _compiled(
    source: str, architecture: str, constants: tuple[tuple[str, object], ...], options: tuple[str, ...]
) -> Usage:
    _, log = compile_source(sources()[source], source, architecture, dict(constants), options)
    return usage(log)


def problems(profile: Profile, nodes: int, file: str = "BF16") -> list[str]:
    """What is wrong with the forward kernel for that chip, trees of that many nodes and such a file."""
    used = compiled("forward/forward.cu", profile, nodes, file=file)
    print(f"{profile.name}, {nodes} nodes, {file}: {used}")
    most = MAX_SPILL if nodes == 1 else MAX_TREE_SPILL
    wrong = {
        "shared memory that is not counted": used.static_shared > 0,
        "too many registers": used.registers * threads_of(target(profile.capability)) > REGISTERS,
        "too many spills": max(used.spill_stores, used.spill_loads) > most,
    }
    return [f"{profile.name}, {nodes} nodes, {file}: {what} ({used})" for what, is_so in wrong.items() if is_so]


def test_the_forward_kernel_builds_for_the_oldest_chip_and_the_newest() -> None:
    """And for an H200. Among the slow tests there is one of all."""
    builds = [(load_profiles()[name], 1, "BF16") for name in ("h200", "rtx-3090", "rtx-5090")]
    builds.append((load_profiles()["rtx-3090"], VARIANTS[1], "Q8_0"))  # a tree where there is little shared memory
    builds.append((load_profiles()["h200"], 1, "mixed"))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda build: problems(*build), builds))
    assert not [problem for each in found for problem in each]


def test_plain_decoding_on_an_h200_keeps_everything_in_registers() -> None:
    used = compiled("forward/forward.cu", load_profiles()["h200"], 1)
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    used = compiled("forward/forward.cu", load_profiles()["h200"], 1, file="Q8_0")
    assert max(used.spill_stores, used.spill_loads) <= 40  # four numbers that every stage uses once


def test_eight_nodes_in_q8_0_on_an_h200_spill_little() -> None:
    used = compiled("forward/forward.cu", load_profiles()["h200"], 8, file="Q8_0")
    assert max(used.spill_stores, used.spill_loads) <= 200  # 396 where the compiler is left to itself


def test_a_small_model_builds_for_the_largest_tree() -> None:
    used = compiled("forward/forward.cu", load_profiles()["h200"], VARIANTS[-1], SIZES["tiny"], "Q8_0")
    assert used.static_shared == 0  # its sizes are asserted in the source


@pytest.mark.parametrize("name", PROFILES)
def test_the_small_kernels_build_for_every_chip(name: str) -> None:
    for source in ("forward/commit.cu", "weights/pack.cu", "sample/top.cu", "sample/walk.cu", "draft/tree.cu"):
        used = compiled(source, load_profiles()[name], 1)
        assert used.registers * 512 <= REGISTERS
        assert used.spill_stores == 0


def test_the_largest_tree_of_a_chip_has_a_build() -> None:
    assert {profile.largest_tree for profile in load_profiles().values()} <= set(VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("nodes", VARIANTS)
@pytest.mark.parametrize("name", PROFILES)
def test_every_build_for_every_chip_and_file(name: str, nodes: int, file: str) -> None:
    profile = load_profiles()[name]
    if nodes > profile.largest_tree:
        pytest.skip(f"trees on this chip have at most {profile.largest_tree} nodes")
    assert not problems(profile, nodes, file)


def test_older_chips_get_neither_bulk_copies_nor_clusters() -> None:
    constants = constants_for(load_profiles()["generic"], 1)
    ptx, _ = compile_source(sources()["forward/forward.cu"], "forward/forward.cu", "compute_80", constants)
    assert b".target sm_80" in ptx
    assert b".version 9.0" in ptx  # which every driver that the bindings work with reads
    assert b"cp.async." in ptx
    assert b"bulk" not in ptx
    assert b"cluster" not in ptx


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("q4_k_m", marks=pytest.mark.slow)])
def test_nothing_of_a_draft_lies_on_the_stack(recipe: str) -> None:
    """There is hardly an L1 cache beside 227 KB of shared memory: what is put aside comes back from the L2 cache."""
    program, model, config, chip = "draft/draft.cu", SIZES["27B"], draft_of_the_27b(), load_profiles()["h200"]
    stored = {n: tensor_type("q4_k_m", n, s, model.layers, model.tied).name for n, s in expected_shapes(model).items()}
    lender, shapes = LargeLayout(model, chip.sms, stored), draft_shapes(config).items()
    types = {n: tensor_type(recipe, to_gguf_name(n), s, config.layers, tied=False).name for n, s in shapes}
    stream = DraftStream(config, chip.sms, {name: handed_over(kind) for name, kind in types.items()})
    layout = DraftLayout(config, stream, lender.deals[-1], capacity=4096)
    constants = layout.constants(EMBEDDINGS.index(lender.embedding_type)) | copies_for(stream)
    constants |= {"SHARED_MEMORY": chip.shared_memory}
    _, log = compile_source(sources()[program], program, "sm_90a", constants, ("--ptxas-options=-v",))
    found = [int(n) for n in re.findall(r"(\d+) bytes (?:stack|spill)", log)]
    assert len(found) > 3, log
    assert max(found) == 0, log


def test_nothing_is_contracted_that_is_not_written_so() -> None:
    """Builds for trees of different sizes must agree to the bit. What a compiler may contract has no rounding mode."""
    for source, nodes in (("forward/forward.cu", 1), ("forward/forward.cu", 8), ("forward/commit.cu", 1)):
        constants = constants_for(load_profiles()["h200"], nodes)
        ptx = compile_source(sources()[source], source, "compute_90a", constants)[0].decode()
        operations = set(re.findall(r"\b(?:add|sub|mul|fma)(?:\.\w+)*\.f(?:32|64)\b", ptx))
        assert "fma.rn.f32" in operations
        assert all(".rn." in operation for operation in operations), operations


def test_no_line_of_a_kernel_is_longer_than_120_columns() -> None:
    for name, text in sources().items():
        assert not [line for line in text.splitlines() if len(line) > 120], name


def test_no_number_is_made_uniform_on_one_side_of_a_condition() -> None:
    """ptxas 13.0 has put such a reduction under a predicate that it had not set: rows of a tree had other positions."""
    for name, text in sources().items():
        assert not re.search(r"\?[^;{}]*\buniform\(", re.sub(r"//.*", "", text)), name


def test_compiling_changes_nothing_else() -> None:
    """NVRTC writes its log into memory we give it; an empty log is one byte, and Python has one object for each."""
    compile_source(sources()["weights/stream.cu"], "weights/stream.cu", "sm_90", {})
    assert bytes([32]).isspace()


def test_a_chip_newer_than_the_compiler_gets_ptx() -> None:
    assert target((8, 6)) == "sm_86"
    assert target((12, 0)) == "sm_120"
    assert re.fullmatch(r"compute_\d+", target((99, 0)))


# -- what host and kernels both know -----------------------------------------------------------------------------------

STRUCTURES = {
    "forward/params.cuh": {"Request": structures.Request, "Params": structures.Params, "Draw": structures.Draw},
    "forward/commit.cu": {"Path": structures.Path, "Commit": structures.Commit},
    "draft/tree.cu": {"Grow": of_drafts.Grow, "Report": of_drafts.Report, "MadeTree": structures.MadeTree},
    "sample/walk.cu": {"Walk": of_drafts.Walk},
    "sample/top.cu": {"Top": structures.TopRequest},
    "weights/stream.cu": {"Stream": structures.Stream},
    "weights/pack.cu": {"Pack": structures.Pack},
}
NUMBERS = {
    "forward/params.cuh": {
        **{name: getattr(shape, name) for name in ("WARPS", "CHUNK_K", "WIDE", "NARROW", "MAX_STOPS", "MAX_FEATURES")},
        **{name: getattr(shape, name) for name in ("COLUMNS", "HISTORY", "STATE_DIM", "HEAD_DIM")},
        "MAX_NODES": MAX_NODES,
    },
    "forward/shared.cuh": {
        "MAX_CHUNKS * CHUNK_K": shape.LARGEST_HIDDEN,
        **{name: getattr(shape, name) for name in ("MAX_STEPS", "CANDIDATES", "ROUNDS", "MAX_OWN_LOGITS")},
    },
    "sample/top.cu": {name: getattr(top, name) for name in ("MAX_TOP", "SLICES", "SLICE_THREADS")},
    "sample/walk.cu": {"MAX_TOP": top.MAX_TOP, "MAX_STOPS": shape.MAX_STOPS, "MOST_NODES": MAX_NODES},
    "draft/tree.cu": {"DEEPEST": step.DEEPEST, "WIDEST": step.WIDEST, "MOST_NODES": MAX_NODES},
    "weights/stream.cu": {"PIECES * PIECE_BYTES": shape.READ_AHEAD},
}


def check_claims(file: str, claims: dict[str, int]) -> None:
    asserted = [f"{kernel} == {number}" for kernel, number in claims.items()]
    kernel_claims.check_claims(sources()[file], asserted, "compute_90", constants_for(load_profiles()["h200"], 1))


@pytest.mark.parametrize("file", STRUCTURES)
def test_arguments_have_every_field_where_the_kernel_has_it(file: str) -> None:
    claims = {}
    for name, structure in STRUCTURES[file].items():
        claims[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            # NVRTC has no offsetof, but what its front end makes one of
            claims[f"__INTADDR__(&(({name}*)0)->{field})"] = getattr(structure, field).offset
            claims[f"sizeof({name}::{field})"] = getattr(structure, field).size
    check_claims(file, claims)
    for changed in list(claims)[:3]:
        with pytest.raises(AssertionError, match=re.escape(f'failed with "{changed} == ')):
            check_claims(file, claims | {changed: claims[changed] + 4})


@pytest.mark.parametrize("file", NUMBERS)
def test_the_host_has_the_kernels_numbers(file: str) -> None:
    check_claims(file, NUMBERS[file])


# -- the cache ---------------------------------------------------------------------------------------------------------

CONSTANTS = constants_for(load_profiles()["generic"], 1)


def build_pack(architecture: str = "sm_90") -> bytes:
    return build("weights/pack.cu", architecture, CONSTANTS)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_directory()


def test_what_was_built_is_read_back(empty_cache: Path) -> None:
    image = build_pack()
    (kept,) = empty_cache.iterdir()
    assert kept.read_bytes()[DIGEST_BYTES:] == image
    other = b"anything with the right digest"
    kept.write_bytes(hashlib.sha256(other).digest() + other)
    assert build_pack() == other
    assert build_pack("sm_86") not in (image, other)
    assert len(list(empty_cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "short", "changed"])
def test_a_damaged_file_is_built_again(empty_cache: Path, damage: str) -> None:
    image = build_pack()
    (kept,) = empty_cache.iterdir()
    good = kept.read_bytes()
    middle = len(good) // 2
    bad = {"empty": b"", "short": good[:-1], "changed": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]}
    kept.write_bytes(bad[damage])
    assert build_pack() == image
    assert kept.read_bytes() == good


def test_processes_build_the_same_kernel_at_once(empty_cache: Path) -> None:
    program = "from test_cuda_build import build_pack; import hashlib; print(hashlib.sha256(build_pack()).hexdigest())"
    command = [sys.executable, "-c", program]
    folder = Path(__file__).parent
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) for _ in range(3)]
    digests = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert digests == {hashlib.sha256(build_pack()).hexdigest()}
    assert [f.suffix for f in empty_cache.iterdir()] == [".cubin"]


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert build_pack() == build_pack()
