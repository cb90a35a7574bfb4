"""Every kernel once or twice on small shapes, for a memory and race checker:

compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py
compute-sanitizer --tool racecheck python3 benchmarks/sanitize.py window decode     only these parts

Results are not judged here; the tests do that. torch takes every tensor from the driver for the time of this: in the
blocks that its allocator shares out, what lies beside a tensor is memory all the same. `planted`, a part that runs only
when it is named, writes behind a tensor: a checker that says nothing of it sees nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/paged_kv/src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/sparse_pages/src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/offload/src"))

from tests.paged_kv.backend_case import Case
from tests.paged_kv.packed_case import Packed
from tests.paged_kv.sparse_case import SparseCase

from offload.gather import copy_rows
from paged_kv import triton_attention
from sparse_pages import PageSummary, select_pages

ON_GPU = {"device": "cuda", "dtype": torch.bfloat16}
DENSE = (
    {"tokens": 40, "heads": 7, "groups": 1, "dim": 128, "lengths": (200,)},
    {"tokens": 40, "heads": 4, "groups": 2, "dim": 64, "lengths": (200,), "window": 50, "split": 1},
    {"tokens": 40, "heads": 3, "groups": 1, "dim": 80, "lengths": (130, 0), "batch": 2, "documents": "some"},
    {"tokens": 3, "heads": 4, "groups": 1, "dim": 96, "lengths": (3000,), "page": 128},
)
WINDOWS = (
    {"tokens": 200, "heads": 8, "groups": 1, "dim": 64, "lengths": (90,), "window": 128},
    {"tokens": 70, "heads": 7, "groups": 1, "dim": 80, "lengths": (130, 0), "batch": 2, "window": 64},
    {"tokens": 70, "heads": 4, "groups": 2, "dim": 128, "lengths": (100,), "window": 64, "documents": "some"},
)
SPARSE = (
    {"tokens": 70, "heads": 7, "groups": 1, "dim": 128, "lengths": (300,), "entries": 3},
    {"tokens": 130, "heads": 4, "groups": 2, "dim": 64, "lengths": (130, 0), "batch": 2, "per_head": True},
    {"tokens": 150, "heads": 8, "groups": 1, "dim": 64, "lengths": (640,), "kind": "hot"},
)
DECODE = (
    {"starts": (300, 3), "counts": (1, 1), "repeat": 7, "dim": 128, "page": 128},
    {"starts": (0, 200, 127), "counts": (1, 5, 40), "repeat": 4, "dim": 64, "page": 64},
    {"starts": (300, 90), "counts": (1, 2), "dim": 64, "page": 64, "window": 128, "with_sinks": True},
    {"starts": (300, 90), "counts": (1, 3), "dim": 128, "page": 128, "lists": 4},
)


def attention(kind: type[Case], shapes: tuple[dict, ...]) -> Iterator[str]:
    for shape in shapes:
        for accumulate in ("owner", "atomic"):
            kind(**ON_GPU, **shape).run(triton_attention, accumulate=accumulate)
            yield f"{shape} {accumulate}"


def sinks() -> Iterator[str]:
    case = Case(**ON_GPU, **WINDOWS[0])
    grads = (case.earlier.clone(), case.earlier.clone())
    inputs, sinks = (case.q, case.k, case.v), torch.randn(case.heads, device="cuda")
    out, lse = triton_attention.forward(*inputs, case.segments(), case.geometry, sinks=sinks)
    triton_attention.backward_with_sinks(
        case.dout, *inputs, out, lse, case.segments(grads), case.geometry, sinks=sinks, past_grad=True,
        accumulate="owner",
    )  # fmt: skip
    yield "sinks"


def decode() -> Iterator[str]:
    for shape in DECODE:
        Packed(**ON_GPU, **shape).run("auto")
        yield str(shape)


def select() -> Iterator[str]:
    for page, scorer, per_head in ((64, "mean", False), (128, "minmax", True)):
        summary = PageSummary(page, scorer)
        summary.append(torch.randn(1, 12 * page, 2, 64, **ON_GPU))
        q = torch.randn(1, 2 * page + 5, 8, 64, **ON_GPU)
        select_pages(q, summary, past_pages=9, top_k=3, recent=2, sinks=1, per_head=per_head)
        yield f"{page} {scorer}"


def gather() -> Iterator[str]:
    for dtype, width in ((torch.bfloat16, 3000), (torch.float32, 7)):
        host = torch.randn(9, width).to(dtype).pin_memory()
        rows = torch.empty(4, width, device="cuda", dtype=dtype)
        ids = torch.tensor([8, 0, -1, 3], device="cuda")
        for direction in (True, False):
            copy_rows(host, rows, ids, gather=direction)
        yield f"{dtype} {width}"


@triton.jit
def _write(ptr, place):
    tl.store(ptr + place, 1)


def planted() -> Iterator[str]:
    _write[(1,)](torch.empty(2**20, device="cuda", dtype=torch.int32), 2**20 + 2**18)
    yield "a store behind the end"


PARTS = {
    "dense": lambda: attention(Case, DENSE),
    "window": lambda: attention(Case, WINDOWS),
    "sinks": sinks,
    "sparse": lambda: attention(SparseCase, SPARSE),
    "decode": decode,
    "select": select,
    "gather": gather,
}
PLANTED = {"planted": planted}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        for what in (PARTS | PLANTED)[part]():
            torch.cuda.synchronize()
            print(part, what, "ran", flush=True)
