"""Fetching one file of a repository into the Hub's shared cache so that an interrupted fetch can go on later.

The Hub's own client begins such a file again. So weights are brought here, over one connection and in the calling
thread, where Ctrl-C ends it at once; the client then finds them in place and does its bookkeeping.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LARGEST = 50_000_000_000  # bytes that the Hub hands out in one plain request


def fetch(repo: str, file: str) -> Path:
    """The file's path in the cache, once it is there."""
    from huggingface_hub import hf_hub_download

    if file.endswith((".gguf", ".safetensors")):
        _fetch_blob(repo, file)
    return Path(hf_hub_download(repo, file))


def _fetch_blob(repo: str, file: str) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = hf_hub_url(repo, file)
    found = get_hf_file_metadata(url)
    if not found.size or found.size > LARGEST:
        return  # the client has other ways for those
    if found.etag is None or not re.fullmatch(r"[\w-]+", found.etag):
        return
    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{repo.replace('/', '--')}"
    blob = cache / folder / "blobs" / found.etag
    part = blob.with_name(f"{blob.name}.warpsmith.part")
    lock = cache / ".locks" / folder / f"{found.etag}.lock"  # the client's own
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        with part.open("ab") as out:
            if out.tell() > found.size:
                out.seek(0)
                out.truncate()
            http_get(
                url,
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=found.size,
                displayed_filename=Path(file).name,
            )
        os.replace(part, blob)
