"""Paged attention on one GPU: Triton and cuDNN beside cuDNN on the whole, FlexAttention and a matmul, in one run.

    python3 benchmarks/attention.py --json benchmarks/results/attention_h200_DATE.json     the table (under 5 minutes)
    python3 benchmarks/attention.py --tune                                                 which tiles win
    python3 benchmarks/attention.py --tune fwd/128:128x64x4x3 dq/128:128x128x8x2           only these

A tile is ROWSxKEYSxWARPSxSTAGES, with an `a` behind it for the forward that computes scores ahead, and /2 or /3 for two
or three programs on a multiprocessor. Winners go into packages/paged_kv/src/paged_kv/triton_tiles.py.

TFLOP/s count what the queries see: 4 · H · D · pairs forward, 2.5 times that backward. Each number is the median of
repeated runs between events; absolute figures move a few per cent between machines, so quote the ratios. Every
configuration is checked against float64 on sampled queries and keys before it is timed, and fails when it is wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
from attention_bench import DENSE, DEVICE, NARROW, Bench, Config, median_ms
from attention_tune import compile_all, tune

from paged_kv import cudnn, triton_attention


def measure(bench: Bench, backend, graph: bool = False) -> dict[str, float]:
    bench.dk.zero_()
    bench.dv.zero_()
    out, lse = bench.forward(backend)
    dq, *_ = bench.backward(backend, out, lse)
    error = bench.check(out, lse, dq, bench.dk)
    forward = median_ms(lambda: bench.forward(backend), graph=graph)
    backward = median_ms(lambda: bench.backward(backend, out, lse), graph=graph, rep=200)
    flops = bench.config.flops
    return {"fwd": flops / forward / 1e9, "bwd": 2.5 * flops / backward / 1e9, "error": error}


def cudnn_whole(config: Config) -> dict[str, float]:
    """torch's operators once over all keys, no mask, gradients in 16 bits: what the vendor's kernels reach."""
    torch.manual_seed(0)
    make = lambda n, h: torch.randn(1, n, h, config.dim, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    q, dout, k, v = make(config.tokens, config.heads), make(config.tokens, config.heads), None, None
    k, v = make(config.past, config.groups), make(config.past, config.groups)
    scale = config.dim**-0.5
    out, lse = cudnn._attend(q, k, v, scale, causal=False)
    forward = median_ms(lambda: cudnn._attend(q, k, v, scale, causal=False))
    backward = median_ms(lambda: cudnn._gradients(dout, q, k, v, out, lse, scale, causal=False), rep=200)
    flops = 4.0 * config.heads * config.dim * config.tokens * config.past
    return {"fwd": flops / forward / 1e9, "bwd": 2.5 * flops / backward / 1e9}


def flex_attention(config: Config) -> dict[str, float]:
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled = torch.compile(flex)
    make = lambda n, h: torch.randn(1, h, n, config.dim, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(config.tokens, config.heads), make(config.past, config.groups), make(config.past, config.groups)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = lambda: compiled(*leaves, enable_gqa=True)  # noqa: E731
    out = call()
    dout = torch.randn_like(out)
    flops = 4.0 * config.heads * config.dim * config.tokens * config.past
    forward = median_ms(call)
    backward = median_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), rep=200)
    return {"fwd": flops / forward / 1e9, "bwd": 2.5 * flops / backward / 1e9}


def matmul() -> float:
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def bandwidth() -> float:
    """Bytes a second, read and written together, of a copy that no cache holds."""
    a, b = (torch.empty(2**30, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    return 2 * a.numel() / median_ms(lambda: b.copy_(a)) * 1e3


BASE = Config()
TABLE = [replace(BASE, tokens=n) for n in (1024, 2048, 4096, 8192, 16384)] + [
    replace(BASE, past=262144),
    replace(BASE, page=64),
    replace(BASE, shuffle=True),
    DENSE[64],
    DENSE[256],
    replace(NARROW, window=None, sinks=False),
    NARROW,
]


def table(path: Path | None) -> dict:
    shapes = dict.fromkeys(replace(c, tokens=256, past=1024, shuffle=False) for c in TABLE)
    compile_all([(c, kernel, None) for c in shapes for kernel in ("fwd", "dq", "dkdv")])
    rows: dict[str, dict] = {}
    top, speed = matmul(), bandwidth()
    for config in TABLE:
        bench = Bench(config)
        row: dict = {"config": asdict(config)}
        attempt(row, "triton", lambda bench=bench, c=config: measure(bench, triton_attention, c.window is not None))
        plain = config.window is None
        if plain and not config.shuffle:
            attempt(row, "auto", lambda bench=bench: measure(bench, cudnn))
        if plain:
            attempt(row, "whole", lambda config=config: cudnn_whole(config))
        if not plain:
            work = {"fwd": config.flops, "bwd": 2.5 * config.flops}
            row["memory bound"] = {d: work[d] / (config.bytes[d] / speed) / 1e12 for d in work}
        rows[config.name] = row
        print(config.name, {k: v for k, v in row.items() if k != "config"}, flush=True)
        if path is not None:  # a run that is cut off has not been in vain
            path.write_text(json.dumps({"matmul": top, "rows": rows}, indent=1) + "\n")
        del bench
        torch.cuda.empty_cache()
    attempt(rows[BASE.name], "flex", lambda: flex_attention(BASE))
    return {"matmul": top, "bandwidth": speed, "rows": rows, "ratios": ratios(rows)}


def attempt(row: dict, name: str, call) -> None:
    """What cannot run here is reported, and the rest goes on."""
    try:
        row[name] = call()
    except Exception as error:
        row[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


def ratios(rows: dict[str, dict]) -> dict[str, dict[str, float]]:
    def of(row, a, b, other=None):
        pair = (rows[row].get(a, {}), rows[other or row].get(b, {}))
        return {d: pair[0][d] / pair[1][d] for d in ("fwd", "bwd") if d in pair[0] and d in pair[1]}

    shuffled, dense = replace(BASE, shuffle=True).name, replace(NARROW, window=None, sinks=False).name
    result = {f"triton / cuDNN, {name}": of(name, "triton", "whole") for name in rows if "whole" in rows[name]}
    result |= {f"auto / cuDNN, {name}": of(name, "auto", "whole") for name in rows if "auto" in rows[name]}
    result["triton / FlexAttention"] = of(BASE.name, "triton", "flex")
    result["shuffled / in order"] = of(shuffled, "triton", "triton", BASE.name)
    result["window 128 / dense, 64/8 heads D 64"] = of(NARROW.name, "triton", "triton", dense)
    return result


def show(result: dict) -> None:
    print(f"\nmatmul 8192^3: {result['matmul']:.0f} TFLOP/s; copy: {result['bandwidth'] / 1e12:.2f} TB/s")
    print(
        f"{'TFLOP/s, forward / backward':36s}{'triton':>12s}{'auto':>12s}{'cuDNN':>12s}{'flex':>12s}{'of matmul':>12s}"
    )
    for name, row in result["rows"].items():
        cells = []
        for which in ("triton", "auto", "whole", "flex"):
            r = row.get(which, {})
            cells.append(f"{r['fwd']:.0f} / {r['bwd']:.0f}" if "fwd" in r else ("failed" if r else ""))
        share = " / ".join(f"{row['triton'][d] / result['matmul']:.2f}" for d in ("fwd", "bwd") if d in row["triton"])
        print(f"{name:36s}" + "".join(f"{c:>12s}" for c in cells) + f"{share:>12s}")
        if "memory bound" in row:
            bound = row["memory bound"]
            print(f"{'  at most, for the bytes it moves':36s}{bound['fwd']:6.0f} / {bound['bwd']:.0f}")
    for name, pair in result["ratios"].items():
        if pair:
            print(f"{name:60s} " + " / ".join(f"{v:.3f}" for v in pair.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every number")
    parser.add_argument("--tune", nargs="*", metavar="KERNEL/DIM:TILE", help="time tiles instead of the table")
    arguments = parser.parse_args()
    start = time.time()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"tune": tune(arguments.tune)} if arguments.tune is not None else table(arguments.json)
    result["machine"] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "seconds": round(time.time() - start),
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if "rows" in result:
        show(result)
    print(f"{result['machine']}")


if __name__ == "__main__":
    main()
