"""The corpus: fetch pinned packages, filter them, split by package, tokenise, pack.

python -m train.data fetch --wheels DIR                  download the wheels pinned in packages.txt
python -m train.data build --wheels DIR --corpus DIR     text of both splits, and DATA.md
python -m train.data pack  --corpus DIR --tokenizer DIR --out DIR     tokens.npy, heldout.npz
python -m train.data prompts --corpus DIR                heldout_prompts.jsonl: excerpts to measure with
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import email
import email.message
import hashlib
import itertools
import json
import random
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.chat import conversations, exchanges
from train.filters import (
    CONTROL_TOKEN,
    TEST_FILE,
    Benchmark,
    Seen,
    clean,
    keep_fraction,
    licence_of,
    why_not_source,
)

HERE = Path(__file__).parent
SEED = 35
FETCH_BATCH = 20  # packages a call of pip, whose start takes longer than most downloads
HELD_OUT_SHARE = 0.04  # of packages
HELD_OUT_BYTES = 2_500_000
TEST_SHARE = 0.06  # of test files: they are repetitive, yet asserts and fixtures should not be unknown
PACKAGE_BYTES = 6_000_000  # no single package may dominate
CHAT_SHARE = 0.10
TRAINING_TOKENS = 150_000_000  # the rest of the corpus is left out
KINDS = ("code", "prose", "chat")
PROMPTS, PROMPT_BYTES, CONTINUATION_BYTES = 60, 800, 600
PROMPT_FILE = HERE / "heldout_prompts.jsonl"


@dataclass
class Package:
    name: str
    version: str
    licence: str
    summary: str
    readme: str
    sources: list[tuple[str, str]]  # path, cleaned text

    @property
    def held_out(self) -> bool:
        return keep_fraction("held-out:" + self.name, HELD_OUT_SHARE)


def digest(*parts: bytes) -> str:
    """What tells one run's data from another's in the log."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()[:16]


