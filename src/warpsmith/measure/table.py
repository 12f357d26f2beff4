"""Results as people and programs read them, with llama-bench's columns and keys."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from warpsmith.measure.speed import Result
from warpsmith.measure.units import count, size

FORMATS = ("md", "json", "jsonl", "csv")


def record(result: Result, facts: dict[str, Any]) -> dict[str, Any]:
    """One result with llama-bench's keys; `facts` are those of the model and of the machine."""
    return facts | {
        "test": result.test.name,
        "mode": "plain",
        "n_prompt": result.test.prompt,
        "n_gen": result.test.generate,
        "n_depth": result.test.depth,
        "n_nodes": result.test.nodes,
        "n_seq": result.test.sequences,
        "sampling": None if result.test.sampling is None else asdict(result.test.sampling),
        "avg_ns": round(result.avg_ns),
        "stddev_ns": round(result.stddev_ns),
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "median_ts": result.median_ts,
        "first_token_ms": result.median_ns / 1e6 if result.test.first else None,
        "samples_ns": result.samples_ns,
        "samples_ts": result.samples_ts,
    }


def table(records: Sequence[dict[str, Any]], format: str) -> str:
    """All results in one of `FORMATS`."""
    if format == "json":
        return json.dumps(list(records), indent=2)
    if format == "jsonl":
        return "\n".join(json.dumps(r) for r in records)
    if format == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return out.getvalue().rstrip("\n")
    return _markdown(records)


def _markdown(records: Sequence[dict[str, Any]]) -> str:
    several = any(r["n_seq"] > 1 for r in records)
    caches = any(r.get(name, "f16") != "f16" for r in records for name in ("type_k", "type_v"))
    header = ["model", "size", "params", "backend", "threads", *["type_k", "type_v"] * caches]
    header += [*["sequences"] * several, "test", "t/s", "median"]
    trees, bandwidth = any(r["n_nodes"] for r in records), records[0].get("bandwidth")
    first = any(r.get("first_token_ms") for r in records)
    header += ["first token, ms"] * first
    header += ["x one node"] * trees
    header += [f"of {bandwidth / 1e9:.0f} GB/s"] if bandwidth else []
    rows = [
        [
            r["model_type"],
            size(r["model_size"]),
            count(r["model_n_params"]),
            r["backends"],
            str(r["n_threads"]),
            *[r.get("type_k"), r.get("type_v")] * caches,
            *[str(r["n_seq"])] * several,
            r["test"],
            f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
            f"{r['median_ts']:.2f}",
            *[_filled(r.get("first_token_ms"), ".2f")] * first,
            *[_filled(r.get("times_one_node"), ".2f")] * trees,
            *([_filled(r["bandwidth_reached"], ".1%")] if bandwidth else []),
        ]
        for r in records
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    left = [name in ("model", "backend") for name in header]
    rule = ["-" * width + ("-" if is_left else ":") for width, is_left in zip(widths, left, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left, strict=True)]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(header), "| " + "| ".join(rule) + "|", *map(line, rows)])


def _filled(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
