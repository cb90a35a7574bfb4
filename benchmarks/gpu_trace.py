"""What a profiler saw of the device: which kernels and copies ran, when, and on which stream.

Read from the trace in Chrome's format, which says more than torch's own averages: grids, streams and gaps.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# by what is in a kernel's name, the first that fits
KINDS = (
    ("norm, RoPE, SwiGLU", r"rms_norm|rope|swiglu"),
    ("softmax and loss", r"softmax|nll_loss|_loss_(fwd|bwd)_kernel"),
    ("attention backward", r"bprop|dot_do_o|convert_dq|fmha_reduce|_backward_kernel|_bwd_kernel|_dkdv|_dq_"),
    ("attention forward", r"fprop|_forward_kernel|_attention_fwd"),
    ("merges, sums into pages", r"_merge_|_add_to_pages"),
    ("matmul", r"gemm|nvjet|cutlass|splitK|cublas"),
    ("embedding", r"embedding|indexSelect|gather_kernel|krn_partial|sum_and_scatter|compute_grad_weight|radix_sort"),
    ("reductions", r"reduce_kernel"),
    ("additions", r"CUDAFunctor_add|CUDAFunctorOnSelf_add"),
    ("casts and copies", r"copy_kernel|direct_copy|CatArray"),
)
COPIES = {"HtoD": "copies in", "DtoH": "copies out", "DtoD": "copies within"}


@dataclass(frozen=True)
class Event:
    """One kernel, copy or fill. `asked`: when the CPU asked for it. Units: seconds since the first."""

    start: float
    stop: float
    kind: str
    name: str
    stream: int
    grid: tuple[int, ...]
    asked: float = 0.0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def device_events(profiler: Any) -> list[Event]:
    """The events of a torch.profiler.profile that has ended, by start."""
    return parse(chrome_trace(profiler))


def chrome_trace(profiler: Any) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def parse(trace: dict) -> list[Event]:
    """The device's events in a trace in Chrome's format, by start."""
    rows = [row for row in trace["traceEvents"] if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    rows.sort(key=lambda row: row["ts"])
    zero = rows[0]["ts"] if rows else 0
    asked = {row["args"]["correlation"]: row["ts"] for row in _calls(trace) if "correlation" in row["args"]}
    return [
        Event(
            (row["ts"] - zero) / 1e6,
            (row["ts"] + row["dur"] - zero) / 1e6,
            _kind(row["cat"], row["name"]),
            _short(row["name"]),
            int(row["args"].get("stream", row["tid"])),
            tuple(row["args"].get("grid", ())),
            (asked.get(row["args"].get("correlation"), row["ts"]) - zero) / 1e6,
        )
        for row in rows
    ]


def merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times during which any of the events ran."""
    spans: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda e: e.start):
        if spans and event.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.stop))
        else:
            spans.append((event.start, event.stop))
    return spans


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both; each in order and without overlaps of its own."""
    total, j = 0.0, 0
    for start, stop in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < stop:
            total += min(stop, b[k][1]) - max(start, b[k][0])
            k += 1
    return total


def is_compute(event: Event) -> bool:
    """Whether it is work on data, not its way over the link."""
    return event.kind not in ("copies in", "copies out")


@dataclass(frozen=True)
class Gap:
    """A time in which nothing computed. late: the CPU asked for what came after too late to fill it. Units: seconds"""

    seconds: float
    before: str
    after: str
    late: bool


def gaps(events: Sequence[Event]) -> Iterator[Gap]:
    """Every time in which nothing computed, between kernels."""
    busy = None
    for event in sorted(filter(is_compute, events), key=lambda e: e.start):
        if busy is not None and event.start > busy.stop:
            yield Gap(event.start - busy.stop, busy.name, event.name, event.asked > busy.stop - 5e-6)
        if busy is None or event.stop > busy.stop:
            busy = event


def waits(trace: dict) -> dict[str, tuple[float, int]]:
    """Calls in which the CPU waits for the device or the driver: seconds and number, by name."""
    found: dict[str, tuple[float, int]] = {}
    for row in _calls(trace):
        if re.search("Synchronize|Malloc|Free|HostAlloc|Register", row["name"]):
            seconds, count = found.get(row["name"], (0.0, 0))
            found[row["name"]] = (seconds + row["dur"] / 1e6, count + 1)
    return found


def _calls(trace: dict) -> list[dict]:
    return [row for row in trace["traceEvents"] if row.get("cat") in ("cuda_runtime", "cuda_driver")]


def _kind(category: str, name: str) -> str:
    if category == "gpu_memset":
        return "fills"
    if category == "gpu_memcpy":
        return next((kind for word, kind in COPIES.items() if word in name), "copies within")
    if re.search("FillFunctor", name):
        return "fills"
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other kernels")


def _short(name: str) -> str:
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|c10::", "", name)
    return re.sub(r"cudnn_generated_fort_native_", "", name)
