"""CUDA C++ to machine code through NVRTC, without a GPU or a toolkit, kept on disk by content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from warpsmith.errors import NoDevice, WarpsmithError

SOURCES = files("warpsmith.backend.cuda") / "kernels"


def sources() -> dict[str, str]:
    return {f.name: f.read_text() for f in SOURCES.iterdir() if f.name.endswith((".cu", ".cuh"))}


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "warpsmith" / "cubin"


def build(name: str, architecture: str, constants: Mapping[str, Any], options: tuple[str, ...] = ()) -> bytes:
    """The cubin of kernel file `name` for an architecture (`sm_90`), with `constants` defined; from the cache if built
    before. A `compute_80` architecture gives PTX, which the driver builds for the chip at hand."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise NoDevice("NVRTC is not installed.", "Install it with `pip install 'warpsmith[cuda]'`.") from None
    _, major, minor = nvrtc.nvrtcVersion()
    texts = sources()
    key = repr((name, architecture, sorted(constants.items()), options, major, minor, sorted(texts.items())))
    path = cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    image, _ = compile_source(name, architecture, constants, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(image)
        part.replace(path)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return image


def compile_source(
    name: str, architecture: str, constants: Mapping[str, Any], options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """(machine code, compiler's log)."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise WarpsmithError(f"NVRTC reports {result[0].name} for {name}.", "Please report this.")
        return result[1] if len(result) == 2 else result[1:]

    texts = sources()
    headers = [n for n in texts if n != name]
    program = check(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [texts[h].encode() for h in headers],
            [h.encode() for h in headers],
        )
    )
    flags = [f"-arch={architecture}", "-std=c++17", "-lineinfo", *options]
    flags += [f"-D{k}={v}" for k, v in constants.items()]
    outcome = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])[0]
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check((*nvrtc.nvrtcGetProgramLog(program, log), None))
    text = log.rstrip(b"\0 ").decode(errors="replace")
    if int(outcome) != 0:
        raise WarpsmithError(f"{name} does not compile for {architecture}: {text}", "Please report this.")
    ptx = architecture.startswith("compute_")
    size, get = (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    image = b" " * check(size(program))
    check((*get(program, image), None))
    nvrtc.nvrtcDestroyProgram(program)
    return image, text
