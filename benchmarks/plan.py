"""Does a step take what `oomb plan` says? Each case is planned before its model exists, then run and measured.

    python3 -m benchmarks.plan --out benchmarks/results/plan_h200_<date>.json
    python3 -m benchmarks.plan --device cpu --out benchmarks/results/plan_cpu_<date>.json

Predicted and measured seconds of a step and peak of memory (allocated on a GPU; resident on a CPU, in a process of its
own for each case). What the plan measures to know the speeds is part of planning; the models have random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.step import use_liger
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from oomb import ChunkConfig, chunked_backward, plan
from oomb.calibration import calibrate
from oomb.host import HostLease
from oomb.rates import STATED, Speeds
from oomb.step_plan import StepPlan

GIB = 2**30
LONG = {"max_position_embeddings": 1 << 23}
ON_HOST = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0}


def _qwen2_7b(layers: int = 28) -> PretrainedConfig:
    return Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=layers, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, **LONG,
    )  # fmt: skip


def _qwen3_600m() -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True, **LONG,
    )  # fmt: skip


def _llama_1b() -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, tie_word_embeddings=True, **LONG,
    )  # fmt: skip


def _gpt_oss(layers: int = 6) -> PretrainedConfig:
    return GptOssConfig(num_hidden_layers=layers, num_local_experts=32, **LONG)  # 20B's shapes, fewer layers


def _small(kind: type[PretrainedConfig] = Qwen2Config, **more: Any) -> PretrainedConfig:
    shape = {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    return kind(**(shape | LONG | more))


@dataclass(frozen=True)
class Case:
    """mixed: float32 weights, bfloat16 arithmetic; adam: the optimizer's step is part of the step"""

    model: Callable[[], PretrainedConfig]
    tokens: int
    chunks: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    mixed: bool = False
    adam: bool = False
    lora: bool = False


GPU = {
    "7B, 32K": Case(_qwen2_7b, 32768),
    "7B, 64K, all on the host": Case(_qwen2_7b, 65536, ON_HOST),
    "0.6B, 128K": Case(_qwen3_600m, 131072),
    "1B, 32K, AdamW, mixed": Case(_llama_1b, 32768, dtype=torch.float32, mixed=True, adam=True),
    "7B, 128K, sparse": Case(_qwen2_7b, 131072, {"attention": "sparse"}),
    "7B, 32K, LoRA": Case(_qwen2_7b, 32768, lora=True),
    "GPT-OSS of 6 layers, 64K": Case(_gpt_oss, 65536),
}
SMALL = {"dtype": torch.float32}
CPU = {
    "20M, 4K": Case(_small, 4096, {"chunk_tokens": 512}, **SMALL),
    "40M, 1K, AdamW": Case(partial(_small, num_hidden_layers=12), 1024, {"chunk_tokens": 256}, adam=True, **SMALL),
    "20M, 4K, sparse, pages on the host": Case(
        partial(_small, Qwen3Config), 4096,
        {"attention": "sparse", "top_k_pages": 4, "recent_pages": 2, "chunk_tokens": 512, "gpu_kv_budget_bytes": 1},
        **SMALL,
    ),
}  # fmt: skip


def ask(case: Case, device: torch.device, *, stated: bool) -> tuple[StepPlan, Speeds | None]:
    """The plan, from the config alone, and the speeds that were measured for it."""
    config, model_config = ChunkConfig(**case.chunks), case.model()
    autocast = torch.bfloat16 if case.mixed else None
    measured: list[Speeds] = []

    def speeds(chunk_tokens: int) -> Speeds:
        found = calibrate(
            model_config, chunk_tokens=chunk_tokens, context_tokens=case.tokens, config=config, device=device,
            dtype=case.dtype, autocast=autocast, adapters=case.lora,
        )  # fmt: skip
        measured.append(found)
        return found

    found = plan(
        model_config, case.tokens, config=config, dtype=case.dtype, autocast=autocast, adapters=case.lora,
        optim="adamw_torch" if case.adam else None, device=device,
        speeds=STATED["H200"] if stated else speeds,
    )  # fmt: skip
    return found, measured[-1] if measured else None


