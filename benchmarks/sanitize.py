"""Every kernel once or twice on small shapes, for a memory and race checker:

compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py
compute-sanitizer --tool racecheck python3 benchmarks/sanitize.py

Results are not judged here; the tests do that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/paged_kv/src"))

from tests.paged_kv.backend_case import Case

from paged_kv import triton_attention

SHAPES = (
    {"tokens": 40, "heads": 7, "groups": 1, "dim": 128, "lengths": (200,)},
    {"tokens": 40, "heads": 4, "groups": 2, "dim": 64, "lengths": (200,), "window": 50, "split": 1},
    {"tokens": 40, "heads": 3, "groups": 1, "dim": 80, "lengths": (130, 0), "batch": 2, "documents": "some"},
    {"tokens": 3, "heads": 4, "groups": 1, "dim": 96, "lengths": (3000,), "page": 128},
)

for shape in SHAPES:
    for accumulate in ("owner", "atomic"):
        case = Case(device="cuda", dtype=torch.bfloat16, **shape)
        case.run(triton_attention, accumulate=accumulate)
        torch.cuda.synchronize()
        print(shape, accumulate, "ran", flush=True)
