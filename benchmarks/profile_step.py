"""Where the time of one chunked step goes on the GPU: by kind of kernel, kernel by kernel, and the gaps between them.

    python3 benchmarks/profile_step.py --systems resident "all on the host" --layers 4 --tokens 131072

A few layers tell about all: everything but loss and embedding is the same in each. Products and attention are printed
beside their FLOPs.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from gpu_trace import Gap, chrome_trace, gaps, is_compute, length, merged, overlap, parse, waits
from step import SYSTEMS, VOCAB, build, use_liger
from torch.profiler import ProfilerActivity, profile

PEAK = 690e12  # FLOP/s of products this size (an H200)


def flops(model, tokens: int) -> dict[str, float]:
    """What a step computes, by kind: layers and head twice forward, backward as twice that; attention once, and 2.5."""
    config = model.config
    layers = config.num_hidden_layers
    linear = 2 * sum(p.numel() for p in model.model.layers.parameters())
    head = 2 * model.lm_head.weight.numel()
    attention = 2 * config.hidden_size * tokens  # causal: half of 4
    return {
        "matmul": 4 * tokens * (linear + head),
        "attention forward": tokens * layers * attention,
        "attention backward": 2.5 * tokens * layers * attention,
    }


def report(trace: dict, work: dict[str, float], rows: int) -> None:
    events = parse(trace)
    compute = [e for e in events if is_compute(e)]
    busy = merged(compute)
    print(f"  compute busy {length(busy):.3f} s of {events[-1].stop:.3f} s")
    for kind in ("copies in", "copies out"):
        spans = merged(e for e in events if e.kind == kind)
        if spans:
            under = overlap(spans, busy) / length(spans)
            print(f"  {kind}: {length(spans):.3f} s, {100 * under:.1f} % of it under compute")
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[tuple, list[float]] = defaultdict(list)
    for e in events:
        kinds[e.kind].append(e.seconds)
        names[e.name, e.grid].append(e.seconds)
    for kind, seconds in sorted(kinds.items(), key=lambda entry: -sum(entry[1])):
        rate = f"  {work[kind] / sum(seconds) / 1e12:6.0f} TFLOP/s" if kind in work else ""
        print(f"  {sum(seconds):8.4f} s {len(seconds):7d} x  {kind}{rate}")
    print("  -- kernels, by grid")
    for (name, grid), seconds in sorted(names.items(), key=lambda entry: -sum(entry[1]))[:rows]:
        mean = 1e6 * sum(seconds) / len(seconds)
        print(f"  {sum(seconds):8.4f} s {len(seconds):6d} x {mean:8.0f} us  {list(grid)!s:20s} {name[:110]}")
    report_gaps(list(gaps(events)))
    for name, (seconds, count) in sorted(waits(trace).items(), key=lambda entry: -entry[1][0]):
        print(f"  {seconds:8.4f} s {count:6d} x  in {name}")


def report_gaps(found: Sequence[Gap], rows: int = 12) -> None:
    late = sum(gap.seconds for gap in found if gap.late)
    total = sum(gap.seconds for gap in found)
    print(f"  -- gaps: {total:.4f} s, {late:.4f} s of it because the CPU was late; between what, mean and longest")
    between: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in found:
        between[gap.before[:60], gap.after[:60]].append(gap)
    for (before, after), some in sorted(between.items(), key=lambda entry: -sum(g.seconds for g in entry[1]))[:rows]:
        seconds = [gap.seconds for gap in some]
        mean, longest = 1e6 * sum(seconds) / len(some), 1e6 * max(seconds)
        lates = sum(gap.late for gap in some)
        times = f"{sum(seconds):8.4f} s {len(some):6d} x {mean:6.0f} us {longest:7.0f} us"
        print(f"  {times}, late {lates}: {before} | {after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["resident"], choices=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=30)
    arguments = parser.parse_args()
    liger = use_liger()
    model = build(arguments.layers)
    ids = torch.randint(VOCAB, (1, arguments.tokens), generator=torch.Generator().manual_seed(1)).cuda()

    def step(system: str, ids: torch.Tensor) -> float:
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        SYSTEMS[system](model, ids)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, liger {liger}, {arguments.layers} layers")
    for system in arguments.systems:
        step(system, ids[:, :49152])
        first, second = (step(system, ids) for _ in range(2))  # the first of a length builds cuDNN's plans for it
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            seconds = step(system, ids)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"\n{system}, {arguments.tokens} tokens: {first:.3f} s the first time, {second:.3f} s the second, "
            f"{seconds:.3f} s profiled; peak {peak:.1f} GiB"
        )
        report(chrome_trace(trace), flops(model, arguments.tokens), arguments.rows)


if __name__ == "__main__":
    main()