def fetch(wheels: Path) -> None:
    """Download every pinned wheel; one that is gone is reported and skipped."""
    wheels.mkdir(parents=True, exist_ok=True)
    pins = [line for line in (HERE / "packages.txt").read_text().splitlines() if line and line[0] != "#"]
    platforms = ("any", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
    target = ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
    target += [argument for p in platforms for argument in ("--platform", p)]

    def download(some: list[str]) -> bool:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *target, *some]
        return not subprocess.run(command, capture_output=True).returncode

    def missing(some: list[str]) -> list[str]:
        return [] if download(some) else [pin for pin in some if not download([pin])]

    batches = [pins[i : i + FETCH_BATCH] for i in range(0, len(pins), FETCH_BATCH)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for pin in itertools.chain.from_iterable(pool.map(missing, batches)):
            print(f"not available: {pin}")
    found = sorted(wheels.glob("*.whl"))
    together = digest(*(part for wheel in found for part in (wheel.name.encode(), wheel.read_bytes())))
    print(f"{len(pins)} packages pinned, {len(found)} wheels, sha256 {together}")


def open_wheel(path: Path) -> tuple[Package | None, collections.Counter[str]]:
    """A wheel's own Python files and its readme (None when its licence is not one of ours), and what was skipped."""
    reasons: collections.Counter[str] = collections.Counter()
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        meta_name = next(n for n in names if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
        metadata: email.message.Message = email.message_from_bytes(wheel.read(meta_name))
        licence = licence_of(metadata)
        if licence is None:
            reasons["package licence"] += 1
            return None, reasons
        body = metadata.get_payload(decode=True)
        readme = body.decode("utf-8", "replace") if isinstance(body, bytes) else ""
        name = str(metadata["Name"])
        entries = ((n, lambda n=n: wheel.read(n)) for n in sorted(names))
        sources = list(read_sources(name, entries, reasons))
        summary = str(metadata.get("Summary") or "")
        return Package(name, str(metadata["Version"]), licence, summary, clean(readme), sources), reasons


def read_sources(owner: str, entries, reasons: collections.Counter[str]) -> Iterator[tuple[str, str]]:
    """The files of one package that pass the filters, in a repeatable shuffled order, up to its share."""
    candidates = [(n, read) for n, read in entries if n.endswith(".py")]
    random.Random(owner).shuffle(candidates)
    total = 0
    for name, read in candidates:
        if TEST_FILE.search(name) and not keep_fraction(f"{owner}/{name}", TEST_SHARE):
            reasons["test"] += 1
            continue
        if total > PACKAGE_BYTES:
            reasons["package share"] += 1
            continue
        try:
            text = clean(read().decode())
        except UnicodeDecodeError:
            reasons["encoding"] += 1
            continue
        reason = why_not_source(name, text)
        if reason:
            reasons[reason] += 1
            continue
        total += len(text)
        yield name, text


def standard_library(reasons: collections.Counter[str]) -> Iterator[Package]:
    """Each top-level module or package of the running CPython counts as a package of its own for the split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    groups: dict[str, list[tuple[str, Path]]] = collections.defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in ("site-packages", "test", "ensurepip", "pydoc_data"):
            groups[relative.parts[0].removesuffix(".py")].append((str(relative), path))
    version = sys.version.split()[0]
    for name, files in groups.items():
        sources = list(read_sources(name, [(n, p.read_bytes) for n, p in files], reasons))
        yield Package(f"cpython/{name}", version, "PSF-2.0", "", "", sources)


def build(wheels: Path, corpus: Path, benchmark: Benchmark, report: Path, heldout_bytes: int) -> None:
    """Write train.jsonl and heldout.jsonl under `corpus`, and what went into them as `report`."""
    reasons: collections.Counter[str] = collections.Counter()
    packages = list(standard_library(reasons))
    paths = sorted(wheels.rglob("*.whl"), key=lambda p: p.name.lower())
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        for package, skipped in pool.map(open_wheel, paths, chunksize=8):
            reasons.update(skipped)
            if package and package.sources:
                packages.append(package)
    corpus.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    rng = random.Random(SEED)
    kept: dict[str, int] = {}
    # Training packages first: what they hold is then dropped from the held-out side, never the reverse.
    for split in (False, True):
        documents: list[tuple[str, str, str]] = []
        pairs: list[tuple[str, str]] = []
        for package in packages:
            if package.held_out != split:
                continue
            size = 0
            limit = 0.2 if split else 0.5
            for _, text in sorted(package.sources):
                if seen.share(text) > limit:
                    reasons["near-duplicate"] += 1
                elif benchmark.holds(text):
                    reasons["benchmark text"] += 1
                else:
                    seen.add(text)
                    documents.append(("code", package.name, text))
                    pairs += exchanges(text, rng)
                    size += len(text)
            readme = package.readme[:20_000]
            if len(readme) > 400 and seen.share(readme) < limit and not CONTROL_TOKEN.search(readme):
                seen.add(readme)
                documents.append(("prose", package.name, readme))
                summary = package.summary.strip().rstrip(".")
                if 15 < len(summary) < 200:
                    pairs.append((f"What is {package.name}?", f"{package.name} is a Python package: {summary}."))
            kept[package.name] = size
        rng.shuffle(pairs)
        code_bytes = sum(len(text) for _, _, text in documents)
        chats, chat_bytes = [], 0
        for text in conversations(pairs, rng):
            if chat_bytes > CHAT_SHARE * code_bytes:
                break
            chats.append(("chat", "", text))
            chat_bytes += len(text)
        documents += chats
        rng.shuffle(documents)
        if split:
            documents = trim(documents, heldout_bytes)
        name = "heldout" if split else "train"
        with open(corpus / f"{name}.jsonl", "w") as f:
            for kind, owner, text in documents:
                f.write(json.dumps({"kind": kind, "package": owner, "text": text}) + "\n")
        sha = digest((corpus / f"{name}.jsonl").read_bytes())
        sizes: collections.Counter[str] = collections.Counter()
        for kind, _, text in documents:
            sizes[kind] += len(text.encode())
        shares = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sizes.items())
        print(f"{name}.jsonl: {shares}, {len(documents)} documents, sha256 {sha}")
    print(dict(reasons.most_common()))
    write_report(packages, kept, reasons, report)


def trim(documents: list[tuple[str, str, str]], limit: int) -> list[tuple[str, str, str]]:
    total, result = 0, []
    for document in documents:
        total += len(document[2])
        if total > limit:
            break
        result.append(document)
    return result


def write_report(packages: list[Package], kept: dict[str, int], reasons: collections.Counter[str], path: Path) -> None:
    library = [p for p in packages if p.name.startswith("cpython/")]
    others = sorted((p for p in packages if p not in library and kept.get(p.name)), key=lambda p: p.name.lower())
    held = ", ".join(p.name for p in library if p.held_out)
    lines = [
        "# What wisp was trained on",
        "",
        "Written by `python -m train.data build`; the wheels are pinned in `packages.txt`.",
        "Only packages whose metadata states an MIT, BSD, Apache or PSF licence are used.",
        "`heldout_prompts.jsonl` quotes short excerpts of held-out packages, each under its package's licence below.",
        "",
        f"CPython {library[0].version} standard library (PSF-2.0), {sum(kept[p.name] for p in library) / 1e6:.1f} MB. "
        f"Held out: {held}.",
        "",
        "Files left out, by reason: " + ", ".join(f"{k} {v}" for k, v in reasons.most_common()) + ".",
        "",
        "| package | version | licence | MB | split |",
        "|---|---|---|---|---|",
    ]
    for p in others:
        split = "held out" if p.held_out else "train"
        lines.append(f"| {p.name} | {p.version} | {p.licence} | {kept[p.name] / 1e6:.2f} | {split} |")
    path.write_text("\n".join(lines) + "\n")


def pack(corpus: Path, tokenizer_dir: Path, out: Path, most: int) -> None:
    """Tokenise the held-out split and, up to about `most` tokens, the training split, which is shuffled already."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    def batches(split: str) -> Iterator[tuple[list[dict[str, str]], list[np.ndarray]]]:
        with open(corpus / f"{split}.jsonl") as lines:
            while documents := [json.loads(line) for line in itertools.islice(lines, 512)]:
                encoded = tokenizer.encode_batch_fast([d["text"] for d in documents])
                yield documents, [np.array([*e.ids, end], np.uint16) for e in encoded]

    out.mkdir(parents=True, exist_ok=True)
    documents, ids = (list(itertools.chain(*parts)) for parts in zip(*batches("heldout"), strict=True))
    write_heldout(out / "heldout.npz", documents, ids)
    ids, size = [], 0
    for _, some in batches("train"):
        ids += some
        size += sum(map(len, some))
        if size >= most:
            break
    tokens = np.concatenate(ids)
    np.save(out / "tokens.npy", tokens)
    print(f"tokens.npy: {len(tokens)} tokens, sha256 of them {digest(tokens.tobytes())}")


def cut_excerpt(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Whole lines around a random place: what a prompt shows, and how the file goes on."""
    ends = [i + 1 for i, character in enumerate(text) if character == "\n"]
    middle = [e for e in ends if PROMPT_BYTES <= e <= len(text) - CONTINUATION_BYTES]
    if not middle or not text.isascii():
        return None
    place = rng.choice(middle)
    first = next(e for e in ends if e >= place - PROMPT_BYTES)
    last = max(e for e in ends if e <= place + CONTINUATION_BYTES)
    prompt, continuation = text[first:place], text[place:last]
    return (prompt, continuation) if prompt.strip() and continuation.strip() else None


def write_prompts(corpus: Path, path: Path) -> None:
    """A few excerpts of held-out code, one package after the other so that none dominates."""
    documents: dict[str, list[str]] = collections.defaultdict(list)
    with open(corpus / "heldout.jsonl") as f:
        for document in map(json.loads, f):
            if document["kind"] == "code":
                documents[document["package"]].append(document["text"])
    rng = random.Random(SEED)
    rows: list[dict[str, str]] = []
    while len(rows) < PROMPTS and any(documents.values()):
        for package in sorted(documents):
            if len(rows) < PROMPTS and documents[package]:
                excerpt = cut_excerpt(documents[package].pop(0), rng)
                if excerpt:
                    rows.append({"package": package, "prompt": excerpt[0], "continuation": excerpt[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path.name}: {len(rows)} excerpts of {len({r['package'] for r in rows})} packages")


def write_heldout(path: Path, documents: list[dict[str, str]], ids: list[np.ndarray]) -> None:
    arrays = {
        "tokens": np.concatenate(ids),
        "lengths": np.array([len(x) for x in ids], np.int32),
        "bytes": np.array([len(d["text"].encode()) for d in documents], np.int32),
        "kind": np.array([KINDS.index(d["kind"]) for d in documents], np.uint8),
    }
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {len(arrays['tokens'])} tokens, sha256 of them {digest(arrays['tokens'].tobytes())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("fetch", "build", "pack", "prompts"))
    parser.add_argument("--wheels", type=Path, default=Path("wheels"))
    parser.add_argument("--corpus", type=Path, default=Path("corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("tokenizer"))
    parser.add_argument("--out", type=Path, default=Path("packs"))
    parser.add_argument("--tokens", type=int, default=TRAINING_TOKENS, help="how many to train on, roughly")
    parser.add_argument("--heldout-bytes", type=int, default=HELD_OUT_BYTES, help="most text of the held-out split")
    parser.add_argument("--report", type=Path, default=HERE / "DATA.md", help="where build tells what was used")
    parser.add_argument("--benchmark", type=Path, help="jsonl with `prompt` fields that must not be trained on")
    args = parser.parse_args()
    if args.step == "fetch":
        fetch(args.wheels)
    elif args.step == "build":
        build(args.wheels, args.corpus, Benchmark(args.benchmark), args.report, args.heldout_bytes)
    elif args.step == "prompts":
        write_prompts(args.corpus, PROMPT_FILE)
    else:
        pack(args.corpus, args.tokenizer, args.out, args.tokens)


if __name__ == "__main__":
    main()
