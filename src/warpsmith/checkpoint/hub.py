"""Model names to files: a path, or a repository of the Hugging Face Hub through its shared cache.

`user/repo`, `user/repo:QUANT` and `user/repo/file.gguf` are understood, with or without `hf:` or `hf.co/` in front, and
so are addresses copied from a browser. `wisp` is the model that comes with the package.
The Hub's own settings hold: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.fetch import fetch
from warpsmith.checkpoint.safetensors import read_json, refuse_quantised
from warpsmith.errors import BadRequest, ModelNotFound, WarpsmithError
from warpsmith.wisp import WISP

# What is fetched when no quantisation is named: the first of these that the repository has.
PREFERRED = ("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q5_K_M", "Q4_0", "IQ4_XS", "Q6_K", "Q8_0", "BF16", "F16", "F32")

# Weights and what is needed to read them; nothing that could run.
SAFETENSORS_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")

_PREFIX = re.compile(r"^(hf:(//)?|(https?://)?(hf\.co|huggingface\.co)/)")
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:]+)|:(?P<quant>[\w.-]+))?")
_PAGE = re.compile(r"([^/]+/[^/]+)/(?P<kind>blob|resolve|raw|tree)/(?P<revision>[^/]+)(?:/(?P<path>.+))?")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
# Recipes whose name does not begin with the type that most of their tensors have.
_RECIPES = {"IQ2_M": "IQ2_S", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S", "FP16": "F16", "FP32": "F32"}


@dataclass(frozen=True)
class HubName:
    """A model on the Hub: at most one of `file` and `quant` is given."""

    repo: str
    file: str | None = None
    quant: str | None = None


def resolve(name: str | Path, offline: bool = False, progress: bool = True, refresh: bool = False) -> Path:
    """The GGUF file or the directory that a model's name stands for.

    What the cache holds is used as it is; `refresh` asks the Hub whether there is something newer.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):  # unlike Path's methods, these take any string
        return Path(path)
    if str(name) == "wisp":
        return WISP
    wanted = None if _is_in_a_folder_here(str(name)) else parse(str(name))
    if wanted is None:
        raise ModelNotFound(
            f"There is no model at {name}.", "Check the path; for a repository on the Hub write hf:user/repo."
        )

    from huggingface_hub import constants

    offline = offline or bool(constants.HF_HUB_OFFLINE)
    cached = _cached(wanted, Path(constants.HF_HUB_CACHE))
    if cached and (offline or not refresh):
        return cached
    try:
        if offline:
            raise ModelNotFound(
                f"{name} is not in the cache, and warpsmith is offline.", "Fetch it once with network access."
            )
        return _download(wanted, progress)
    except ModelNotFound as error:
        if wanted.file and not _PREFIX.match(str(name)):  # it may have been meant as a path
            raise ModelNotFound(f"There is no file {name} here. {error.problem}", error.fix) from error
        raise


def _is_in_a_folder_here(name: str) -> bool:
    """Whether a name that could be a repository's is rather that of a local file, mistyped."""
    folder, slash, _ = name.partition("/")
    return bool(slash) and ":" not in name and os.path.isdir(folder)


def parse(name: str) -> HubName | None:
    """Read a name as a Hub model; None if it is plainly a path."""
    bare = _PREFIX.sub("", name)
    if bare == name and (name.startswith((".", "/", "~")) or "\\" in name):
        return None
    if bare != name:
        bare = unquote(re.split("[?#]", bare)[0]).rstrip("/")
    if page := _PAGE.fullmatch(bare):
        if page["revision"] != "main":
            raise ModelNotFound(f"{name} names the revision {page['revision']}.", "Only main is fetched.")
        if page["kind"] == "tree":  # a folder, which repositories name after the quantisation in it
            return HubName(page[1], quant=page["path"])
        bare = f"{page[1]}/{page['path']}"
    match = _NAME.fullmatch(bare)
    if match is None or (bare == name and not match["file"] and match["repo"].endswith((".gguf", ".safetensors"))):
        return None  # `models/file.gguf` is a file that is missing, not a repository
    if match["file"] and not match["file"].endswith(".gguf"):
        return None
    return HubName(match["repo"], match["file"], match["quant"])


def quant_of(file: str) -> str:
    """The quantisation in a file's name: `Qwen3.5-27B-UD-Q4_K_XL-00001-of-00002.gguf` -> `UD-Q4_K_XL`."""
    stem = _SPLIT.sub("", Path(file).name.removesuffix(".gguf")).upper()
    match = re.search(r"(?:^|[-._])((?:UD-)?(?:[IT]?Q\d\w*|BF16|F16|F32|FP16|FP32|(?:MX|NV)FP4\w*))$", stem)
    return match[1] if match else ""


def is_read(quant: str) -> bool:
    """Whether files of this quantisation can be run, as far as its name tells."""
    bare = quant.removeprefix("UD-")
    bare = _RECIPES.get(bare, bare)
    return not quant or any(bare == name or bare.startswith(f"{name}_") for name in TYPES)


