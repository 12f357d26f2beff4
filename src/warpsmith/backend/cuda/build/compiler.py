"""CUDA C++ to machine code through NVRTC, without a GPU or a toolkit, kept on disk by content."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from warpsmith.errors import NoDevice, WarpsmithError

SOURCES = files("warpsmith.backend.cuda") / "kernels"
DIGEST_BYTES = 32


def sources() -> dict[str, str]:
    """Every kernel and header by its path below the folder of the kernels."""
    return {
        f"{folder.name}/{f.name}": f.read_text()
        for folder in SOURCES.iterdir()
        if folder.is_dir()
        for f in folder.iterdir()
        if f.name.endswith((".cu", ".cuh"))
    }


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "warpsmith" / "cubin"


def target(capability: tuple[int, int]) -> str:
    """What to build for: machine code (`sm_86`), or PTX of the newest older chip (`compute_120`) where NVRTC is older
    than the chip; the driver makes machine code of that."""
    major, minor = capability
    known = _check(_nvrtc().nvrtcGetSupportedArchs())
    wanted = major * 10 + minor
    if wanted == 90:
        return "sm_90a"  # with the instructions only that generation has
    return f"sm_{wanted}" if wanted in known else f"compute_{max(n for n in known if n < wanted)}"


def build(name: str, architecture: str, constants: Mapping[str, Any], options: tuple[str, ...] = ()) -> bytes:
    """The cubin of kernel file `name` for an architecture (`sm_90`), with `constants` defined; from the cache if built
    before. A constant whose name ends with `.cuh` is the text of a generated header. A `compute_80` architecture gives
    PTX, which the driver builds for the chip at hand."""
    version = _check(_nvrtc().nvrtcVersion())
    texts = sources()
    texts |= {n: str(value) for n, value in constants.items() if n.endswith(".cuh")}
    key = repr((name, _flags(architecture, constants, options), version, sorted(texts.items())))
    path = cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if (kept := _read(path)) is not None:
        return kept
    image, _ = compile_source(texts[name], name, architecture, constants, options)
    _write(path, image)
    return image


def compile_source(
    text: str, name: str, architecture: str, constants: Mapping[str, Any], options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """(machine code, compiler's log) of a source, which may include our headers."""
    nvrtc = _nvrtc()
    texts = sources() | {n: str(value) for n, value in constants.items() if n.endswith(".cuh")}
    headers = {n: header.encode() for n, header in texts.items() if n.endswith(".cuh")}
    names = [n.encode() for n in headers]
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), list(headers.values()), names))
    try:
        flags = _flags(architecture, constants, options)
        outcome = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])[0]
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))  # never bytes: Python shares short ones
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b"\0 ").decode(errors="replace")
        if int(outcome) != 0:
            raise WarpsmithError(f"{name} does not compile for {architecture}: {said}", "Please report this.")
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        image = bytearray(_check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
        _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, image))
        return _readable(bytes(image)) if kind == "PTX" else bytes(image), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _readable(ptx: bytes) -> bytes:
    """A driver refuses PTX of a version newer than itself, whatever is in it. What is in the code of older chips needs
    no newer one than the oldest driver that the bindings work with reads."""
    older_chip = re.search(rb"\.target sm_[89]\d\b", ptx)
    return re.sub(rb"\.version \d+\.\d+", b".version 9.0", ptx, count=1) if older_chip else ptx


def _flags(architecture: str, constants: Mapping[str, Any], options: tuple[str, ...]) -> list[str]:
    defined = [f"-D{name}={value}" for name, value in sorted(constants.items()) if not name.endswith(".cuh")]
    # No contraction: builds for different trees must agree to the bit, so fmaf is written where it is meant.
    # Lambdas over any format cannot be marked as the device's.
    always = ["-std=c++17", "-lineinfo", "-fmad=false", "-default-device"]
    return [f"-arch={architecture}", *always, *options, *defined]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the bindings may be there without the library
    except (ImportError, RuntimeError):
        raise NoDevice("NVRTC is not installed.", "Install it with `pip install 'warpsmith[cuda]'`.") from None
    return nvrtc


def _check(result: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, or an error in its words."""
    code, *values = result
    if int(code) != 0:
        raise WarpsmithError(f"NVRTC reports {code.name}.", "Please report this.")
    return values[0] if len(values) == 1 else values


# -- the cache: a digest of the image, then the image ------------------------------------------------------------------


def _read(path: Path) -> bytes | None:
    """What was kept, unless it was damaged since."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, image = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def _write(path: Path, image: bytes) -> None:
    """Readers see all of it or nothing, however many processes write the same at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False)  # noqa: SIM115
        try:
            with part:
                part.write(hashlib.sha256(image).digest() + image)
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
    except OSError:
        pass  # a cache that cannot be written only costs time
