"""Training steps with sparse attention, without the optimizer: time, GPU peak, host memory, gradient norm.

    python3 benchmarks/sparse_step.py --plan rival-256k resident-256k --out results.json
    python3 benchmarks/sparse_step.py --list

The 7B has Qwen2.5-7B's shapes, the other GPT-OSS-20B's, both with random weights; 64 pages of 128 are chosen beside a
recent window of 16 and a sink. Random weights spread what is chosen over the whole past. "skewed" rows choose by a
scorer of their own as trained models do: a few pages are in nearly all lists. "host" rows keep 8 GiB of pages on the
GPU, the buffers included through which the others come; what else is kept is as in the resident rows.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from step import GIB, SYSTEMS, build, measure, ours, page_bytes, use_liger
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from oomb.host import HostLease
from oomb.selection import Selection


class Zipf:
    """Scores with a few pages that nearly all queries want: popularity by a page's first key, and a query's own taste.

    In float32 on the device, the same for whoever asks with the same keys and queries. repeat: query heads a KV head
    """

    width, exponent, taste = 15, 0.5, 2.0

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat

    def page_features(self, keys: Tensor) -> Tensor:
        first = keys[:, :, 0]
        chance = (1e3 * first[:, :, :1, :]).sum(-1, keepdim=True).frac().abs().clamp_min(1e-6)
        popularity = (-self.exponent * chance.log()).expand(*first.shape[:3], 1)
        return torch.cat([popularity, self.taste * torch.nn.functional.normalize(first[..., : self.width], dim=-1)], -1)

    def query_features(self, queries: Tensor) -> Tensor:
        own = torch.nn.functional.normalize(queries[..., : self.width], dim=-1)
        return torch.cat([torch.full_like(own[..., :1], 1.0 / self.repeat), own], -1)


@dataclass(frozen=True)
class Row:
    """One step. config: None for the rival. pin_gib: host memory that it will want, pinned before the clock starts.

    on_host: a short step with pages on either side comes first, whose kernels `step.prepare` would not compile.
    Units: expected in seconds on an H200, what comes before the clock starts not included
    """

    tokens: int
    config: dict[str, Any] | None
    expected: int
    model: str = "7b"
    layers: int = 28
    on_host: bool = False
    pin_gib: int = 0


SPARSE: dict[str, Any] = {"chunk_tokens": 8192, "attention": "sparse"}
SKEWED = SPARSE | {"scorer": Zipf(7)}
KEPT = {"gpu_keep_budget_bytes": 50 * GIB}
RESIDENT = {"gpu_kv_budget_bytes": 60 * GIB, **KEPT}
# three buffers of 256K tokens of one layer, of keys and values and of gradients, take 4.5 GiB
CACHED = {"gpu_kv_budget_bytes": 7 * GIB // 2, "segment_tokens": 262144, **KEPT}
FORCED = SPARSE | {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0, "gpu_selection_budget_bytes": 0}
HALF = {"grad_page_dtype": torch.bfloat16}
FOUR = {"layers": 4, "on_host": True}
SMALL_CACHE = SKEWED | {"gpu_kv_budget_bytes": GIB // 2, "gpu_keep_budget_bytes": 8 * GIB}
ROWS = {
    "rival-256k": Row(262144, None, 140),
    "resident-256k": Row(262144, SPARSE | RESIDENT, 40, pin_gib=50),
    "resident-skewed-256k": Row(262144, SKEWED | RESIDENT, 40, pin_gib=50),
    "host-skewed-256k": Row(262144, SKEWED | CACHED, 42, on_host=True, pin_gib=90),
    "host-256k": Row(262144, SPARSE | CACHED, 50, on_host=True, pin_gib=90),
    "128k": Row(131072, SPARSE, 19),
    "512k": Row(
        524288,
        SPARSE | HALF | {"gpu_kv_budget_bytes": 60 * GIB, "gpu_keep_budget_bytes": 34 * GIB}
        | {"host_budget_bytes": 100 * GIB},
        85, pin_gib=100,
    ),
    "1m": Row(
        1048576,
        SPARSE | HALF | {"gpu_kv_budget_bytes": 84 * GIB, "gpu_keep_budget_bytes": 0, "segment_tokens": 131072}
        | {"host_budget_bytes": 104 * GIB},
        210, on_host=True, pin_gib=104,
    ),
    "growth-64k": Row(65536, FORCED, 2, pin_gib=8, **FOUR),
    "growth-256k": Row(262144, FORCED, 7, pin_gib=20, **FOUR),
    "segments-32k": Row(131072, SMALL_CACHE | {"segment_tokens": 32768}, 3, pin_gib=8, **FOUR),
    "segments-128k": Row(131072, SMALL_CACHE | {"segment_tokens": 131072}, 3, pin_gib=8, **FOUR),
    "segments-none": Row(131072, SMALL_CACHE | {"gpu_kv_budget_bytes": 8 * GIB}, 3, pin_gib=8, **FOUR),
    "gpt-oss-64k": Row(65536, SPARSE, 14, "gpt-oss", 24),
    "gpt-oss-256k": Row(
        262144, SPARSE | {"gpu_kv_budget_bytes": 20 * GIB, "gpu_keep_budget_bytes": 24 * GIB}, 60, "gpt-oss", 24,
        pin_gib=70,
    ),
}  # fmt: skip


def build_gpt_oss(layers: int):
    """GPT-OSS-20B's shapes: every second layer sees a window of 128, sinks, 32 experts of which each token takes 4."""
    torch.manual_seed(0)
    config = GptOssConfig(  # the library's own default is 128 experts
        num_hidden_layers=layers, num_local_experts=32, max_position_embeddings=1 << 20, use_cache=False
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        torch.set_default_dtype(torch.float32)
    return model.train()


MODELS = {"7b": build, "gpt-oss": build_gpt_oss}


def choosing_layers(config: PretrainedConfig) -> int:
    """Those without a window."""
    return config.layer_types.count("full_attention")


@contextmanager
def watched_lists(layers: int) -> Iterator[deque[Tensor]]:
    """The lists that so many layers chose last: those of the last chunk."""
    lists: deque[Tensor] = deque(maxlen=layers)
    put_away = Selection._put_away

    def noting(self: Selection, ids: Tensor) -> Tensor:
        lists.append(ids)
        return put_away(self, ids)

    with mock.patch.object(Selection, "_put_away", noting):
        yield lists


@dataclass
class Runs:
    """Rows one after the other; a model stays while rows ask for it."""

    rows: list[dict] = field(default_factory=list)
    model: Any = None
    kind: tuple[str, int] | None = None

    def run(self, name: str, row: Row) -> dict:
        if self.kind != (row.model, row.layers):
            self.model = None
            gc.collect()
            torch.cuda.empty_cache()
            self.model, self.kind = MODELS[row.model](row.layers), (row.model, row.layers)
        system = "rival" if row.config is None else name
        if row.config is not None:
            if row.on_host:
                half = {"gpu_kv_budget_bytes": 8192 * page_bytes(self.model.config)}
                SYSTEMS[name] = ours(**row.config | half)
                measure(name, self.model, 32768)
            SYSTEMS[name] = ours(**row.config)
        with watched_lists(choosing_layers(self.model.config)) as lists:
            result = measure(system, self.model, row.tokens)
        result |= {"system": name, "model": row.model, "layers": row.layers}
        result["config"] = {key: str(value) for key, value in (row.config or {}).items()}
        if lists:  # of pages before the last chunk, how many it reads in a layer
            first = (row.tokens - 1) // 8192 * 64
            distinct = [int((ids[(ids >= 0) & (ids < first)]).unique().numel()) for ids in lists]
            result["pages_read"] = sum(distinct) / len(distinct) / max(first, 1)
        self.rows.append(result)
        return result


def show(rows: list[dict]) -> None:
    times = {r["system"]: r.get("seconds") for r in rows}
    print(
        f"{'row':22s} {'layers':>6s} {'seconds':>8s} {'GPU GiB':>8s} {'host GiB':>8s} {'read':>6s} {'grad norm':>10s}"
    )
    for r in rows:
        start = f"{r['system']:22s} {r['layers']:6d}"
        if "error" in r:
            print(start, r["error"])
            continue
        print(
            f"{start} {r['seconds']:8.2f} {r['peak_gib']:8.2f} {r['host_gib']:8.2f} {r.get('pages_read', 1):6.3f} "
            f"{r['gradient_norm']:10.4f}"
        )
    for over, under in (
        ("rival-256k", "resident-256k"), ("host-skewed-256k", "resident-skewed-256k"), ("host-256k", "resident-256k"),
        ("segments-32k", "segments-none"), ("segments-128k", "segments-none"),
    ):  # fmt: skip
        if times.get(over) and times.get(under):
            print(f"{over} / {under}: {times[over] / times[under]:.3f}")
    above = {r["system"]: r["above_gib"] for r in rows if "above_gib" in r}
    if "growth-64k" in above and "growth-256k" in above:
        grown = (above["growth-256k"] - above["growth-64k"]) * GIB / 1e6
        print(f"forced to the host: {grown / 19.6608:.3f} MB of GPU memory per 10,000 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="+", metavar="ROW", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--list", action="store_true", help="print the rows and what they are expected to take")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        for name, row in ROWS.items():
            print(name, asdict(row))
        return
    liger = use_liger()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "liger": liger}
    pin_gib = max(ROWS[name].pin_gib for name in arguments.plan)
    if pin_gib:
        HostLease(pin_gib * GIB, torch.device("cuda", 0)).release()
    runs = Runs()
    for name in arguments.plan:
        result = runs.run(name, ROWS[name])
        print(json.dumps(result), flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"machine": machine, "rows": runs.rows}, indent=1) + "\n")
    show(runs.rows)


if __name__ == "__main__":
    main()
