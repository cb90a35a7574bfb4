"""What a run shows while it trains: a bar that moves inside a step, a line per step, the peak of memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as it is printed, logged and drawn.

    Units:  loss in nats a token, seconds of the whole step, peak_bytes since the process began
    """

    step: int  # from 1
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_second: float
    peak_bytes: int

    def line(self, steps: int) -> str:
        """The line a person reads."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s"
            f"  peak {format_bytes(self.peak_bytes)}  {self.seconds:.1f} s  lr {self.lr:.2e}  grad {self.grad_norm:.3g}"
        )


class StepBar:
    """A bar over all chunk passes of a run: `chunk` is the callback that a chunked step calls after each."""

    def __init__(self, steps: int, file: TextIO | None = None) -> None:
        self._steps = steps
        self._step = 0
        self._bar = tqdm(total=steps, unit="chunk", file=file or sys.stderr, leave=False, mininterval=0.2, miniters=1)

    def begin(self, step: int) -> None:
        """Announce the step, from 1, whose chunks come next."""
        self._step = step
        self._bar.set_description(f"step {step}/{self._steps}", refresh=False)

    def chunk(self, done: int, total: int) -> None:
        """Move to `done` of the step's `total` chunk passes."""
        self._bar.total = self._steps * total
        self._bar.update((self._step - 1) * total + done - self._bar.n)

    def line(self, text: str, file: TextIO | None = None) -> None:
        """Print a line without tearing the bar."""
        with tqdm.external_write_mode(file=file or sys.stdout):
            print(text, file=file or sys.stdout, flush=True)

    def close(self) -> None:
        self._bar.close()


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on a CUDA device, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def format_bytes(count: int) -> str:
    """A count of bytes with the unit that leaves one to four digits before the point."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