def choose(files: Iterable[str], quant: str | None = None) -> list[str]:
    """Of a repository's files, the parts of the one model that `quant` names; [] if none. Without a name it is the
    first of `PREFERRED`, or any that can be run."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if _is_model(file):
            models.setdefault(_SPLIT.sub("", file.removesuffix(".gguf")), []).append(file)
    if quant is None:
        wanted = [*PREFERRED, *filter(is_read, (quant_of(parts[0]) for parts in models.values()))]
    else:
        wanted = [quant.upper(), f"UD-{quant.upper()}"]
    for candidate in wanted:
        for parts in models.values():
            if quant_of(parts[0]) == candidate:
                return parts
    return []


def _is_model(file: str) -> bool:
    """A GGUF file of weights, not of a vision tower or of quantisation statistics."""
    return file.endswith(".gguf") and not Path(file).name.lower().startswith(("mmproj", "imatrix"))


def _model_in(files: Iterable[str], wanted: HubName) -> list[str]:
    """The files of the model meant: one GGUF in one or more parts, or [] for a directory of safetensors."""
    files = list(files)
    if wanted.file:
        stem = _SPLIT.sub("", wanted.file.removesuffix(".gguf"))
        return [f for f in sorted(files) if f.endswith(".gguf") and _SPLIT.sub("", f.removesuffix(".gguf")) == stem]
    return choose(files, wanted.quant)


def _cached(wanted: HubName, cache: Path) -> Path | None:
    """The model as far as it lies complete in the shared cache."""
    folder = cache / f"models--{wanted.repo.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.exists()]
    if parts := _model_in(files, wanted):
        count = re.search(r"-of-(\d{5})\.gguf$", parts[0])
        return snapshot / parts[0] if len(parts) == (int(count[1]) if count else 1) else None
    if wanted.file or wanted.quant or "config.json" not in files:
        return None
    return snapshot if _has_all_weights(snapshot, set(files)) else None


def _has_all_weights(directory: Path, files: set[str]) -> bool:
    index = "model.safetensors.index.json"
    if index not in files:
        return any(file.endswith(".safetensors") for file in files)
    try:
        return set(json.loads((directory / index).read_text())["weight_map"].values()) <= files
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False  # fetch it again


def _download(wanted: HubName, progress: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress and sys.stderr.isatty() else disable_progress_bars)()
    try:
        # not list_repo_files, which retries for half a minute where there is no network
        files = [sibling.rfilename for sibling in huggingface_hub.HfApi().model_info(wanted.repo).siblings or []]
        parts = _model_in(files, wanted)
        if parts and not is_read(quant_of(parts[0])):
            raise _not_read(wanted.repo, quant_of(parts[0]), files)
        if not parts and (wanted.file or wanted.quant or not any(f.endswith(".safetensors") for f in files)):
            raise _no_such_file(wanted, files)
        for file in parts or _directory_files(files):
            path = fetch(wanted.repo, file)
            if file == "config.json":
                refuse_quantised(read_json(path), path)  # before the weights are fetched
            snapshot = path.parents[file.count("/")]
    except WarpsmithError:
        raise
    except Exception as error:  # whatever HTTP library the Hub's client uses this year
        raise _explain(error, wanted.repo) from error
    return snapshot / parts[0] if parts else snapshot


def _directory_files(files: Iterable[str]) -> list[str]:
    """What belongs to a model directory, the configuration first."""
    wanted = [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in SAFETENSORS_FILES)]
    return sorted(wanted, key=lambda file: (file != "config.json", file))


def _not_read(repo: str, quant: str, files: Iterable[str]) -> BadRequest:
    others = sorted({quant_of(f) for f in files if _is_model(f) and is_read(quant_of(f))} - {""})
    fix = f"Choose one of {_some(others)}." if others else "Choose another repository."
    return BadRequest(f"{repo} has {quant} files, which warpsmith does not run.", fix)


def _no_such_file(wanted: HubName, files: Iterable[str]) -> WarpsmithError:
    models = [f for f in files if _is_model(f)]
    if wanted.file:
        return ModelNotFound(f"{wanted.repo} has no file {wanted.file}.", f"It has {_some(models)}.")
    if not models:
        return ModelNotFound(f"{wanted.repo} holds neither GGUF files nor safetensors.", "Choose another repository.")
    quants = sorted({quant_of(f) for f in models} - {""})
    if wanted.quant is None:
        return _not_read(wanted.repo, _some(quants), files)
    runnable = [quant for quant in quants if is_read(quant)]
    return ModelNotFound(f"{wanted.repo} has no {wanted.quant} file.", f"Choose one of {_some(runnable)}.")


def _some(items: list[str]) -> str:
    return ", ".join(items[:12]) + (", ..." if len(items) > 12 else "") if items else "no GGUF files"


def _explain(error: Exception, repo: str) -> WarpsmithError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):  # before its base class, RepositoryNotFoundError
        return ModelNotFound(f"{repo} is gated.", "Accept its terms on its page, then set HF_TOKEN to your token.")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            f"There is no repository {repo} on the Hub that you may read.",
            "Check the spelling; for a private one set HF_TOKEN.",
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelNotFound(
            f"The Hub refuses to hand out {repo} ({status}).", "Set HF_TOKEN to a token that may read it."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return WarpsmithError(
            f"The disk is full: {repo} does not fit.", "Free some space or set HF_HUB_CACHE elsewhere."
        )
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ModelNotFound(f"{repo} could not be fetched: {reason.rstrip('.')}.", "Check the network and try again.")
