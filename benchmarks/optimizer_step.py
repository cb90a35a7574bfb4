"""A whole optimizer step of a Qwen2.5-7B-shaped model (random weights, bfloat16) on one GPU: does it fit?

    python3 benchmarks/optimizer_step.py --tokens 65536 --optim adamw_torch --out benchmarks/results/<name>.json

Everything a run of `oomb train` does in a step is in it: OombTrainer, chunks, gradient clipping, the optimizer by the
Trainer's own name. Each step's record is printed; the peak holds weights, gradients, optimizer states and pages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from benchmarks.step import VOCAB, build, use_liger
from transformers import TrainingArguments

from oomb import ChunkConfig, OombTrainer
from oomb.eta import ModelWork
from oomb.packing import collate
from oomb.progress import Progress


def rows(count: int, tokens: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCAB, (tokens,), generator=generator).numpy() for _ in range(count)]
    return [{"input_ids": row, "labels": row, "starts": [0]} for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--main-grads", action="store_true", help="sum gradients over chunks in float32")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    liger = use_liger()
    model = build(given.layers)
    chunks = ChunkConfig(chunk_tokens=given.chunk_tokens, fp32_main_grads=given.main_grads)
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(ModelWork.of(model), Path(folder, "metrics.jsonl"), report=print)
        arguments = TrainingArguments(
            folder, max_steps=given.steps, per_device_train_batch_size=1, optim=given.optim, learning_rate=1e-5,
            save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = OombTrainer(
            model, arguments, train_dataset=rows(given.steps, given.tokens), data_collator=collate,
            callbacks=[progress], chunk_config=chunks,
        )  # fmt: skip
        trainer.train()
    states = [s for state in trainer.optimizer.state.values() for s in state.values() if torch.is_tensor(s)]
    parameters = sum(p.numel() for p in model.parameters())
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": parameters,
        "tokens": given.tokens,
        "chunk_tokens": given.chunk_tokens,
        "optim": given.optim,
        "fp32_main_grads": given.main_grads,
        "liger": liger,
        "state_bytes_per_parameter": sum(s.numel() * s.element_size() for s in states) / parameters,
        "device_bytes": torch.cuda.get_device_properties(0).total_memory,
        "steps": [vars(record) for record in progress.records],
    }
    print(json.dumps(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
