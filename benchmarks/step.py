"""One training step (forward and backward, no optimizer) of a Qwen2.5-7B-shaped model: time, memory, gradient norm.

    python3 benchmarks/step.py --tokens 32768 65536 131072 --out benchmarks/results/step_h200_<date>.json
    python3 benchmarks/step.py --layers 4 --plan "all on the host@65536" "all on the host@262144"     # growth

The rival is Hugging Face with SDPA (cuDNN first), non-reentrant gradient checkpointing of every layer and a loss tiled
over tokens; both use Liger's RoPE, RMSNorm and SwiGLU when liger-kernel is installed. Every system runs in the same
process on the same model; its gradient norm is printed, so that a wrong step shows. Before a row the same length runs
through the first two layers, and ours asks the model what it asks once: cuDNN plans every length of keys when it first
comes (50 to 95 ms each), which is the first step's cost and no later one's. `first_seconds` is what all that took.
Growth is that of the peak above what was allocated before the step, between the shortest and the longest context.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from offload import PinnedArena
from oomb import ChunkConfig, chunked_backward
from oomb.api import profile_of
from oomb.hf import take_apart
from oomb.host import HostLease, spare_bytes
from oomb.step import PassContext

VOCAB = 152064
GIB = 2**30


def use_liger() -> bool:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2
    except ImportError:
        return False
    apply_liger_kernel_to_qwen2(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    return True


def build(layers: int):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=1 << 23,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    return model.train()


def rival(model, ids: torch.Tensor) -> float:
    """Hugging Face's own attention and checkpointing over the whole sequence, the loss a tile at a time."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = ids.cuda()
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)[0]
    try:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            leaf = hidden.detach().requires_grad_()

            def part(rows, labels):
                return F.cross_entropy(model.lm_head(rows).float(), labels, reduction="sum") / (ids.shape[1] - 1)

            tiles = zip(leaf[0].split(2048), targets.split(2048))
            loss = torch.stack([checkpoint(part, *tile, use_reentrant=False) for tile in tiles]).sum()
            loss.backward()
            hidden.backward(leaf.grad)
    finally:
        model.gradient_checkpointing_disable()
    return float(loss)


def ours(**config) -> Callable:
    def step(model, ids: torch.Tensor) -> float:
        return float(chunked_backward(model, ids, config=ChunkConfig(**config)))

    return step


def page_bytes(config: PretrainedConfig) -> int:
    """Keys, values and their gradients, of the layers that see all tokens. Units: bytes a token"""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.layer_types[: config.num_hidden_layers].count("full_attention")
    return 2 * layers * config.num_key_value_heads * head_dim * (2 + 4)


def pages_on_host(model, ids: torch.Tensor) -> float:
    """The pages on the host, and nothing else: as much memory as they take."""
    chunk = 8192
    budget = (ids.shape[1] - 1) // chunk * chunk * page_bytes(model.config) + 1024 * model.config.num_hidden_layers
    return ours(chunk_tokens=chunk, gpu_kv_budget_bytes=1, gpu_keep_budget_bytes=0, host_budget_bytes=budget)(
        model, ids
    )


def attention_again(model, ids: torch.Tensor) -> float:
    """Resident, outputs of layers kept and those of attention not."""
    with mock.patch.object(PassContext, "_kept", lambda _context, _layer: None):
        return ours(chunk_tokens=8192, **RESIDENT)(model, ids)


RESIDENT = {"gpu_kv_budget_bytes": 60 * GIB, "gpu_keep_budget_bytes": 80 * GIB}
NOTHING_KEPT = {"gpu_keep_budget_bytes": 0, "host_budget_bytes": 1}
ON_HOST = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0}
SYSTEMS: dict[str, Callable] = {
    "rival": rival,
    # chunks of 8,192, layers walked back one at a time, where not said otherwise
    "resident": ours(chunk_tokens=8192, **RESIDENT),
    "resident, attention not kept": attention_again,
    "resident, nothing kept": ours(chunk_tokens=8192, gpu_kv_budget_bytes=60 * GIB, **NOTHING_KEPT),
    "resident, nothing kept, whole chunks": ours(
        chunk_tokens=8192, recompute="chunk", gpu_kv_budget_bytes=60 * GIB, **NOTHING_KEPT
    ),
    "all on the host": ours(chunk_tokens=8192, **ON_HOST),
    "resident, 16384": ours(chunk_tokens=16384, **RESIDENT),
    "all on the host, 16384": ours(chunk_tokens=16384, **ON_HOST),
    "all on the host, 32768": ours(chunk_tokens=32768, **ON_HOST),
    "all on the host, 4096": ours(chunk_tokens=4096, **ON_HOST),
    "pages on the device, kept on the host": ours(
        chunk_tokens=8192, gpu_kv_budget_bytes=60 * GIB, gpu_keep_budget_bytes=0
    ),
    "pages on the host, nothing kept": pages_on_host,
    "auto": ours(),
    "triton": ours(chunk_tokens=8192, backend="triton"),
    "sparse": ours(chunk_tokens=8192, attention="sparse"),
}


