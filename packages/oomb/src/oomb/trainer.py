"""A plain training loop: one sequence of one context a step, AdamW, warm-up and cosine."""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

from oomb import chunked_backward
from oomb.checkpoint import check_replaceable
from oomb.data import Windows, find_files, read_windows
from oomb.progress import StepBar, StepRecord, peak_bytes
from oomb.tiny import byte_tokenizer, tiny_model
from oomb.train_config import TINY, TrainConfig

FINAL_LR = 0.1  # of the peak, at the end of the cosine


@dataclass(frozen=True)
class Job:
    """A run that has passed every check that can be made before work starts."""

    config: TrainConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    windows: Windows
    device: torch.device
    mixed: bool  # float32 weights, bfloat16 arithmetic

    @property
    def steps(self) -> int:
        return len(self.windows) if self.config.steps is None else self.config.steps

    @property
    def output(self) -> Path:
        return Path(self.config.output).expanduser()

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint"


def prepare(config: TrainConfig) -> Job:
    """Check what can be checked, cheapest first, then load tokenizer, text and model.

    Raises: ValueError for a device that is absent, an output that cannot be written, a path that cannot be read, a
        model or tokenizer that cannot be loaded or do not match, a text shorter than one context
    """
    device = _device(config.device)
    kind = config.dtype if config.dtype != "auto" else ("mixed" if device.type == "cuda" else "float32")
    _check_output(Path(config.output).expanduser())
    find_files(config.data, config.seed)
    if config.model == TINY:
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
        model_config = None
    else:
        tokenizer = _load("tokenizer", config.model, AutoTokenizer.from_pretrained)
        model_config = _load("model", config.model, AutoConfig.from_pretrained)
        if model_config.is_encoder_decoder:
            raise ValueError(
                f"model: {config.model!r} holds an encoder-decoder; only causal language models can be trained"
            )
        _check_vocabulary(config.model, tokenizer, model_config)
    windows = read_windows(config.data, tokenizer, config.context, seed=config.seed, steps=config.steps)
    torch.manual_seed(config.seed)
    dtype = torch.float32 if kind == "mixed" else getattr(torch, kind)
    model: Any
    if model_config is None:
        model = tiny_model(config.context, config.seed)
        model.to(dtype)
    else:
        model = _load_model(config.model, dtype)
    return Job(config, model.to(device).train(), tokenizer, windows, device, kind == "mixed")


def fit(job: Job, report: Callable[[str], None] | None = None) -> list[StepRecord]:
    """Train the job's model in place; a line per step goes to `report` and to metrics.jsonl.

    Returns: one record per step
    Raises: FloatingPointError when loss or gradient is not finite, before the weights are touched
    """
    config, steps = job.config, job.steps
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(_groups(parameters, config.weight_decay), lr=config.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps, config.warmup_steps))
    records: list[StepRecord] = []
    bar = StepBar(steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(bar))
        log = None  # opened with the first step's line: a run that is refused leaves the metrics of the one before
        for step in range(1, steps + 1):
            began = time.perf_counter()
            bar.begin(step)
            lr = float(schedule.get_last_lr()[0])
            loss, norm = _gradients(job, step, parameters, bar.chunk)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            seconds = time.perf_counter() - began
            rate = config.context / seconds
            record = StepRecord(step, loss, norm, lr, seconds, rate, peak_bytes(job.device))
            records.append(record)
            if log is None:
                log = stack.enter_context((job.output / "metrics.jsonl").open("w", encoding="utf-8"))
            log.write(json.dumps(asdict(record)) + "\n")
            log.flush()
            bar.line(record.line(steps)) if report is None else report(record.line(steps))
    return records


def _gradients(
    job: Job, step: int, parameters: list[torch.nn.Parameter], progress: Callable[[int, int], None]
) -> tuple[float, float]:
    """Fill `.grad` with this step's clipped gradient. Returns: loss, norm before clipping"""
    autocast = torch.autocast(job.device.type, torch.bfloat16, enabled=job.mixed)
    ids = job.windows.step(step - 1).to(job.device)
    with autocast:
        loss = float(chunked_backward(job.model, ids, config=job.config.chunks, progress=progress))
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, job.config.max_grad_norm))
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} of step {step} is {value}: stopped with the weights of step {step - 1}; "
                "try a smaller lr, a longer warm-up, or dtype float32"
            )
    return loss, norm


def lr_factor(step: int, steps: int, warmup_steps: int) -> float:
    """What the peak learning rate is multiplied by in step `step`, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    through = min((step - warmup_steps) / max(steps - 1 - warmup_steps, 1), 1.0)
    return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * through))


def _groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices; leave norms and biases alone."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: {name} was asked for, but torch {torch.__version__} sees no CUDA device here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def _check_output(output: Path) -> None:
    """Make the folder, and find out now, not after hours, whether it can be written to."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ValueError(f"output: cannot write to {str(output)!r}: {error.strerror or error}") from error
    check_replaceable(output / "checkpoint")


def _load(what: str, path: str, load: Callable[..., Any], **options: Any) -> Any:
    """Call one of the library's loaders; say in one line what failed.

    What is no folder here may be a name on the Hub, `owner/name`; nothing else is looked up, since that takes long.
    """
    folder = Path(path).expanduser()
    may_be_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not folder.parent.exists()
    if not folder.is_dir() and not may_be_name:
        raise ValueError(f"model: there is no folder {str(folder)!r}; give one, a Hub name `owner/name`, or `{TINY}`")
    try:
        return load(str(folder) if folder.is_dir() else path, **options)
    except Exception as error:  # the libraries raise many kinds, and all mean the same here
        reason = " ".join(str(error).split())
        raise ValueError(f"model: cannot load a {what} from {path!r}: {reason[:300]}") from error


def _load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """All of a model's weights, or an error: a missing one would be trained from random numbers."""
    options = {
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }  # all told in one line below
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, info = _load("model", path, AutoModelForCausalLM.from_pretrained, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    lacking = [str(key) for kind in ("missing_keys", "mismatched_keys") for key in info.get(kind, ())]
    if lacking:
        raise ValueError(
            f"model: {path!r} lacks {len(lacking)} of the model's weights or has them in another shape, "
            f"{lacking[0]} for one: they would be random numbers"
        )
    return model


def _check_vocabulary(path: str, tokenizer: PreTrainedTokenizerBase, model_config: Any) -> None:
    size = model_config.get_text_config().vocab_size
    if not tokenizer("The quick brown fox, 1 2 3.", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"model: {path!r} has no tokenizer of its own: the one that was loaded turns text into no tokens"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= size:
        raise ValueError(
            f"model: the tokenizer of {path!r} has ids up to {largest:,}, the model's vocabulary ends at {size - 1:,}: "
            "they do not belong together, or the model's embeddings were not resized"
        )
