"""Train wisp on packed tokens.

python -m train.pretrain --data DIR --out DIR --state DIR

Full-precision state is kept under --state every so many steps: the same command goes on from there after an
interruption, over the windows that an uninterrupted run would have read.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train import shards
from train.evaluate import bits_per_byte
from train.model import Config, Qwen35, half_precision, initialise
from train.optim import Optimizer, multiplier


@dataclass
class Settings:
    data: Path
    out: Path
    state: Path
    steps: int = 1440
    length: int = 1024
    batch_tokens: int = 262_144
    micro_tokens: int = 131_072
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    decay: float = 0.1
    warmup: float = 0.015
    decay_from: float = 0.55
    mtp_weight: float = 0.2
    compile: bool = True
    seed: int = 35
    save_every: int = 240
    log_every: int = 20


class Windows:
    """Endless random windows of `size` tokens; each epoch cuts the stream at another offset and reshuffles."""

    def __init__(self, tokens: Tensor, size: int, stride: int, seed: int) -> None:
        self.tokens, self.size, self.stride = tokens, size, stride
        self.random = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self._starts = torch.empty(0, dtype=torch.long)

    def starts(self, count: int) -> Tensor:
        while len(self._starts) < count:
            offset = int(torch.randint(self.stride, (1,), generator=self.random))
            windows = (len(self.tokens) - offset - self.size) // self.stride
            order = torch.randperm(windows, generator=self.random) * self.stride + offset
            self._starts = torch.cat([self._starts, order])
            self.epoch += 1
        starts, self._starts = self._starts[:count], self._starts[count:]
        return starts

    def take(self, count: int) -> Tensor:
        index = self.starts(count).to(self.tokens.device)[:, None] + torch.arange(self.size, device=self.tokens.device)
        return self.tokens[index].long()


def next_token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, embedding).float().flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config: Config, settings: Settings, device: torch.device, started: float) -> None:
        self.s, self.device, self.started = settings, device, started
        torch.set_float32_matmul_precision("high")
        self.model = Qwen35(config).to(device)
        initialise(self.model, settings.seed)
        self.optimizer = Optimizer(self.model, settings.matrix_rate, settings.other_rate, settings.decay)
        self.step, self.seen = 0, 0
        self.history: list[dict] = []
        self._restore()
        self.loss = next_token_loss
        if settings.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in (*self.model.model.layers, *self.model.mtp.layers):
                layer.compile(dynamic=False)
            self.loss = torch.compile(next_token_loss, dynamic=False)

    def _restore(self) -> None:
        if (self.s.state / "state.pt").exists():
            saved = torch.load(self.s.state / "state.pt", map_location=self.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.restore(saved["optimizer"])
            self.step, self.seen, self.history = saved["step"], saved["seen"], saved["history"]
            print(f"continuing at step {self.step}", flush=True)

    def save(self) -> None:
        s = self.s
        s.out.mkdir(parents=True, exist_ok=True)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(s).items()}
        (s.out / "pretrain.json").write_text(json.dumps({"settings": settings, "history": self.history}))
        if self.step == s.steps:
            shards.save(s.out / "wisp", self.model.state_dict(), self.model.config.to_json())
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "seen": self.seen,
            "history": self.history,
        }
        s.state.mkdir(parents=True, exist_ok=True)
        torch.save(state, s.state / "state.new")
        (s.state / "state.new").replace(s.state / "state.pt")  # an interruption leaves the old or the new one, whole

    def evaluate(self, heldout: dict[str, np.ndarray]) -> None:
        with torch.compiler.set_stance("force_eager"):  # compiling once more for a few batches would not pay
            result = bits_per_byte(self.model, heldout, self.s.length, max(1, 65_536 // self.s.length))
        self.history.append({"step": self.step, "tokens": self.seen, "evaluation": result})
        print(
            f"held out at step {self.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
            flush=True,
        )

    def micro_step(self, window: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ids, following, after = window[:, :-2], window[:, 1:-1], window[:, 2:]
        embedding = self.model.model.embed_tokens.weight
        with half_precision(self.device):
            hidden, _ = self.model.hidden(ids)
            loss = self.loss(hidden, embedding, following)
            total, mtp = loss, loss.detach() * 0
            if self.s.mtp_weight:
                ahead = self.model.mtp(
                    self.model.model.embed_tokens(following), hidden, self.model.rope(0, ids.shape[1])
                )
                mtp = self.loss(ahead, embedding, after)
                total = loss + self.s.mtp_weight * mtp
        (total * scale).backward()
        return loss.detach(), mtp.detach()

    def run(self, tokens: np.ndarray, heldout: dict[str, np.ndarray]) -> None:
        s = self.s
        stream = torch.from_numpy(tokens.astype(np.int32)).to(self.device)
        windows = Windows(stream, s.length + 2, s.length, s.seed)
        rows = max(1, s.micro_tokens // s.length)
        micro_steps = max(1, s.batch_tokens // (rows * s.length))
        windows.starts(self.step * micro_steps * rows)  # those were read before the interruption
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        sums = torch.zeros(2, device=self.device)
        first = marked_step = self.step
        marked = time.monotonic()
        while self.step < s.steps:
            losses = [self.micro_step(windows.take(rows), 1 / micro_steps) for _ in range(micro_steps)]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            rate = multiplier(self.step / s.steps, s.warmup, s.decay_from)
            self.optimizer.step(rate)
            self.step += 1
            self.seen += micro_steps * rows * s.length
            sums += torch.stack([torch.stack(pair) for pair in losses]).mean(0)
            saves = self.step % s.save_every == 0 or self.step == s.steps
            if self.step % s.log_every == 0 or self.step - first in (1, 5) or saves:
                loss, mtp = (sums / (self.step - marked_step)).tolist()
                now = time.monotonic()
                speed = (self.step - marked_step) * micro_steps * rows * s.length / (now - marked)
                row = {"step": self.step, "tokens": self.seen, "loss": loss, "mtp": mtp, "rate": rate}
                row |= {"tokens_per_second": speed, "seconds": now - self.started}
                self.history.append(row)
                print(
                    f"step {self.step} epoch {windows.epoch} loss {loss:.4f} mtp {mtp:.4f} rate {rate:.3f} "
                    f"{speed / 1e3:.0f}k tokens/s {now - self.started:.0f} s",
                    flush=True,
                )
                if not np.isfinite(loss):
                    raise FloatingPointError(f"loss is {loss} at step {self.step}")
                sums.zero_()
                marked, marked_step = now, self.step
            if saves:
                self.evaluate(heldout)
                self.save()
                marked = time.monotonic()
        print(f"done: {self.step} steps, {self.seen / 1e6:.1f}M tokens", flush=True)


def load_heldout(directory: Path) -> dict[str, np.ndarray]:
    with np.load(directory / "heldout.npz") as archive:
        return dict(archive)


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, field in Settings.__dataclass_fields__.items():
        option = "--" + name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = {"int": int, "float": float}.get(str(field.type), Path)
            required = name in ("data", "out", "state")
            parser.add_argument(option, type=kind, required=required, default=None if required else field.default)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    started = time.monotonic()
    settings = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = np.load(settings.data / "tokens.npy")
    trainer = Trainer(Config(), settings, device, started)
    count = sum(p.numel() for p in trainer.model.parameters())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{count / 1e6:.2f}M parameters, {len(tokens)} tokens, torch {torch.__version__}, {name}", flush=True)
    trainer.run(tokens, load_heldout(settings.data))


if __name__ == "__main__":
    main()
