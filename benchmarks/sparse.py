"""Sparse attention on one GPU: the last 4,096 queries of a long sequence, selection included, beside dense cuDNN.

    python3 benchmarks/sparse.py --json benchmarks/results/sparse_h200_DATE.json     the table (about a minute)
    python3 benchmarks/sparse.py --tune                                              which tiles win

Useful TFLOP/s count what the lists let queries see: 4 · H · D · pairs forward, 2.5 times that backward. Selections are
"spread" (pages drawn evenly), "skewed" (a few pages in nearly all lists, as trained models have them) and "scored"
(what select_pages picks of random keys). Each number is the median of repeated runs between events, and each
configuration is checked against float64 on sampled queries and keys before it is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import triton
from attention import cudnn_whole
from attention_bench import DEVICE, Bench, Config, median_ms
from attention_tune import parse_tile, tile_override
from torch import Tensor

from paged_kv import triton_attention, triton_sparse
from paged_kv.past import Geometry
from paged_kv.triton_problem import Problem
from paged_kv.triton_tiles import Tile
from sparse_pages import PageSummary, select_pages

BUDGET = {"top_k": 64, "recent": 16, "sinks": 1}
TOTAL = {"256K": 262144, "1M": 1048576}
KINDS = ("spread", "skewed", "scored")


@dataclass(frozen=True)
class SparseConfig(Config):
    kind: str = "spread"

    @property
    def name(self) -> str:
        return f"{super().name} {self.kind}"


class SparseBench(Bench):
    """The tensors of one configuration, its lists, and its calls."""

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        c = config
        self.summary = PageSummary(c.page)
        order = self.slots[0].long()
        for first in range(0, len(order), 512):
            self.summary.append(self.pages_k[order[first : first + 512]].flatten(0, 1)[None])
        self.summary.append(self.k)
        lists = self.select() if c.kind == "scored" else _drawn(c)
        self.geometry = Geometry(c.dim**-0.5, (c.past,), c.page, selected=lists)
        blocks, last = lists.shape[2], (c.past + c.tokens) // c.page
        self.listed = torch.zeros(blocks, last, dtype=torch.bool, device=DEVICE)
        self.listed.scatter_(1, lists[0, 0].long().clamp(min=0), True)

    def select(self) -> Tensor:
        return select_pages(self.q, self.summary, past_pages=self.config.past // self.config.page, **BUDGET)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        page = self.config.page
        return super().seen(queries, keys) & self.listed[queries // page][:, keys // page]

    def _check_dk(self, dk: Tensor, group: int, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> float:
        """Of keys that some query reads: a page that none does has no gradient to compare with."""
        c, share = self.config, self.config.heads // self.config.groups
        pages = self.listed[:, : c.past // c.page].any(0).nonzero().flatten()
        places = pages[torch.randint(0, len(pages), (32,), device=DEVICE)] * c.page
        places += torch.randint(0, c.page, (32,), device=DEVICE)
        heads = slice(group * share, (group + 1) * share)
        q, dout, out = (x[0, :, heads].double().flatten(0, 1) for x in (self.q, self.dout, out))
        stats = lse[0, heads].T.flatten().double()
        seen = self.seen(torch.arange(c.tokens, device=DEVICE), places).repeat_interleave(share, 0)
        p = torch.exp(q @ k[places].T * self.geometry.scale - stats[:, None]).masked_fill(~seen, 0.0)
        true = (p * (dout @ v[places].T - (out * dout).sum(-1, keepdim=True))).T @ q * self.geometry.scale
        ours = dk[self.slots[0, places // c.page].long(), places % c.page, group]
        return float((ours - true).norm() / true.norm())

    @property
    def flops(self) -> float:
        c = self.config
        pages = self.listed.sum() * c.page**2 - self.listed.shape[0] * c.page * (c.page - 1) / 2
        return float(4.0 * c.heads * c.dim * pages)


def _drawn(c: SparseConfig) -> Tensor:
    """Lists as selection makes them, with the best pages drawn at random."""
    first, blocks = c.past // c.page, c.tokens // c.page
    weight = torch.rand(blocks, first + blocks, device=DEVICE)
    if c.kind == "skewed":
        rank = torch.randperm(first + blocks, device=DEVICE) + 1
        weight *= rank.float() ** -0.5
    block = first + torch.arange(blocks, device=DEVICE)[:, None]
    page = torch.arange(first + blocks, device=DEVICE)
    weight[(page < BUDGET["sinks"]) | (page > block - BUDGET["recent"])] = 2.0
    weight[page > block] = -1.0
    return weight.topk(sum(BUDGET.values()), -1).indices.sort(-1).values.to(torch.int32)[None, None]


def measure(bench: Bench, flops: float) -> dict[str, float]:
    bench.dk.zero_()
    bench.dv.zero_()
    out, lse = bench.forward(triton_attention)
    dq, *_ = bench.backward(triton_attention, out, lse)
    error = bench.check(out, lse, dq, bench.dk)
    forward = median_ms(lambda: bench.forward(triton_attention))
    backward = median_ms(lambda: bench.backward(triton_attention, out, lse))
    return {
        "fwd_ms": forward, "bwd_ms": backward, "fwd": flops / forward / 1e9, "bwd": 2.5 * flops / backward / 1e9,
        "error": error,
    }  # fmt: skip


def table(result: dict, write: Callable[[], None]) -> None:
    dense_config = Config()
    dense = measure(Bench(dense_config), dense_config.flops)
    rows: dict[str, dict] = {"dense Triton " + dense_config.name: dense}
    result["rows"] = rows
    print("dense Triton", dense_config.name, dense, flush=True)
    for total, tokens in TOTAL.items():
        whole = cudnn_whole(replace(dense_config, past=tokens - dense_config.tokens))
        ways = {way: median_ms(timed.call) for way, (timed, _) in whole.items()}
        dense_ms = sum(ways.values())
        rows[f"cuDNN {total}"] = {way: whole[way][1] / ms / 1e9 for way, ms in ways.items()} | {"ms": dense_ms}
        del whole
        for kind in KINDS:
            bench = SparseBench(SparseConfig(past=tokens - dense_config.tokens, kind=kind))
            row = measure(bench, bench.flops)
            row["select_ms"] = median_ms(bench.select)
            # once a chunk; mostly launches, which a training step hides behind the layer before
            row["summarize_ms"] = median_ms(lambda b=bench: PageSummary(b.config.page).append(b.k))
            row["all_ms"] = row["select_ms"] + row["fwd_ms"] + row["bwd_ms"]
            row["cuDNN / ours"] = dense_ms / row["all_ms"]
            row["fwd / dense Triton"], row["bwd / dense Triton"] = row["fwd"] / dense["fwd"], row["bwd"] / dense["bwd"]
            row["readers of the hottest page"] = int(bench.listed.sum(0).max())
            rows[f"{total} {kind}"] = row
            print(total, kind, {k: round(v, 4) for k, v in row.items()}, flush=True)
            write()
            del bench
            torch.cuda.empty_cache()


# forward: tiles for all rows of a query block, or wide ones and those for what they leave
TUNE = """
fwd: 256x64x8x5p2+128x64x8x5 256x64x8x5p2+128x64x4x3p2/2 128x64x4x3p2/2 128x64x4x2p2/2 128x64x4x2/2
dkdv: 64x64x4x2/2 64x64x4x3/2 64x128x8x2 128x64x8x2
dq: 128x64x8x5 128x64x8x6 128x64x8x3 64x64x4x5/2
"""


def tune(kind: str = "spread") -> dict:
    bench = SparseBench(SparseConfig(past=TOTAL["256K"] - 4096, kind=kind))
    results: dict[str, dict[str, float]] = {}
    for line in TUNE.strip().splitlines():
        kernel, _, choices = line.partition(":")
        for choice in choices.split():
            tiles = [parse_tile(text) for text in choice.split("+")]
            override = _cut(tiles) if kernel == "fwd" else tile_override(kernel, tiles[0])
            try:
                with override:
                    row = measure(bench, bench.flops)
            except Exception as error:
                print(kernel, choice, f"{type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            ms = row["fwd_ms" if kernel == "fwd" else "bwd_ms"]
            results.setdefault(kernel, {})[choice] = ms
            print(kernel, choice, f"{ms:.3f} ms, error {row['error']:.1e}", flush=True)
    return {"tune": results}


def _cut(tiles: list[Tile]) -> AbstractContextManager:
    """Have the forward take these tiles, the last for what the first leaves of a query block."""

    def row_tiles(p: Problem, _blocks: int) -> list[tuple[Tile, int, int]]:
        rows = p.geometry.page_tokens * p.repeat
        whole = rows // tiles[0].rows * tiles[0].rows
        cut = [(tiles[0], 0, whole), (tiles[-1], whole, rows - whole)]
        return [piece for piece in cut if piece[2]]

    return mock.patch.object(triton_sparse, "row_tiles", row_tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every number")
    parser.add_argument("--tune", action="store_true", help="time tiles instead of the table")
    arguments = parser.parse_args()
    start = time.time()
    result: dict = {}
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip

    def write() -> None:
        result["machine"] = machine | {"seconds": round(time.time() - start)}
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    if arguments.tune:
        result |= tune()
    else:
        table(result, write)
    write()
    print(result["machine"])


if __name__ == "__main__":
    main()
