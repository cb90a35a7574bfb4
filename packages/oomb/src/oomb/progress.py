"""What a run shows while it trains: a bar that moves inside a step, a line per step, peaks of memory."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.eta import ModelWork, StepClock, passes
from oomb.step_plan import StepPlan

# Dense bfloat16 peaks in TFLOP/s, from the makers' data sheets; other devices have no utilization to show.
PEAK_TFLOPS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10": 125.0,
    "RTX 4090": 165.0, "RTX 3090": 71.0, "B200": 2250.0, "GH200": 989.0,
}  # fmt: skip


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as it is printed, logged and drawn.

    Units:  loss in nats a token, seconds of the whole step, peaks in bytes since the process began
    mfu: share of the device's bfloat16 peak that the model's own operations make up; None where it is not known
    """

    step: int  # from 1
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_second: float
    peak_bytes: int  # of the device that trains
    host_peak_bytes: int
    mfu: float | None = None

    def line(self, steps: int) -> str:
        """The line a person reads."""
        used = "" if self.mfu is None else f"  mfu {self.mfu:.0%}"
        host = "" if self.host_peak_bytes == self.peak_bytes else f" (host {format_bytes(self.host_peak_bytes)})"
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s"
            f"{used}  peak {format_bytes(self.peak_bytes)}{host}  {self.seconds:.1f} s  lr {self.lr:.2e}  "
            f"grad {self.grad_norm:.3g}"
        )


class StepBar:
    """A bar over the work of a whole run. Its end is reckoned from what chunks cost, which grows with position."""

    def __init__(self, steps: int, done: int = 0, file: TextIO | None = None) -> None:
        self._steps = steps
        shape = "{desc} {percentage:3.0f}%|{bar:30}|{postfix}"
        self._bar = tqdm(
            total=float(steps), initial=float(done), unit="chunk", file=file or sys.stderr, leave=False,
            mininterval=0.2, miniters=0, bar_format=shape,
        )  # fmt: skip

    def show(self, step: int, share: float, chunk: str, seconds_left: float) -> None:
        """`share` of step `step` (from 1) is done; `seconds_left` are left of the whole run."""
        self._bar.set_description_str(f"step {step}/{self._steps}, {chunk}", refresh=False)
        self._bar.set_postfix_str(f"{_duration(seconds_left)} left", refresh=False)
        self._bar.update(max(step - 1 + share - self._bar.n, 0.0))

    def line(self, text: str, file: TextIO | None = None) -> None:
        """Print a line without tearing the bar."""
        with tqdm.external_write_mode(file=file or sys.stdout):
            print(text, file=file or sys.stdout, flush=True)

    def close(self) -> None:
        self._bar.close()


class Progress(TrainerCallback):
    """Shows a Trainer's steps: a bar, a line and a row of `metrics.jsonl` for each; keeps the records for pictures.

    Adds tokens a second, utilization and peaks to what the Trainer reports. plan: what a step keeps, if known
    """

    def __init__(
        self,
        work: ModelWork,
        metrics: Path,
        report: Callable[[str], None] | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        self.records: list[StepRecord] = []
        self._work, self._metrics, self._report, self._plan = work, metrics, report, plan
        self._bar: StepBar | None = None
        self._clock: StepClock | None = None
        self._before: dict[tuple[int, int], list[float]] = {}  # by tokens and passes
        self._mean = 0.0  # seconds of a step
        self._began = self._ticked = 0.0
        self._tokens = self._batches = 0
        self._flops = 0.0
        self._written = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar = StepBar(state.max_steps, state.global_step)
        if state.global_step:  # a run that goes on: what it had measured up to there
            rows = [json.loads(line) for line in self._metrics.read_text(encoding="utf-8").splitlines()]
            self.records = [StepRecord(**row) for row in rows if row["step"] <= state.global_step]

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = self._ticked = time.perf_counter()
        self._tokens = self._batches = 0
        self._flops = 0.0

    def on_batch(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, shape: Any) -> None:
        """A batch of a step begins. Shapes: shape of input_ids"""
        rows, tokens = shape
        self._shape = (rows, tokens)
        self._tokens += rows * tokens
        self._batches += 1
        self._flops += 3 * rows * self._work.forward(tokens)
        self._clock = None

    def on_chunk(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, done: int, total: int
    ) -> None:
        """A chunk of a batch is done."""
        if self._bar is None or not state.global_step < state.max_steps or not self._batches:
            return
        now = time.perf_counter()
        if self._clock is None or done == 1:
            self._key = (self._shape[1], total)
            plan = self._plan
            kept = plan.kept if plan is not None and total == 2 * plan.chunks - 1 else None
            work = passes(self._work, self._shape[1], total, kept)
            self._clock = StepClock(work, self._before.get(self._key))
        self._clock.tick(now - self._ticked)
        self._ticked = now
        if done == total:
            self._before[self._key] = self._clock.seconds
        group, batch = args.gradient_accumulation_steps, self._clock.whole()
        this_step = self._clock.remaining() + max(group - self._batches, 0) * batch
        left = this_step + (state.max_steps - state.global_step - 1) * (self._mean or group * batch)
        share = 1 - this_step / max(group * batch, 1e-9)
        self._bar.show(state.global_step + 1, min(max(share, 0.0), 1.0), f"chunk {done}/{total}", left)

    def on_measure(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, Any]
    ) -> None:
        """A step's numbers are about to be reported."""
        if self._bar is None:
            return
        seconds = time.perf_counter() - self._began
        self._mean = 0.5 * (self._mean + seconds) if self._mean else seconds
        record = StepRecord(
            state.global_step, logs["loss"], float(logs["grad_norm"]), logs["learning_rate"], seconds,
            self._tokens / seconds, peak_bytes(args.device), host_peak_bytes(),
            utilization(self._flops, seconds, args.device),
        )  # fmt: skip
        self.records.append(record)
        logs |= {
            name: value
            for name, value in asdict(record).items()
            if name in ("tokens_per_second", "peak_bytes", "host_peak_bytes", "mfu") and value is not None
        }
        # Written with the first step's line, not before: a run that is refused leaves the metrics of the one before.
        new = self.records if not self._written else [record]
        with self._metrics.open("a" if self._written else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in new)
        self._written = True
        (self._report or self._bar.line)(record.line(state.max_steps))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = kwargs["metrics"].get("eval_loss")
        if self._bar is not None and loss is not None:
            (self._report or self._bar.line)(f"held out after step {state.global_step}: loss {loss:.4f}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def utilization(flops: float, seconds: float, device: torch.device) -> float | None:
    """Share of a device's bfloat16 peak; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)  # an L40 is no L4, an RTX A1000 no A100
    if " MIG " in name:  # a part of one
        return None
    peak = next((tflops for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)
    return None if peak is None else flops / seconds / (peak * 1e12)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on a CUDA device, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_peak_bytes()


def host_peak_bytes() -> int:
    """The most memory this process has had resident."""
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


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
