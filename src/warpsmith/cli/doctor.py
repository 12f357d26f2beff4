"""`warpsmith doctor`: what this machine has, and what would be used."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from warpsmith import __version__
from warpsmith.backend.devices import DEVICES, backend_for, gpus
from warpsmith.cli.escape import printable
from warpsmith.errors import WarpsmithError
from warpsmith.measure import machine
from warpsmith.measure.units import size

CUDA_PACKAGES = ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    facts = examine()
    print(json.dumps(facts, indent=2) if args.json else _page(facts))
    return 0


def examine() -> dict[str, Any]:
    found, driver = gpus()
    devices = _problems()
    return {
        "warpsmith": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "model": machine.cpu_model(),
            "features": machine.cpu_features(),
            "cores": machine.usable_cores(),
        },
        "memory": machine.memory(),
        "driver": driver.about,
        "gpus": [gpu | _profile(gpu) for gpu in found],
        "cuda_packages": {name: machine.package_version(name) for name in CUDA_PACKAGES},
        "cache": _cache(),
        "devices": devices,
        "device": next(name for name, problem in devices.items() if problem is None),
    }


def _problems() -> dict[str, str | None]:
    """Of each device: None if it runs a model here, else why not. The model is tiny and the run is real."""
    from warpsmith.model.synthetic import tiny_model
    from warpsmith.model.weights import read_config

    checkpoint = tiny_model()
    config = read_config(checkpoint)
    problems: dict[str, str | None] = {}
    for device in DEVICES:
        try:
            backend = backend_for(device.name, checkpoint, config)
            backend.prefill(backend.new_state(8), [1, 2, 3])
            problems[device.name] = None
        except WarpsmithError as error:
            problems[device.name] = str(error)
    return problems


def _profile(gpu: dict[str, Any]) -> dict[str, Any]:
    """The settings that the kernels for a GPU are built with, and whether they were measured on such a chip."""
    from warpsmith.backend.cuda.build.profiles import capability_from, choose

    profile, measured = choose(gpu["name"], capability_from(gpu["compute_capability"]))
    return {"profile": profile.name, "measured": measured}


def _cache() -> dict[str, Any]:
    from huggingface_hub import constants

    path = Path(constants.HF_HUB_CACHE)
    models = [p.name.removeprefix("models--").replace("--", "/", 1) for p in sorted(path.glob("models--*"))]
    return {"path": str(path), "models": models, "offline": bool(constants.HF_HUB_OFFLINE)}


def _page(facts: dict[str, Any]) -> str:
    cpu, memory, cache = facts["cpu"], facts["memory"], facts["cache"]
    lines = [
        f"warpsmith  {facts['warpsmith']}, Python {facts['python']}, {facts['system']}",
        f"processor  {cpu['model']}, {cpu['cores']} usable cores, {' '.join(cpu['features']) or 'no features known'}",
    ]
    if memory:
        lines.append(f"memory     {size(memory['total'])}, {size(memory['available'])} available")
    lines.append(f"NVIDIA     {facts['driver']}")
    lines += [
        f"           {gpu['name']}: compute capability {gpu['compute_capability']}, "
        f"{gpu['multiprocessors']} SMs, {size(gpu['memory'])}; profile {gpu['profile']}, "
        f"{'measured' if gpu['measured'] else 'not measured'} on this chip"
        for gpu in facts["gpus"]
    ]
    packages = [f"{name} {version or 'missing'}" for name, version in facts["cuda_packages"].items()]
    lines.append(f"           {', '.join(packages)}")
    offline = ", offline" if cache["offline"] else ""
    lines.append(f"Hub cache  {cache['path']}: {len(cache['models'])} models{offline}")
    lines += [f"{name:<10} {problem or 'works'}" for name, problem in facts["devices"].items()]
    lines.append(f"auto       uses {facts['device']}")
    return "\n".join(map(printable, lines))
