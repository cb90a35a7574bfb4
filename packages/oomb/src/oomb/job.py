"""Everything that can be checked before a run, in the order of what it costs, and what the run then works on."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from oomb.calibration import calibrate
from oomb.checkpoint import check_replaceable
from oomb.config import ChunkConfig
from oomb.data import Source, find_source
from oomb.model_loading import adapter_settings, adapter_targets, load_config, load_model, load_tokenizer
from oomb.optimizer_states import check_name
from oomb.planner import plan
from oomb.rates import Rates, Speeds, read_rates
from oomb.resume import checkpoints, find_checkpoint
from oomb.sequences import Sequences, Stream, read_sequences
from oomb.step_plan import StepPlan
from oomb.train_config import TrainConfig
from oomb.trainer_checks import refuse_optimizer, refuse_steps_inside, require

SETTINGS = "oomb_settings.yaml"  # in each checkpoint: the settings of the run it belongs to
FINAL_LR = 0.1  # of the peak, at the end of the cosine
# What may differ when a run goes on; anything else would make it another run. Of the chunks that is all that changes
# memory and time only.
OF_CHUNKS = {"attention", "top_k_pages", "recent_pages", "sink_pages", "first_sparse_layer", "select_per_head"}
MAY_DIFFER = {
    "output", "device", "resume", "generate_tokens", "eval_data", "eval_steps", "eval_strategy", "eval_on_start",
    "save_steps", "save_strategy", "save_total_limit", "report_to", "run_name", "rates", "gpu_memory_bytes",
    "host_memory_bytes",
} | {field.name for field in fields(ChunkConfig)} - OF_CHUNKS  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run that has passed every check that can be made before work starts."""

    config: TrainConfig
    arguments: TrainingArguments
    model: Any
    tokenizer: PreTrainedTokenizerBase
    data: Sequences | Stream
    held_out: Sequences | None
    device: torch.device
    resume_from: Path | None
    plan: StepPlan

    @property
    def mixed(self) -> bool:
        """Whether weights are float32 and arithmetic is bfloat16."""
        return bool(self.arguments.bf16)

    @property
    def output(self) -> Path:
        return Path(self.config.output).expanduser()

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint"


def prepare(config: TrainConfig) -> Job:
    """Check what can be checked, cheapest first, then load tokenizer, text and model.

    Raises: ValueError for a device that is absent, an output that cannot be written or holds another run, a path that
        cannot be read, a model or tokenizer that cannot be loaded or do not match, a text shorter than one context
    """
    device = choose_device(config.device)
    dtype, mixed = choose_dtype(config.dtype, device)
    output = Path(config.output).expanduser()
    _check_output(output)
    arguments = _arguments(config, device, mixed)
    resume_from = _resume(config, output / "checkpoints")
    source = find_source(config)
    held_out_source = None if config.eval_data is None else find_source(config, config.eval_data)
    tokenizer = load_tokenizer(config)
    model_config = load_config(config, tokenizer)
    vocabulary = model_config.get_text_config().vocab_size
    data = _data(config, arguments, source, tokenizer, vocabulary)
    held_out = None
    if held_out_source is not None:
        held_out = read_sequences(held_out_source, tokenizer, config, vocabulary, wanted=None)
    found = plan_step(
        config, model_config, device, batch=arguments.per_device_train_batch_size,
        accumulation=arguments.gradient_accumulation_steps,
    )  # fmt: skip
    torch.manual_seed(config.seed)
    model = load_model(config, model_config, dtype, device)
    return Job(config, arguments, model, tokenizer, data, held_out, device, resume_from, found)


def plan_step(
    config: TrainConfig, model_config: PretrainedConfig, device: torch.device, *, batch: int = 1, accumulation: int = 1
) -> StepPlan:
    """What a step of the run will take, as `oomb plan` says it and as `oomb train` then does it.

    device: the one that trains; with `gpu_memory_bytes` set, a GPU that need not be here
    """
    dtype, mixed = choose_dtype(config.dtype, device)
    autocast = torch.bfloat16 if mixed else None
    elsewhere = config.gpu_memory_bytes is not None
    adapters = config.adapter != "none"
    known = adapters or importlib.util.find_spec("peft") is not None  # or else it is no remedy either

    def measured(chunk_tokens: int) -> Speeds | None:
        try:
            return calibrate(
                model_config, chunk_tokens=chunk_tokens, context_tokens=config.context, config=config.chunks,
                device=device, dtype=dtype, autocast=autocast, adapters=adapters, targets=adapter_targets(config),
            )  # fmt: skip
        except Exception as error:  # a run does not depend on it; what is wrong with the run itself its first step says
            warnings.warn(
                f"a step's seconds are not foretold: the short steps that are timed failed: {error}", stacklevel=2
            )
            return None

    speeds: Rates | Callable[[int], Speeds | None] | None = None if config.rates == "none" or elsewhere else measured
    if config.rates not in ("auto", "none"):
        speeds = read_rates(config.rates)
    return plan(
        model_config, config.context, config=config.chunks, batch=batch, accumulation=accumulation, dtype=dtype,
        autocast=autocast, optim=optimizer_name(config), optim_args=config.trainer.get("optim_args"),
        adapters=adapters, adapter_config=adapter_settings(config) if known else None,
        quantized=config.adapter == "qlora", gpu_bytes=config.gpu_memory_bytes,
        host_bytes=config.host_memory_bytes, device=device, speeds=speeds,
    )  # fmt: skip


