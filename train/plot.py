"""The loss curve of a run: python -m train.plot OUT/pretrain.json DIR writes DIR/loss.csv and DIR/loss.png."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    history = json.loads(source.read_text())["history"]
    rows = [r for r in history if "loss" in r]
    scores = [r for r in history if "evaluation" in r]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "loss.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([r["tokens"] / 1e6 for r in rows], [r["loss"] for r in rows], lw=0.8, label="training")
    axes.plot([r["tokens"] / 1e6 for r in rows], [r["mtp"] for r in rows], lw=0.8, label="MTP, training")
    held = [r["evaluation"]["loss"] for r in scores]
    axes.plot([r["tokens"] / 1e6 for r in scores], held, "o-", label="held out")
    axes.set(xlabel="million tokens", ylabel="nats a token", ylim=(None, min(6.0, rows[0]["loss"])))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
