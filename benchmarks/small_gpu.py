"""A LoRA step of a 7B-shaped model (random weights, bfloat16) on a small GPU: a hard cap on a large one's memory.

    python3 -m benchmarks.small_gpu --cap-gib 24 --tokens 262144 --out benchmarks/results/small_gpu_<date>.json
    python3 -m benchmarks.small_gpu --attention sparse --grad-pages bfloat16 --tokens 917504

torch refuses this process any allocation beyond the cap, which is tried before anything else. The plan, made before the
model exists and under the same cap, stands beside what was measured. Adapters are peft's where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # or fragments take their share of the cap

import torch
from benchmarks.plan import _qwen2_7b
from benchmarks.step import use_liger
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from oomb import ChunkConfig, chunked_backward, plan
from oomb.calibration import calibrate
from oomb.host import HostLease
from oomb.step_plan import StepPlan

GIB = 2**30
RANK = 16


class _LoRA(nn.Module):
    """What peft does to a linear layer, where there is no peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return (result + 2.0 * self.lora_B(self.lora_A(x.float()))).to(result.dtype)


def with_adapters(model: nn.Module) -> nn.Module:
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    model.requires_grad_(False)
    linear = [(name, m) for name, m in model.get_decoder().named_modules() if isinstance(m, nn.Linear)]
    for name, module in linear:
        owner, _, last = name.rpartition(".")
        setattr(model.get_decoder().get_submodule(owner), last, _LoRA(module))
    return model.train()


def cap(gib: float) -> None:
    """No more than this, and see that it holds."""
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        torch.empty(int((gib + 0.1) * GIB), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise RuntimeError("the cap does not hold")


def ask(
    model_config: PretrainedConfig, tokens: int, config: ChunkConfig, device: torch.device, gpu_bytes: int | None = None
) -> StepPlan:
    def speeds(chunk_tokens: int):
        return calibrate(
            model_config, chunk_tokens=chunk_tokens, context_tokens=tokens, config=config, device=device,
            dtype=torch.bfloat16, adapters=True,
        )  # fmt: skip

    return plan(
        model_config, tokens, config=config, adapters=True, adapter_rank=RANK, device=device, gpu_bytes=gpu_bytes,
        speeds=speeds,
    )  # fmt: skip


def run(model_config: PretrainedConfig, tokens: int, config: ChunkConfig, device: torch.device) -> dict:
    """One step, after one over two chunks."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    model = with_adapters(model)
    ids = torch.randint(model_config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    chunk = config.chunk_length(device)
    chunked_backward(model, ids[:, : 2 * chunk], config=config)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    done: list[float] = []
    began = time.perf_counter()
    loss = float(chunked_backward(model, ids, config=config, progress=lambda *_: done.append(time.perf_counter())))
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([g.float().norm() for g in grads]).norm())
    found = {"seconds": seconds, "loss": loss, "gradient_norm": norm, "passes": len(done)}
    if device.type == "cuda":
        found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--attention", default="dense", choices=["dense", "sparse"])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--cap-gib", type=float, default=24.0)
    parser.add_argument("--host-gib", type=float, default=96.0, help="pinned memory, at most")
    parser.add_argument("--grad-pages", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    cap(given.cap_gib)
    liger = use_liger()
    config = ChunkConfig(
        attention=given.attention,
        grad_page_dtype=getattr(torch, given.grad_pages),
        host_budget_bytes=int(given.host_gib * GIB),
    )
    model_config = _qwen2_7b(given.layers)
    found = ask(model_config, given.tokens, config, device)
    print("\n".join(found.lines()), flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "liger": liger, "cap_gib": given.cap_gib,
        "peft": importlib.util.find_spec("peft") is not None, "layers": given.layers, "tokens": given.tokens,
        "attention": given.attention, "grad_pages": given.grad_pages, "chunk_tokens": found.chunk_tokens,
        "longest": found.longest, "gpu_bytes": found.gpu, "host_bytes": found.host,
        "predicted_seconds": found.seconds, "predicted_peak": sum(found.gpu.values()),
    }  # fmt: skip
    if found.obstacle is None and not given.plan_only:
        began = time.perf_counter()
        HostLease(sum(found.host.values()), device).release()  # pinned once a process
        result["pinning_seconds"] = time.perf_counter() - began
        result |= run(model_config, given.tokens, found.follow(config), device)
        print(
            f"measured: {result['seconds']:.1f} s (predicted {found.seconds:.1f}), peak {result['peak'] / GIB:.2f} GiB "
            f"(predicted {result['predicted_peak'] / GIB:.2f}), reserved {result['reserved'] / GIB:.2f} of "
            f"{given.cap_gib:g}, {result['passes']} passes, loss {result['loss']:.4f}, pinned in "
            f"{result['pinning_seconds']:.0f} s"
        )
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