def optimizer_name(config: TrainConfig) -> str:
    """The setting `optim`.

    Raises: ValueError for one that transformers does not know, with the closest, and one that steps inside a backward
    """
    name = str(config.trainer.get("optim", "adamw_torch"))
    check_name(name)
    refuse_steps_inside(name)
    return name


def _data(
    config: TrainConfig,
    arguments: TrainingArguments,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
) -> Sequences | Stream:
    if config.streaming:
        return Stream(source, tokenizer, config, vocabulary)
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    wanted = None if config.steps is None else config.steps * batch
    return read_sequences(source, tokenizer, config, vocabulary, wanted=wanted)


def _arguments(config: TrainConfig, device: torch.device, mixed: bool) -> TrainingArguments:
    given = dict(config.trainer)
    refuse_optimizer(optimizer_name(config))
    reports = given.get("report_to", "none")
    if "tensorboard" in (reports if isinstance(reports, list) else [reports]):
        require("tensorboard", "report_to='tensorboard'")
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 1,
        "optim": "adamw_torch",
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine_warmup_with_min_lr",
        "report_to": "none",
        "save_strategy": "steps" if "save_steps" in given else "no",
        "eval_strategy": "steps" if "eval_steps" in given else "no",
        "dataloader_pin_memory": False,  # batches are read on the host
    }
    if "lr_scheduler_type" not in given:
        defaults["lr_scheduler_kwargs"] = {"min_lr_rate": FINAL_LR, "warmup_lr_rate": 1 / (config.warmup_steps + 1)}
    fixed = {
        "output_dir": str(Path(config.output).expanduser() / "checkpoints"),
        "max_steps": config.steps if config.steps is not None else -1,
        "learning_rate": config.lr,
        "warmup_steps": config.warmup_steps,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "seed": config.seed,
        "bf16": mixed,
        "use_cpu": device.type == "cpu",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,  # the bar is ours
        "remove_unused_columns": False,
    }
    if given.get("eval_strategy", defaults["eval_strategy"]) != "no" and config.eval_data is None:
        raise ValueError("eval_strategy, eval_steps: there is nothing to evaluate on: set eval_data")
    try:
        return TrainingArguments(**(defaults | given | fixed))
    except (ValueError, TypeError, ImportError) as error:
        raise ValueError(f"transformers refuses the settings: {' '.join(str(error).split())}") from error


def _resume(config: TrainConfig, folder: Path) -> Path | None:
    """The checkpoint to go on from; a folder with checkpoints of another run is neither mixed with nor deleted."""
    if not config.resume:
        if checkpoints(folder):
            raise ValueError(
                f"output: {str(folder)!r} holds {checkpoints(folder)[-1].name} of an earlier run: go on with it "
                "(--resume true), remove it, or choose another output"
            )
        return None
    found = find_checkpoint(True, folder)
    assert found is not None
    try:
        before = yaml.safe_load((found / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"resume: {str(found)!r} was not saved by `oomb train`: no readable {SETTINGS}") from error
    now = written_settings(config)
    for name in sorted((set(now) | set(before)) - MAY_DIFFER):
        if now.get(name) != before.get(name):
            raise ValueError(
                f"resume: {name} was {before.get(name)!r} in the run that {str(found)!r} belongs to, now it is "
                f"{now.get(name)!r}: a run goes on as it began"
            )
    return found


def written_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings as YAML holds them, and as `oomb train` reads them again."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in config.to_settings().items()
    }


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, bool]:
    """What the setting `dtype` means. Returns: the weights' type, and whether arithmetic is bfloat16 over float32"""
    kind = name if name != "auto" else ("mixed" if device.type == "cuda" else "float32")
    return (torch.float32, True) if kind == "mixed" else (getattr(torch, kind), False)


def choose_device(name: str) -> torch.device:
    """What the setting `device` means; of several CUDA devices this process then sees only one.

    Raises: ValueError for one that is not there, and in one of several processes
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ValueError(
            f"oomb runs in one process on one device, and this is one of WORLD_SIZE={processes}: start it without "
            "torchrun, or train with OombTrainer in a script of your own"
        )
    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda":
        return device
    count, index = torch.cuda.device_count(), device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    if index < count > 1:  # the Trainer would use all that this process sees, which the first question to CUDA settles
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index]
    if not torch.cuda.is_available():
        if name == "auto":
            return torch.device("cpu")
        raise ValueError(f"device: {name} was asked for, but torch {torch.__version__} sees no CUDA device here")
    if index >= count:
        raise ValueError(f"device: {name} was asked for, but there are {count} CUDA devices")
    if index:
        torch.cuda.init()
        if torch.cuda.device_count() != 1:
            raise ValueError(
                f"device: CUDA began in this process before {name} was chosen of its {count} devices: start it with "
                f"CUDA_VISIBLE_DEVICES={visible[index]}"
            )
    return device if count == 1 else torch.device("cuda:0")


def _check_output(output: Path) -> None:
    """Make the folder, and find out now, not after hours, whether it can be written to."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ValueError(f"output: cannot write to {str(output)!r}: {error.strerror or error}") from error
    check_replaceable(output / "checkpoint")
