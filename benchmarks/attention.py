"""Paged attention on one GPU: Triton and cuDNN beside cuDNN on the whole, FlexAttention and a matmul, row by row.

    python3 benchmarks/attention.py --json benchmarks/results/attention_h200_DATE.json     the table (some 5 minutes)
    python3 benchmarks/attention.py --json … --rows window D256                            rows whose names have these
    python3 benchmarks/attention.py --tune                                                 which tiles win
    python3 benchmarks/attention.py --tune fwd/128:128x64x4x3 dq/128:128x128x8x2           only these

Rows that the file already has are kept, so a run that was cut off goes on where it ended; `--rows` measures again.
A tile is ROWSxKEYSxWARPSxSTAGES, with p2 behind it for the forward of rows in two parts, an `a` for the one that
computes scores ahead, w64 for small windows' products of at most 64 keys, and /2 or /3 for two or three programs on a
multiprocessor. Winners go into
packages/paged_kv/src/paged_kv/triton_tiles.py.

TFLOP/s count what the queries see: 4 · H · D · pairs forward, 2.5 times that backward. All systems of a row are timed
in turn, round by round, a tenth of a second each after half of that untimed; a ratio is the median of the rounds'
ratios, so that it does not move with the clock as the figures do. Every configuration is checked against float64 on
sampled queries and keys before it is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import triton
from attention_bench import DENSE, DEVICE, NARROW, Bench, Config, Timed, median_ms, side_by_side
from attention_tune import compile_all, tune

from paged_kv import auto, cudnn, triton_attention

WAYS = {"fwd": 1.0, "bwd": 2.5}  # products, in units of the forward's
System = dict[str, tuple[Timed, float]]  # by direction: what to time, and the FLOPs it does


def ours(bench: Bench, backend) -> tuple[System, float]:
    """Our backend on pages, and its error."""
    bench.dk.zero_()
    bench.dv.zero_()
    out, lse = bench.forward(backend)
    dq, *_ = bench.backward(backend, out, lse)
    error = bench.check(out, lse, dq, bench.dk)
    make = Timed if bench.config.window is None else Timed.in_graph
    forward, backward = (lambda: bench.forward(backend)), (lambda: bench.backward(backend, out, lse))
    return _system(make(forward), make(backward), bench.config.flops), error


def cudnn_whole(config: Config) -> System:
    """torch's operators once over all keys, no mask, gradients in 16 bits: what the vendor's kernels reach."""
    torch.manual_seed(0)
    q, dout = (_rows(config.tokens, config.heads, config.dim) for _ in range(2))
    k, v = (_rows(config.past, config.groups, config.dim) for _ in range(2))
    scale = config.dim**-0.5
    out, lse = cudnn._attend(q, k, v, scale, causal=False)
    return _system(
        Timed(lambda: cudnn._attend(q, k, v, scale, causal=False)),
        Timed(lambda: cudnn._gradients(dout, q, k, v, out, lse, scale, causal=False)),
        4.0 * config.heads * config.dim * config.tokens * config.past,
    )


def flex_attention(config: Config) -> System:
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled = torch.compile(flex)
    q = _rows(config.tokens, config.heads, config.dim).transpose(1, 2).contiguous()
    k, v = (_rows(config.past, config.groups, config.dim).transpose(1, 2).contiguous() for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves, enable_gqa=True)
    dout = torch.randn_like(out)
    return _system(
        Timed(lambda: compiled(*leaves, enable_gqa=True)),
        Timed(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)),
        4.0 * config.heads * config.dim * config.tokens * config.past,
    )


def _rows(tokens: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(1, tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)


def _system(forward: Timed, backward: Timed, flops: float) -> System:
    return {"fwd": (forward, flops), "bwd": (backward, WAYS["bwd"] * flops)}


def matmul() -> tuple[Timed, float]:
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return Timed(lambda: a @ b), 2.0 * 8192**3


def bandwidth() -> float:
    """Bytes a second, read and written together, of a copy that no cache holds."""
    a, b = (torch.empty(2**30, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    return 2 * a.numel() / median_ms(lambda: b.copy_(a)) * 1e3


BASE = Config()
SHUFFLED = replace(BASE, shuffle=True)
WIDE = replace(NARROW, window=None, sinks=False)
TABLE = [
    *(replace(BASE, tokens=n) for n in (4096, 1024, 2048, 8192, 16384)),
    replace(BASE, past=262144),
    replace(BASE, page=64),
    SHUFFLED,
    NARROW,
    WIDE,
    DENSE[64],
    replace(BASE, dim=80),
    replace(BASE, dim=96),
    replace(DENSE[256], dim=192),
    DENSE[256],
]
ASKED = [  # the ratios that are asked for, and how much of each must be reached
    (BASE, "triton / whole", (0.80, 0.79)),
    (BASE, "cudnn / whole", (0.95, 0.95)),
    (replace(BASE, tokens=2048), "cudnn / whole", (0.90, 0.90)),
    (replace(BASE, tokens=1024), "cudnn / whole", (0.80, 0.80)),
    (BASE, "triton / flex", (1.0, 1.0)),
    (SHUFFLED, "triton / in order", (0.97, 0.97)),
    (NARROW, "triton / dense", (0.6, 0.6)),
]


def systems_of(config: Config) -> Iterator[tuple[str, Callable[[], tuple[System, float | None]]]]:
    """What stands in a row, by name; the first is compared with each of the others."""
    bench = Bench(config)
    yield "triton", lambda: ours(bench, triton_attention)
    if config.shuffle:
        yield "in order", lambda: ours(Bench(replace(config, shuffle=False)), triton_attention)
    elif config.window is not None:
        yield "dense", lambda: ours(Bench(replace(config, window=None, sinks=False)), triton_attention)
    else:
        yield "cudnn", lambda: ours(bench, cudnn)
        yield "whole", lambda: (cudnn_whole(config), None)
        if config == BASE:
            yield "flex", lambda: (flex_attention(config), None)


def measure(config: Config) -> dict:
    row: dict = {"config": asdict(config), "auto": choice(config)}
    systems: dict[str, System] = {}
    for name, make in systems_of(config):
        try:  # what cannot run here is reported, and the rest goes on
            systems[name], error = make()
            row[name] = {} if error is None else {"error": error}
        except Exception as problem:
            row[name] = {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
    product, product_flops = matmul()
    for way in WAYS:
        timed = {"matmul": product} | {name: system[way][0] for name, system in systems.items()}
        work = {"matmul": product_flops} | {name: system[way][1] for name, system in systems.items()}
        rounds = side_by_side(timed)
        rates = {name: [flops / r[name] / 1e9 for r in rounds] for name, flops in work.items()}
        for name, rate in rates.items():
            row.setdefault(name, {})[way] = round(median(rate), 1)
        for a, b in [(a, b) for a in ("triton", "cudnn") for b in rates if a in rates and a != b]:
            ratio = median(x / y for x, y in zip(rates[a], rates[b]))
            row.setdefault("ratios", {}).setdefault(f"{a} / {b}", {})[way] = round(ratio, 4)
    return row


def choice(config: Config) -> str:
    """What `backend="auto"` takes, when pages lie in a row unless they are shuffled."""
    bench = Bench(replace(config, tokens=min(config.tokens, 4096), past=config.page))
    past = SimpleNamespace(contiguous=not config.shuffle)
    return auto.choose(bench.q, bench.k, bench.geometry, past)[0]


def table(path: Path | None, rows: dict[str, dict], wanted: list[str]) -> dict:
    todo = [c for c in TABLE if (any(w in c.name for w in wanted) if wanted else c.name not in rows)]
    more = [WIDE] if NARROW in todo and WIDE not in todo else []
    shapes = dict.fromkeys(replace(c, tokens=256, past=1024, shuffle=False) for c in (*todo, *more))
    kernels = {c: ("window " if c.window else "") for c in shapes}
    if shapes:
        compile_all([(c, kernels[c] + kernel, None) for c in shapes for kernel in ("fwd", "dq", "dkdv")])
    speed = bandwidth()
    for config in todo:
        start = time.time()
        row = measure(config)
        if config.window is not None:
            row["memory bound"] = {d: WAYS[d] * config.flops / (config.bytes[d] / speed) / 1e12 for d in WAYS}
        row["seconds"] = round(time.time() - start, 1)
        rows[config.name] = row
        print(config.name, {k: v for k, v in row.items() if k != "config"}, flush=True)
        if path is not None:  # a run that is cut off has not been in vain
            path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
    return {"bandwidth": speed, "rows": {c.name: rows[c.name] for c in TABLE if c.name in rows}}


def show(result: dict) -> None:
    names = ("triton", "cudnn", "whole", "flex", "matmul")
    print(f"\ncopy: {result['bandwidth'] / 1e12:.2f} TB/s")
    print(f"{'TFLOP/s, forward / backward':40s}" + "".join(f"{n:>12s}" for n in names) + "   auto takes")
    for name, row in result["rows"].items():
        cells = []
        for which in names:
            r = row.get(which, {})
            cells.append(f"{r['fwd']:.0f} / {r['bwd']:.0f}" if "fwd" in r else ("failed" if r else ""))
        print(f"{name:40s}" + "".join(f"{c:>12s}" for c in cells) + f"   {row['auto']}")
        if "memory bound" in row:
            bound = row["memory bound"]
            print(f"{'  at most, for the bytes it moves':40s}{bound['fwd']:6.0f} / {bound['bwd']:.0f}")
        for pair, r in row.get("ratios", {}).items():
            print(f"    {pair:36s}" + " / ".join(f"{v:.3f}" for v in r.values()))
    print("\nasked for")
    for config, pair, must in ASKED:
        r = result["rows"].get(config.name, {}).get("ratios", {}).get(pair)
        reached = "not measured" if r is None else f"{r['fwd']:.3f} / {r['bwd']:.3f}"
        print(f"{config.name:40s} {pair:20s} {reached}   must {must[0]} / {must[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every number, and where rows that are there are kept")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="measure rows with this in their names")
    parser.add_argument("--tune", nargs="*", metavar="KERNEL/DIM:TILE", help="time tiles instead of the table")
    arguments = parser.parse_args()
    start = time.time()
    path: Path | None = arguments.json
    known = json.loads(path.read_text()).get("rows", {}) if path is not None and path.exists() else {}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    tuning = arguments.tune is not None
    result = {"tune": tune(arguments.tune)} if tuning else table(path, known, arguments.rows)
    result["machine"] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "seconds": round(time.time() - start),
    }  # fmt: skip
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
    if not tuning:
        show(result)
    print(f"{result['machine']}")


if __name__ == "__main__":
    main()
