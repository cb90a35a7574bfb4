"""Which lines hold the GPU's memory at the peak of a step: LoRA as in small_gpu.py, planned for a cap but not capped.

    python3 -m benchmarks.peak --plan-gib 24 --tokens 65536 --host-gib 40

Beside the plan's parts stands what was alive at the peak, by the innermost lines of this repository that asked for it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks.plan import _qwen2_7b
from benchmarks.small_gpu import GIB, ask, run
from benchmarks.step import use_liger

from oomb import ChunkConfig

ROOT = str(Path(__file__).resolve().parents[1])


def fullest(events: list[dict[str, Any]]) -> tuple[int, Counter[str]]:
    """The peak of a trace of allocations in bytes, and what was alive then by place."""
    alive: dict[int, tuple[int, str]] = {}
    taken, peak, then = 0, 0, 0
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            taken += event["size"]
            if taken > peak:
                peak, then = taken, i
        elif event["action"] == "free_completed":
            taken -= event["size"]
    for event in events[: then + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], place(event["frames"])
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    held: Counter[str] = Counter()
    for size, where in alive.values():
        held[where] += size
    return peak, held


def place(frames: list[dict[str, Any]], depth: int = 3) -> str:
    """The innermost lines of this repository, and the innermost of all."""
    lines = [f for f in frames if f["filename"].endswith(".py")]
    own = [f for f in lines if f["filename"].startswith(ROOT)]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']}" for f in [*lines[:1], *own[:depth]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--plan-gib", type=float, default=24.0)
    parser.add_argument("--host-gib", type=float, default=40.0)
    given = parser.parse_args()
    device, config = torch.device("cuda", 0), ChunkConfig(host_budget_bytes=int(given.host_gib * GIB))
    use_liger()
    model = _qwen2_7b(given.layers)
    found = ask(model, given.tokens, config, device, gpu_bytes=int(given.plan_gib * GIB))
    print("\n".join(found.lines()), flush=True)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
    measured = run(model, given.tokens, found.follow(config), device)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    peak, held = fullest(events)
    foretold = sum(found.gpu.values())
    print(f"GiB: foretold {foretold / GIB:.2f}, measured {measured['peak'] / GIB:.2f}, traced {peak / GIB:.2f}")
    for where, size in held.most_common(30):
        print(f"{size / GIB:8.3f}  {where}")


if __name__ == "__main__":
    main()