def build(case: Case, device: torch.device):
    with device:
        model = AutoModelForCausalLM.from_config(case.model(), dtype=case.dtype)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def measure(case: Case, found: StepPlan, device: torch.device) -> dict[str, Any]:
    """Seconds and peak of one step, after one that compiles and allocates."""
    torch.manual_seed(0)
    model = build(case, device)
    config = found.follow(ChunkConfig(**case.chunks))
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-5) if case.adam else None
    ids = torch.randint(model.config.vocab_size, (1, case.tokens), generator=torch.Generator().manual_seed(1))

    def step(tokens: int) -> float:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=case.mixed):
            loss = chunked_backward(model, ids[:, :tokens], config=config)
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
        return float(loss)

    # cuDNN plans each length of keys that it has not met: a run's later steps do not pay for that
    first = case.tokens if device.type == "cuda" and config.attention == "dense" else 2 * found.chunk_tokens
    step(min(first, case.tokens))
    if device.type == "cuda" and (pinned := sum(found.host.values())):
        HostLease(pinned, torch.device("cuda", 0)).release()  # once a process: not part of a step
    model.zero_grad(set_to_none=True)
    gc.collect()
    with peak_of(device) as peak:
        began = time.perf_counter()
        loss = step(case.tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": peak[0], "loss": loss}


@contextmanager
def peak_of(device: torch.device):
    """The most memory within: a list of one number once it is left."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak[0] = torch.cuda.max_memory_allocated()
        return
    import psutil

    done, process = threading.Event(), psutil.Process()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def one(name: str, device: torch.device, *, stated: bool) -> dict[str, Any]:
    case = (CPU if device.type == "cpu" else GPU)[name]
    began = time.perf_counter()
    row: dict[str, Any] = {"case": name, "tokens": case.tokens}
    try:
        found, speeds = ask(case, device, stated=stated)
    except Exception as error:  # the other cases are still of use
        return row | {"error": f"{type(error).__name__}: {error}"}
    planned = time.perf_counter() - began
    if speeds is not None:
        row["flop_a_second"] = {kind: 1 / second for kind, second in speeds.each._asdict().items() if second}
    row |= {
        "chunk_tokens": found.chunk_tokens,
        "gpu": found.gpu,
        "host": found.host,
        "planning_seconds": planned,
        "predicted_seconds": found.seconds,
    }
    if found.obstacle is not None:
        return row | {"error": found.obstacle}
    row["predicted_peak"] = sum((found.gpu or found.host).values())
    try:
        measured = measure(case, found, device)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {"measured_seconds": measured["seconds"], "measured_peak": measured["peak"], "loss": measured["loss"]}
    row["seconds_ratio"] = found.seconds / measured["seconds"]
    row["peak_ratio"] = row["predicted_peak"] / measured["peak"]
    return row


def in_its_own_process(name: str, stated: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        words = [sys.executable, "-m", "benchmarks.plan", "--device", "cpu", "--cases", name, "--row", str(out)]
        # or glibc keeps freed memory resident, by a tenth and more of what is alive
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
        subprocess.run(words + ["--stated"] * stated, check=True, env=environment)
        return json.loads(out.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("s predicted", "measured", "ratio", "GiB", "measured", "ratio")
    lines = [f"{'case':36s} {'chunk':>6s} " + " ".join(f"{h:>{w}s}" for h, w in zip(heads, (11, 9, 6, 7, 9, 6)))]
    for r in rows:
        if "error" in r:
            lines.append(f"{r['case']:36s} {r['error'][:160]}")
            continue
        lines.append(
            f"{r['case']:36s} {r['chunk_tokens']:6d} {r['predicted_seconds']:11.2f} {r['measured_seconds']:9.2f} "
            f"{r['seconds_ratio']:6.2f} {r['predicted_peak'] / GIB:7.2f} {r['measured_peak'] / GIB:9.2f} "
            f"{r['peak_ratio']:6.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--cases", nargs="+", help="these only")
    parser.add_argument("--stated", action="store_true", help="the H200's rates from the table instead of measuring")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device(given.device)
    names = given.cases or list(CPU if device.type == "cpu" else GPU)
    if given.row:
        given.row.write_text(json.dumps(one(names[0], device, stated=given.stated)))
        return
    liger = device.type == "cuda" and use_liger()
    machine = {
        "liger": liger,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "stated_rates": given.stated,
    }
    rows: list[dict[str, Any]] = []
    for name in names:
        if device.type == "cpu":
            rows.append(in_its_own_process(name, given.stated))
        else:
            rows.append(one(name, device, stated=given.stated))
            gc.collect()
            torch.cuda.empty_cache()
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if given.out:
            given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
