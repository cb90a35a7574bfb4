"""Decoding over pages: bandwidth beside a copy's, host time, and generation beside transformers' DynamicCache.

    python3 benchmarks/inference.py --out benchmarks/results/inference_h200_<date>.json

Decoding: one layer, 28 query and 4 KV heads of 128, bfloat16, pages of 128. Time is that of a CUDA graph of many calls,
so that launches do not count; host time a call is measured apart, as it is without a graph. `of_copy` is bytes of keys
and values read a second over bytes read and written a second by the faster of two copies. A cache of less than 256 MB
may lie in the chip's own cache from call to call: such rows are in the table, but say nothing of memory. Every row's
result is first compared with float64 attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/paged_kv/src"))

from paged_kv import PagedKV, PagePool, paged_attention

T = TypeVar("T")
HEADS, GROUPS, DIM, PAGE = 28, 4, 128, 128
SCALE = DIM**-0.5
K = 1024
CASES = [(b, (length,) * b) for b in (1, 4, 16, 64) for length in (4 * K, 32 * K, 128 * K, 256 * K)]
CASES += [(64, (256 * K, *(1 * K,) * 63)), (64, tuple(512 * (1 + i) for i in range(64)))]


def milliseconds(call, calls: int = 20, rounds: int = 5) -> float:
    """The best round's time a call, of a graph of `calls` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return min(times[1:])


