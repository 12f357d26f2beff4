"""How fast a training step is, in several shapes, and where its time goes: the first thing to run on a new GPU.

python -m train.probe
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from train.model import Config
from train.pretrain import Settings, Trainer

SHAPES = ((False, 1024, 65_536), (True, 1024, 131_072), (True, 2048, 131_072), (True, 1024, 65_536))
ENOUGH = 75.0  # seconds after which no further shape is begun


def measure(compiled: bool, length: int, micro_tokens: int, profile: bool) -> None:
    torch.compiler.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    device = torch.device("cuda")
    settings = Settings(Path(), Path(), Path("none"), length=length, micro_tokens=micro_tokens, compile=compiled)
    trainer = Trainer(Config(), settings, device, started)
    rows = micro_tokens // length

    def step() -> None:
        trainer.micro_step(torch.randint(8000, (rows, length + 2), device=device), 1.0)
        trainer.optimizer.step(0.1)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    ready = time.monotonic()
    count = 8
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    speed = count * micro_tokens / (time.monotonic() - ready)
    print(
        f"compile {compiled} length {length} micro {micro_tokens}: {speed / 1e3:.0f}k tokens/s, "
        f"ready after {ready - started:.0f} s, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB",
        flush=True,
    )
    if profile:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as trace:
            step()
            torch.cuda.synchronize()
        print(
            trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60),
            flush=True,
        )


def main() -> None:
    started = time.monotonic()
    for i, shape in enumerate(SHAPES):
        if time.monotonic() - started > ENOUGH:
            break
        try:
            measure(*shape, profile=i == 1)
        except Exception as error:  # one shape that fails must not cost the others
            print(f"{shape} failed: {type(error).__name__}: {str(error)[:600]}", flush=True)


if __name__ == "__main__":
    main()
