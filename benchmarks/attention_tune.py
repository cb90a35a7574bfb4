"""Which tiles win: every variant compiled in parallel, checked against float64, and timed alone; see attention.py."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from unittest import mock

import torch
from attention_bench import DENSE, DEVICE, NARROW, Bench, Config, median_ms

from paged_kv import triton_attention, triton_launch, triton_problem, triton_window_launch
from paged_kv.triton_tiles import Tile, tile_for


def parse_tile(text: str) -> Tile:
    size, _, per_sm = text.partition("/")
    size, _, widest = size.partition("w")
    size, _, parts = size.partition("p")
    rows, keys, warps, stages = (int(x) for x in size.rstrip("a").split("x"))
    more = {"parts": int(parts or 1), "ahead": size.endswith("a"), "widest": int(widest or 128)}
    return Tile(rows, keys, warps, stages, per_sm=int(per_sm or 1), **more)


def tile_text(tile: Tile) -> str:
    text = f"{tile.rows}x{tile.keys}x{tile.warps}x{tile.stages}" + "a" * tile.ahead
    text += f"p{tile.parts}" if tile.parts > 1 else ""
    text += f"w{tile.widest}" if tile.widest != 128 else ""
    return text + (f"/{tile.per_sm}" if tile.per_sm > 1 else "")


@contextmanager
def tile_override(kernel: str, tile: Tile | None):
    def choose(name, *args, **kwargs):
        return tile if tile is not None and name.split(",")[0] == kernel else tile_for(name, *args, **kwargs)

    with mock.patch.object(triton_problem, "tile_for", choose):
        yield


def _compile(job: tuple[Config, str, Tile | None]) -> str | None:
    """Compile what a timing will run, on a tiny problem, into Triton's cache on disk. Returns what went wrong."""
    config, kernel, tile = job
    try:
        bench = Bench(replace(config, tokens=256, past=1024))
        for splits in (1,) if config.window else (1, 2):
            with tile_override(kernel, tile), mock.patch.object(triton_launch, "_splits", return_value=splits):
                run_kernel(bench, kernel)()
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is a result
        return f"{type(error).__name__}: {str(error)[:90]}"
    return None


def run_kernel(bench: Bench, kernel: str):
    """A closure that launches one kernel alone on ready inputs."""
    out, lse = bench.forward(triton_attention)
    if kernel.endswith("fwd"):
        return lambda: bench.forward(triton_attention)
    problem = triton_problem.Problem.of(bench.q, bench.k, bench.v, bench.geometry)
    dq = torch.empty_like(bench.q)
    own = [torch.empty(bench.k.shape, device=DEVICE) for _ in range(2)]
    if bench.config.window:
        inputs = (problem, bench.segment, bench.dout, out, lse, dq)
        rows = triton_window_launch.window_dq(*inputs)
        if kernel.endswith("dq"):
            return lambda: triton_window_launch.window_dq(*inputs)
        return lambda: triton_window_launch.window_dkdv(problem, rows, bench.segment, *own, "owner")
    rows = triton_problem.Rows.prepare(problem, bench.dout, out, lse)
    if kernel == "dq":
        return lambda: triton_launch.dq_launch(problem, rows, bench.segment, None, dq, own=True)
    return lambda: triton_launch.dkdv_launch(problem, rows, bench.segment, *own, "owner", own=True)


def compile_all(jobs: list[tuple[Config, str, Tile | None]]) -> list[str | None]:
    start = time.time()
    with ProcessPoolExecutor(min(12, len(jobs)), mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_compile, jobs))
    print(f"compiled {len(jobs)} variants in {time.time() - start:.0f} s", flush=True)
    return results


TUNE = """
fwd/128: 256x64x8x5p2 256x64x8x3p2 128x64x4x3p2/2 128x64x4x2p2/2 128x64x4x2/2 128x128x8x2a
dkdv/128: 64x64x4x2/2 64x128x8x2 64x128x8x3 32x64x4x3/2 32x128x8x3 64x64x4x3
dq/128: 128x64x8x5 128x64x8x3 128x64x8x6 64x64x4x3/2 64x64x4x5/2
fwd/64: 128x128x4x3p2/2 128x128x4x2p2/2 128x64x4x5p2/2 256x128x8x5p2 256x64x8x5p2 64x128x4x3a/2 64x128x4x3/2
dkdv/64: 64x128x8x2 64x64x4x2/2 128x64x8x2 32x128x8x2 128x128x8x2 64x64x4x3/2
dq/64: 64x64x4x5/2 64x64x4x5/3 128x128x8x5 128x64x8x5 64x64x4x3/3
fwd/256: 128x64x8x2a 128x64x8x2 128x64x8x3a 64x64x4x2 128x32x8x3a
dkdv/256: 32x64x8x2 64x64x8x2 64x64x8x1 32x64x8x1
dq/256: 128x32x8x2 128x64x8x1 64x64x8x2 64x32x4x2
window fwd/64: 64x16x4x1/4 64x32x4x1/4 64x16x4x2/4 64x32x4x3/3 128x16x4x1/2 128x32x4x1/2 128x32x4x2/2
window dq/64: 64x32x4x2/2 64x32x4x3/2 64x16x4x2/2 64x16x4x3/2 64x64x4x2w64/2
window dkdv/64: 64x64x4x3/2 64x64x4x4/2 64x64x4x2/2 128x64x4x2/2 128x64x4x3/2
"""


def tune(specs: list[str]) -> dict[str, dict[str, float]]:
    wanted: dict[str, list[Tile]] = {}
    for line in specs or TUNE.strip().splitlines():
        key, _, tiles = line.partition(":")
        wanted.setdefault(key.strip(), []).extend(parse_tile(t) for t in tiles.split())
    jobs = [(_config_of(key), key.split("/")[0], tile) for key, tiles in wanted.items() for tile in tiles]
    failures = dict(zip(jobs, compile_all(jobs)))
    results: dict[str, dict[str, float]] = {}
    benches: dict[Config, Bench] = {}
    for job in sorted(jobs, key=lambda j: (j[0].name, j[1])):
        config, kernel, tile = job
        key = f"{kernel}/{config.dim}"
        if failures[job] is not None:
            print(f"{key} {tile_text(tile)}: {failures[job]}", flush=True)
            continue
        if config not in benches:
            benches.clear()
            benches[config] = Bench(config)
        try:
            with tile_override(kernel, tile):
                results.setdefault(key, {})[tile_text(tile)] = _tune_one(benches[config], kernel)
        except Exception as error:
            print(f"{key} {tile_text(tile)}: {type(error).__name__}: {str(error)[:90]}", flush=True)
    print("\nTFLOP/s done by the kernel (forward 2 products, dq 3, dkdv 4), best first")
    for key, times in results.items():
        best = sorted(times.items(), key=lambda x: -x[1])
        print(f"{key:15s} " + "  ".join(f"{tile} {rate:.0f}" for tile, rate in best))
    return results


def _config_of(key: str) -> Config:
    kernel, size = key.split("/")
    return NARROW if kernel.startswith("window") else DENSE[int(size)]


def _tune_one(bench: Bench, kernel: str) -> float:
    launch = run_kernel(bench, kernel)
    bench.dk.zero_()
    bench.dv.zero_()
    out, lse = bench.forward(triton_attention)
    dq, *_ = bench.backward(triton_attention, out, lse)
    bench.check(out, lse, dq, bench.dk)
    products = {"fwd": 1.0, "dq": 1.5, "dkdv": 2.0}[kernel.split()[-1]]
    return bench.config.flops * products / median_ms(launch, graph=bench.config.window is not None) / 1e9