def copy_bandwidth() -> dict[str, float]:
    """Bytes read and written a second by copies of 4 GiB: the driver's own, and a kernel's."""
    source = torch.ones(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    calls = {"memcpy": lambda: target.copy_(source), "kernel": lambda: torch.neg(source, out=target)}
    return {name: 2 * 2**32 / (milliseconds(call, 5) * 1e-3) for name, call in calls.items()}


class Decode:
    """A cache of sequences of these lengths, each with one new token."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        slots = sum(-(-n // PAGE) for n in lengths)
        pool = PagePool(
            layers=1, slots=slots, page_tokens=PAGE, kv_heads=GROUPS, head_dim=DIM, dtype=torch.bfloat16, device="cuda"
        )  # fmt: skip
        for pages in (pool.k[0], pool.v[0]):
            pages.normal_()
        self.lengths = lengths
        self.kv = kv = PagedKV(pool)
        ids = [kv.add() for _ in lengths]
        kv.extend({s: n - 1 for s, n in zip(ids, lengths)})
        kv.mark_appended([0])  # what the pages hold already is the past
        kv.extend(dict.fromkeys(ids, 1))
        make = lambda heads: torch.randn(len(lengths), heads, DIM, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = make(HEADS), make(GROUPS), make(GROUPS)
        kv.append(0, self.k, self.v)

    def run(self, **options) -> Tensor:
        return paged_attention(self.q, self.k, self.v, self.kv, 0, scale=SCALE, **options)

    @property
    def bytes(self) -> int:
        return sum(self.lengths) * GROUPS * DIM * 2 * 2

    def error(self) -> float:
        """Of the longest and the last sequence's last head, against float64."""
        out, worst = self.run(), 0.0
        for s in {max(range(len(self.lengths)), key=lambda i: self.lengths[i]), len(self.lengths) - 1}:
            pages = self.kv.step().table[self.kv.step().rows[s], : -(-self.lengths[s] // PAGE)].long()
            k, v = (
                x[0][pages, :, GROUPS - 1].flatten(0, 1)[: self.lengths[s]].double()
                for x in (self.kv.pool.k, self.kv.pool.v)
            )
            true = (k @ self.q[s, -1].double() * SCALE).softmax(0) @ v
            worst = max(worst, float((out[s, -1].double() - true).norm() / true.norm()))
        return worst

    def host_microseconds(self, calls: int = 100) -> float:
        """Python's time for one call that nothing waits for."""
        self.run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            self.run()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / calls * 1e6


@torch.no_grad()
def decoding(copy: float) -> list[dict]:
    rows = []
    for batch, lengths in CASES:
        case = Decode(lengths)
        error = case.error()
        assert error < 2e-2, f"wrong: {error}"
        calls = max(2, min(50, int(2e10 / case.bytes)))
        ms = milliseconds(case.run, calls)
        label = f"{lengths[0] // K} K" if len(set(lengths)) == 1 else f"{min(lengths)} to {max(lengths)}"
        row = {
            "batch": batch, "length": label, "megabytes": case.bytes / 1e6, "microseconds": ms * 1e3,
            "terabytes_a_second": case.bytes / ms * 1e-9, "of_copy": case.bytes / (ms * 1e-3) / copy, "error": error,
        }  # fmt: skip
        if sum(lengths) <= 2**19:
            row["host_microseconds"] = case.host_microseconds()
        rows.append(row)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        del case
        torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def limited() -> dict[str, float]:
    """Microseconds of a step of 64 sequences of 32 K tokens that read a window or listed pages only."""
    case = Decode((32 * K,) * 64)
    pages = torch.rand(64, 1, 1, 256, device="cuda").argsort(-1)[..., :64].to(torch.int32)
    calls = {"whole": {}, "window of 128": {"window": 128}, "64 of 256 pages": {"selected": pages}}
    return {name: milliseconds(lambda options=options: case.run(**options)) * 1e3 for name, options in calls.items()}


@torch.no_grad()
def prefill() -> dict[str, float]:
    """Milliseconds of 4,096 tokens over 64 K: as training calls it, without padding, and beside 63 decode rows."""
    pool = PagePool(
        layers=1, slots=2048, page_tokens=PAGE, kv_heads=GROUPS, head_dim=DIM, dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip
    for pages in (pool.k[0], pool.v[0]):
        pages.normal_()
    kv = PagedKV(pool)
    prompt, *rest = [kv.add() for _ in range(64)]
    kv.extend({prompt: 64 * K} | dict.fromkeys(rest, K))
    kv.mark_appended([0])
    result = {}
    for name, tokens in (("without padding", {prompt: 4 * K}), ("mixed", {prompt: 4 * K} | dict.fromkeys(rest, 1))):
        kv.extend(tokens)
        total = sum(tokens.values())
        q, k, v = (torch.randn(total, h, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS, GROUPS, GROUPS))
        kv.append(0, k, v)

        def run(q=q, k=k, v=v) -> Tensor:
            return paged_attention(q, k, v, kv, 0, scale=SCALE)

        if len(tokens) == 1:
            result["as in training"] = eager_milliseconds(lambda q=q, k=k, v=v: run(q[None], k[None], v[None]))
        result[name] = eager_milliseconds(run)
        kv.truncate({s: kv.length(s) - n for s, n in tokens.items()})
    return result


def eager_milliseconds(call: Callable[[], Tensor], rounds: int = 20) -> float:
    """The median time of a call that is launched as it is."""
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def unequal_prompts(vocab: int) -> dict[str, Tensor]:
    """Sixteen prompts of 512 to 16,384 tokens, padded on the left as `generate` wants them."""
    lengths = [16 * K, 8 * K, 4 * K, 4 * K, *[2 * K] * 4, *[1 * K] * 4, *[512] * 4]
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device="cuda")
    for row, n in enumerate(lengths):
        mask[row, -n:] = 1
    return {"input_ids": torch.randint(1, vocab, mask.shape, device="cuda") * mask, "attention_mask": mask}


def timed(call: Callable[[], T]) -> tuple[float, float, T]:
    """Seconds, peak memory above what was allocated before in GB, and the result."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e9, result


@torch.no_grad()
def generating(new: int) -> dict:
    """A Qwen2.5-1.5B-shaped model with random weights, over DynamicCache (sdpa) and over pages, the same prompts."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from paged_kv.hf_cache import PagedCache

    config = Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    inputs = unequal_prompts(config.vocab_size)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    tokens = int(inputs["attention_mask"].sum()) + (new + 64) * len(inputs["input_ids"])

    def default(count: int) -> tuple[Tensor, Tensor, int]:
        out = model.generate(**inputs, **options, max_new_tokens=count)
        return (
            out.sequences,
            out.logits[0],
            sum(
                x.nbytes
                for layer in (out.get("cache") or out.get("past_key_values")).layers
                for x in (layer.keys, layer.values)
            ),
        )

    def paged(count: int) -> tuple[Tensor, Tensor, int]:
        with PagedCache(model, tokens=tokens) as cache:
            out = model.generate(**inputs, **options, max_new_tokens=count, **cache.argument)
            pool = cache.kv.pool
            used = pool.table.total_pages - pool.table.free_pages
            return out.sequences, out.logits[0], sum(x[0].nbytes for x in (*pool.k, *pool.v)) * used

    result: dict = {"prompt_tokens": int(inputs["attention_mask"].sum()), "new_tokens_each": new}
    logits = {}
    for name, run in (("dynamic_cache", default), ("paged", paged)):
        run(4)  # compile, tune, warm up
        first, *_ = timed(lambda run=run: run(1))
        whole, memory, (_, logits[name], held) = timed(lambda run=run: run(new + 1))
        result[name] = {
            "prompt_seconds": first, "decode_tokens_a_second": len(inputs["input_ids"]) * new / (whole - first),
            "peak_gigabytes_above_weights": memory, "cache_gigabytes": held / 1e9,
        }  # fmt: skip
        print(name, json.dumps({k: round(v, 3) for k, v in result[name].items()}), flush=True)
    a, b = (logits[name].double() for name in ("paged", "dynamic_cache"))
    result["first_logits_apart"] = float((a - b).norm() / b.norm())
    print("first logits apart", result["first_logits_apart"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the result")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate in the comparison; 0: leave it out")
    options = parser.parse_args()
    copies = copy_bandwidth()
    torch.cuda.empty_cache()
    result = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "copy_terabytes_a_second": {name: value * 1e-12 for name, value in copies.items()},
        "decode": decoding(max(copies.values())), "limited_microseconds": limited(), "prefill_milliseconds": prefill(),
    }  # fmt: skip
    for name in ("copy_terabytes_a_second", "limited_microseconds", "prefill_milliseconds"):
        print(name, json.dumps({k: round(v, 3) for k, v in result[name].items()}), flush=True)
    torch.cuda.empty_cache()
    if options.new:
        result["generate"] = generating(options.new)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
