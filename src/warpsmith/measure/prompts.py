"""Prompts to measure speculation with: lines of a JSONL file, or the test sets that papers use, from the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from warpsmith.errors import BadFile, BadRequest, ModelNotFound

# name -> (data set, its file, the field that holds the prompt)
SETS = {
    "humaneval": ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet", "prompt"),
    "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet", "question"),
    "math500": ("HuggingFaceH4/MATH-500", "test.jsonl", "problem"),
}


def read_prompts(name: str, count: int, offline: bool = False) -> list[str]:
    """The first `count` prompts of a file or of a named set."""
    if name in SETS and not Path(name).exists():
        repository, file, field = SETS[name]
        path = _fetch(repository, file, offline)
    elif Path(name).is_file():
        path, field = Path(name), "prompt"
    else:
        raise BadRequest(
            f"There are no prompts {name!r}.", f"Name a JSONL file with a prompt a line, or {', '.join(SETS)}."
        )
    prompts = []
    for number, row in enumerate(islice(_rows(path), count), start=1):
        prompt = row.get(field) if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise BadFile(f"{path}: entry {number} has no text under {field!r}.", "Every line needs one.")
        prompts.append(prompt)
    if not prompts:
        raise BadFile(f"{path} holds no prompts.", "Write one JSON object a line, with the key prompt.")
    return prompts


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise BadRequest(
                "This set is stored as Parquet, which needs pyarrow to be read.",
                "Run `pip install pyarrow`, or pass the prompts as a JSONL file.",
            ) from None
        yield from parquet.read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    raise BadFile(f"{path}: line {number} is not JSON.", "Write one JSON object a line.") from None


def _fetch(repository: str, file: str, offline: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    cached = huggingface_hub.try_to_load_from_cache(repository, file, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    disable_progress_bars()
    try:
        if offline or huggingface_hub.constants.HF_HUB_OFFLINE:
            raise OSError("it is not in the cache, and warpsmith is offline")
        huggingface_hub.HfApi().dataset_info(repository)  # fails at once where there is no network
        return Path(huggingface_hub.hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # whatever HTTP library the Hub's client uses this year
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelNotFound(
            f"The data set {repository} could not be fetched: {reason}.", "Pass prompts as a JSONL file."
        ) from error
