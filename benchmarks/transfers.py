"""The link between host and device: copy engines by block, scattered pages by one kernel, and what a matmul beside it
loses.

    python3 -m benchmarks.transfers --out benchmarks/results/transfers_h200_<date>.json

Every rate is of bytes that arrived. "beside": the slowdown of a stream of 8192^3 products while such transfers run all
the time, and that of the transfers while such products do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from offload import PinnedArena
from offload.gather import copy_rows

MIB = 2**20
PAGE = 128 * 1024
Work = Callable[[], object]


class Bench:
    """Buffers, two streams beside the current one, and the products."""

    def __init__(self, pages: int, host_pages: int, side: int) -> None:
        self.bytes = pages * PAGE
        self.arena = PinnedArena(2 * host_pages * PAGE)
        assert self.arena.pinned
        self.host, self.host_out = (self.arena.take((host_pages, PAGE), torch.uint8) for _ in range(2))
        self.device, self.device_out = (torch.ones(pages, PAGE, dtype=torch.uint8, device="cuda") for _ in range(2))
        order = torch.randperm(host_pages, generator=torch.Generator().manual_seed(0))
        self.ids = order[:pages].to("cuda", torch.int32)
        self.copies_in, self.copies_out = torch.cuda.Stream(), torch.cuda.Stream()
        self.a, self.b, self.c = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def blocks(self, size: int, *, into: bool) -> Work:
        """All bytes in blocks by the copy engine, one way."""
        host, device = (self.host, self.device) if into else (self.host_out, self.device_out)
        here, there = (x.view(-1)[: self.bytes].split(size) for x in (device, host))
        pairs = list(zip(here, there) if into else zip(there, here))
        return lambda: [to.copy_(source, non_blocking=True) for to, source in pairs]

    def rows(self, *, gather: bool, programs: int) -> Work:
        host, device = (self.host, self.device) if gather else (self.host_out, self.device_out)
        return lambda: copy_rows(host, device, self.ids, gather=gather, programs=programs)

    def product(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def check(self) -> None:
        """What was gathered and scattered is what was asked for."""
        ids = self.ids.cpu().long()
        self.host.view(torch.int64).random_(generator=torch.Generator().manual_seed(1))
        copy_rows(self.host, self.device, self.ids, gather=True, programs=16)
        torch.cuda.synchronize()
        assert torch.equal(self.device.cpu(), self.host[ids])
        copy_rows(self.host_out, self.device, self.ids, gather=False, programs=16)
        torch.cuda.synchronize()
        assert torch.equal(self.host_out[ids], self.host[ids])


def seconds(*lanes: tuple[torch.cuda.Stream, Work, int]) -> list[float]:
    """How long each lane takes for its work, so many times, when all start together."""
    torch.cuda.synchronize()
    spans = []
    gate = torch.cuda.Event()
    torch.cuda._sleep(2_000_000)  # a millisecond, in which everything is enqueued
    gate.record()
    for stream, work, times in lanes:
        stream.wait_event(gate)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(times):
                work()
            stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in spans]


def times_for(stream: torch.cuda.Stream, work: Work, duration: float) -> int:
    """How often to do something for so many seconds."""
    (once,) = seconds((stream, work, 2))
    return max(2, round(duration * 2 / once))


def beside(bench: Bench, stream: torch.cuda.Stream, work: Work, span: float) -> dict[str, float]:
    """Alone, and each while the other never stops."""
    main = torch.cuda.current_stream()
    products, transfers = times_for(main, bench.product, span), times_for(stream, work, span)
    (product_alone,), (alone,) = seconds((main, bench.product, products)), seconds((stream, work, transfers))
    _, product_beside = seconds((stream, work, 2 * transfers), (main, bench.product, products))
    with_products, _ = seconds((stream, work, transfers), (main, bench.product, 3 * products))
    return {
        "gb_per_s": bench.bytes * transfers / alone / 1e9,
        "matmul_slowdown": product_beside / product_alone,
        "transfer_slowdown": with_products / alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--host-pages", type=int, default=16384)
    parser.add_argument("--programs", type=int, nargs="+", default=[4, 8, 16, 32, 64, 132, 264])
    parser.add_argument("--span", type=float, default=0.08, help="seconds that a measurement takes, about")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.pages, arguments.host_pages, 8192)
    bench.check()
    for _ in range(20):
        bench.product()
    into, out = bench.copies_in, bench.copies_out
    link: list[dict] = []
    for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        work_in, work_out = bench.blocks(size, into=True), bench.blocks(size, into=False)
        times = times_for(into, work_in, arguments.span)
        (alone_in,), (alone_out,) = seconds((into, work_in, times)), seconds((out, work_out, times))
        both = max(seconds((into, work_in, times), (out, work_out, times)))
        rates = (bench.bytes * times / t / 1e9 for t in (alone_in, alone_out, both))
        link.append({"block_mib": size // MIB} | dict(zip(("in", "out", "both_each_way"), rates)))
    best = {"gather": max(row["in"] for row in link), "scatter": max(row["out"] for row in link)}
    engine = {
        "in": beside(bench, into, bench.blocks(16 * MIB, into=True), arguments.span),
        "out": beside(bench, out, bench.blocks(16 * MIB, into=False), arguments.span),
    }
    rows: list[dict] = []
    for call, stream in (("gather", into), ("scatter", out)):
        for programs in arguments.programs:
            result = beside(bench, stream, bench.rows(gather=call == "gather", programs=programs), arguments.span)
            share = {"of_the_link": result["gb_per_s"] / best[call]}
            rows.append({"call": call, "programs": programs} | result | share)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "pages": arguments.pages}
    result |= {"page_bytes": PAGE, "link_gb_per_s": link, "engine_beside_matmul": engine, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(link, engine, rows)


def show(link: Sequence[dict], engine: dict[str, dict], rows: Sequence[dict]) -> None:
    print("copy engine, GB/s:  block MiB       in      out  both, each way")
    for row in link:
        print(
            f"                    {row['block_mib']:9d} {row['in']:8.1f} {row['out']:8.1f} {row['both_each_way']:8.1f}"
        )
    print("                         GB/s  of link   matmul beside   transfer beside")
    for name, row in engine.items():
        print(f"engine {name:13s} {row['gb_per_s']:8.1f} {'':8s} {slowdowns(row)}")
    for row in rows:
        name = f"{row['call']}, {row['programs']}"
        print(f"{name:20s} {row['gb_per_s']:8.1f} {row['of_the_link']:8.2f} {slowdowns(row)}")


def slowdowns(row: dict) -> str:
    return f"{row['matmul_slowdown']:15.3f} {row['transfer_slowdown']:17.3f}"


if __name__ == "__main__":
    main()
