"""What is known of a chip before one is seen: how to build for it, and which settings suit it (`chips/*.toml`).

A device's own number of multiprocessors and its own memories always count; a profile's are for building and planning
without a device.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from warpsmith.backend.tree import MAX_NODES
from warpsmith.errors import BadFile

CHIPS = files("warpsmith.backend.cuda.build") / "chips"
GENERIC = "generic"
OLDEST = (8, 0)  # the first with bf16 tensor cores and asynchronous copies


@dataclass(frozen=True)
class Profile:
    """One file of `chips/`."""

    name: str  # of the file
    devices: tuple[str, ...]  # what the driver calls such chips
    capability: tuple[int, int]
    sms: int
    memory: int  # bytes
    shared_memory: int  # bytes a block may ask for
    in_flight: int  # bytes of weights on their way to an SM at a time
    largest_tree: int  # nodes of the largest tree worth a build of its own
    measured: bool  # the settings come from measurements on such a chip


def choose(device: str, capability: tuple[int, int]) -> tuple[Profile, bool]:
    """The profile of the chip by that name; else of one with the same compute capability; else the generic one. And
    whether its settings come from measurements on this very chip."""
    profiles = load_profiles()
    for profile in profiles.values():
        if device in profile.devices:
            return profile, profile.measured
    for profile in profiles.values():
        if profile.name != GENERIC and profile.capability == capability:
            return profile, False
    return profiles[GENERIC], False


@cache
def load_profiles() -> dict[str, Profile]:
    """All profiles by name, those measured first: a relative's settings are worth more where they were measured."""
    texts = {f.name.removesuffix(".toml"): f.read_text() for f in CHIPS.iterdir() if f.name.endswith(".toml")}
    profiles = [parse(name, text) for name, text in sorted(texts.items())]
    return {p.name: p for p in sorted(profiles, key=lambda p: not p.measured)}


def parse(name: str, text: str) -> Profile:
    """A profile from its TOML text, every field checked."""
    try:
        fields: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"chips/{name}.toml is not TOML: {error}.") from None

    def field(key: str, kind: type, valid: Any = lambda value: True) -> Any:
        value = fields.pop(key, None)
        if type(value) is not kind or not valid(value):
            raise BadFile(f"chips/{name}.toml: {key} is {value!r}, which cannot be.")
        return value

    profile = Profile(
        name=name,
        devices=tuple(field("devices", list, lambda parts: all(isinstance(p, str) and p for p in parts))),
        capability=capability_from(field("compute_capability", str, lambda text: capability_from(text) >= OLDEST)),
        sms=field("multiprocessors", int, lambda n: 1 <= n <= 1024),
        memory=field("memory_gb", int, lambda n: 1 <= n <= 1024) * 10**9,
        shared_memory=field("shared_memory_kib", int, lambda n: 48 <= n <= 1024) << 10,
        in_flight=field("in_flight_kib", int, lambda n: 1 <= n <= 1024) << 10,
        largest_tree=field("largest_tree", int, lambda n: 1 <= n <= MAX_NODES),
        measured=field("measured", bool),
    )
    if fields:
        raise BadFile(f"chips/{name}.toml: there is no field {next(iter(fields))!r}.")
    return profile


def capability_from(text: str) -> tuple[int, int]:
    """(9, 0) from "9.0"; (0, 0) from nonsense."""
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else (0, 0)
