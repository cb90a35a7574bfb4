"""Where the time of one chunked step goes on the GPU: kernels by total time, and how long the GPU was busy.

python3 benchmarks/profile_step.py --system "resident" --tokens 32768
"""

from __future__ import annotations

import argparse
import time

import torch
from step import SYSTEMS, VOCAB, build, use_liger
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="resident", choices=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=30)
    arguments = parser.parse_args()
    use_liger()
    model = build(arguments.layers)
    ids = torch.randint(VOCAB, (1, arguments.tokens)).cuda()
    step = SYSTEMS[arguments.system]
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(model, ids)
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(model, ids)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    rows = [(e.key, e.self_device_time_total / 1e6, e.count) for e in trace.key_averages() if e.self_device_time_total]
    busy = sum(row[1] for row in rows)
    print(f"{arguments.system}, {arguments.tokens} tokens: {seconds:.2f} s, kernels {busy:.2f} s")
    for name, total, count in sorted(rows, key=lambda row: -row[1])[: arguments.rows]:
        print(f"{total:8.3f} s {100 * total / busy:5.1f} % {count:7d} x {1e6 * total / count:9.0f} us  {name[:90]}")


if __name__ == "__main__":
    main()