@contextmanager
def host_use() -> Iterator[list[int]]:
    """The bytes of the arena that were taken when it was given back."""
    used: list[int] = []
    reset = PinnedArena.reset

    def noting(arena: PinnedArena) -> None:
        used.append(arena.used_bytes)
        reset(arena)

    with mock.patch.object(PinnedArena, "reset", noting):
        yield used


@contextmanager
def shortened(model, layers: int) -> Iterator[None]:
    """The same model with its first layers only."""
    whole, count = model.model.layers, model.config.num_hidden_layers
    model.model.layers, model.config.num_hidden_layers = whole[:layers], layers
    try:
        yield
    finally:
        model.model.layers, model.config.num_hidden_layers = whole, count


def prepare(name: str, model, ids: torch.Tensor) -> float:
    """What only the first step of a length pays. Units: seconds"""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with shortened(model, 2):
        SYSTEMS[name](model, ids)
    if name != "rival":
        profile_of(take_apart(model), ids.shape[1])
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, model, tokens: int) -> dict:
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    first = prepare(name, model, ids)
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    row = {"system": name, "tokens": tokens}
    try:
        with host_use() as used:
            loss = SYSTEMS[name](model, ids)
    except torch.OutOfMemoryError:
        return row | {"error": "out of memory"}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    peak = torch.cuda.max_memory_allocated()
    return row | {
        "seconds": seconds,
        "first_seconds": first,
        "peak_gib": peak / GIB,
        "above_gib": (peak - before) / GIB,
        "host_gib": max(used, default=0) / GIB,
        "pages_gib": tokens * page_bytes(model.config) / GIB,
        "pinned_gib": spare_bytes() / GIB,
        "loss": loss,
        "gradient_norm": float(norm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--systems", nargs="+", default=["rival", "resident", "all on the host"], choices=list(SYSTEMS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument(
        "--pin-gib", type=int, default=0, help="pin so much before, or the first step that needs it does"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", nargs="+", metavar="SYSTEM@TOKENS", help="these rows, in this order, instead")
    arguments = parser.parse_args()
    plan = [(name, tokens) for name in arguments.systems for tokens in arguments.tokens]
    if arguments.plan:
        plan = [(name, int(tokens)) for name, _, tokens in (row.partition("@") for row in arguments.plan)]
    liger = use_liger()
    model = build(arguments.layers)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "liger": liger,
        "layers": arguments.layers,
    }
    if arguments.pin_gib:
        HostLease(arguments.pin_gib * GIB, torch.device("cuda", 0)).release()
    rows: list[dict] = []
    for name, tokens in plan:
        rows.append(measure(name, model, tokens))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    show(machine, rows)


def show(machine: dict, rows: list[dict]) -> None:
    rival = {r["tokens"]: r.get("seconds") for r in rows if r["system"] == "rival"}
    heads = ("seconds", "/ rival", "peak GiB", "host GiB", "/ pages", "grad norm")
    print(f"{machine}\n{'system':38s} {'tokens':>8s} " + " ".join(f"{head:>9s}" for head in heads))
    for r in rows:
        start = f"{r['system']:38s} {r['tokens']:8d}"
        if "error" in r:
            print(f"{start} {r['error']}")
            continue
        base = rival.get(r["tokens"])
        ratio = f"{r['seconds'] / base:9.3f}" if base else f"{'-':>9s}"
        host = f"{r['host_gib']:9.2f} {r['host_gib'] / r['pages_gib']:9.3f}"
        print(f"{start} {r['seconds']:9.2f} {ratio} {r['peak_gib']:9.1f} {host} {r['gradient_norm']:9.4f}")
    for system in dict.fromkeys(r["system"] for r in rows):
        known = sorted((r["tokens"], r["above_gib"]) for r in rows if r["system"] == system and "error" not in r)
        if known and known[0][0] < known[-1][0]:
            (short, low), (long, high) = known[0], known[-1]
            growth = (high - low) * GIB / 1e6 / ((long - short) / 1e4)
            print(f"{system}: {growth:.3f} MB of GPU memory per 10,000 tokens from {short} to {long}")


if __name__ == "__main__":
    main()
