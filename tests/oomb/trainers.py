"""What the trainer's tests share: tiny models and data, and the stock Trainer beside ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tests.models import VOCAB, build, configs
from transformers import Trainer, TrainerCallback, TrainingArguments

from oomb import ChunkConfig, OombTrainer

CHUNKS = ChunkConfig(chunk_tokens=6, page_tokens=4)


def rows(count: int, *, seed: int = 0, lengths=(23, 17, 20)) -> list[dict[str, list[int]]]:
    """Sequences of different lengths, some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(VOCAB, (lengths[index % len(lengths)],), generator=generator)
        labels = ids.clone()
        labels[: 2 + index % 5] = -100
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])

    real = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(real),
    }


def arguments(output: Path, **settings: Any) -> TrainingArguments:
    base = {
        "max_steps": 3, "per_device_train_batch_size": 1, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch",
    }  # fmt: skip
    return TrainingArguments(str(output), **(base | settings))


def model(name: str = "qwen3", dtype: torch.dtype = torch.float32):
    return build(configs()[name], dtype=dtype)


class Losses(TrainerCallback):
    """Every number that is logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs, **_):
        self.logged.append(dict(logs))

    def of(self, key: str) -> list[float]:
        return [logs[key] for logs in self.logged if key in logs]


def run(kind: type[Trainer], trained, output: Path, data=None, *, settings=None, resume=None, **more: Any):
    """Train a copy of the model. Returns: the trainer, what was logged"""
    losses = Losses()
    if issubclass(kind, OombTrainer):
        more.setdefault("chunk_config", CHUNKS)
    trainer = kind(
        model=copy.deepcopy(trained), args=arguments(output, **(settings or {})), callbacks=[losses],
        train_dataset=rows(8) if data is None else data, data_collator=collate, **more,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses
