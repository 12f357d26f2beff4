"""What the process was given: standard streams, signals, address space."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from warpsmith.errors import DoesNotFit, WarpsmithError

LEAST_ADDRESS_SPACE = 512 << 20  # below it numpy's and the tokenizer's libraries abort instead of raising an error


def mend_streams() -> None:
    """Python has None for a stream that was closed before we began (`2>&-`). Reserve its number, or the next file that
    is opened would be taken for the stream; without a stderr what belongs there goes nowhere."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as we run


def need_stdout() -> None:
    if sys.stdout is None:
        raise WarpsmithError("Standard output is closed.", "Leave it open, or send it to a file.")


def need_address_space() -> None:
    try:
        import resource
    except ImportError:  # not on every system
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise DoesNotFit(
            f"The address space of this process is limited to {limit >> 20} MiB.",
            f"Raise the limit (ulimit -v) to {LEAST_ADDRESS_SPACE >> 20} MiB and the size of the model.",
        )


def clean_up_when_told_to_end() -> None:
    """SIGTERM, and SIGHUP from a terminal that goes away, end us as an error would: unfinished files are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # cleaning up is not to be interrupted
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):  # the second does not exist everywhere
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # not if nohup had it ignored
            signal.signal(number, end)
