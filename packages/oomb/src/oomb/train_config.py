"""Everything one training run may be told, as one flat set of named settings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oomb.config import ChunkConfig
from oomb.rates import read_rates

TINY = "tiny"  # as `model`: a small Qwen2 made on the spot
STDLIB = "stdlib"  # as `data`: the source of the running interpreter's standard library


CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": ("auto", "mixed", "float32", "bfloat16", "float64"),
    "data_format": ("auto", "text", "json", "parquet"),
    "documents": ("file", "repository"),
    "adapter": ("none", "lora", "qlora"),
    "rope_type": ("yarn", "linear", "dynamic", None),
}

# What TrainingArguments calls otherwise than a setting of ours, or what is not a run's to say.
RENAMED = {
    "output_dir": "output", "max_steps": "steps", "learning_rate": "lr", "bf16": "dtype", "fp16": "dtype",
    "use_cpu": "device", "resume_from_checkpoint": "resume", "logging_steps": None, "logging_strategy": None,
    "disable_tqdm": None, "remove_unused_columns": None, "label_names": None, "prediction_loss_only": None,
    "do_train": None, "do_eval": None, "do_predict": None, "auto_find_batch_size": None,
}  # fmt: skip


def _setting(help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with the sentence that `oomb train --help` shows for it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """One run of `oomb train`.

    Units:  context in tokens, steps in optimizer steps of one context each
    Raises: ValueError when a value is not of its kind
    """

    model: str = _setting(f"folder or Hub name of a Hugging Face model, or `{TINY}`: a small Qwen2 made on the spot")
    data: str = _setting(f"text, jsonl or parquet: a file or a folder; or `{STDLIB}`: the running Python's own library")
    context: int = _setting("tokens of one training sequence: longer documents are split, shorter ones packed")
    output: str = _setting("folder for checkpoints, metrics and pictures", "runs/train")
    steps: int | None = _setting("optimizer steps; none: one pass over the data", None)
    lr: float = _setting("peak learning rate", 1e-5)
    warmup_steps: int = _setting("steps over which the learning rate rises; then it falls as a cosine to a tenth", 0)
    weight_decay: float = _setting("the optimizer's weight decay, on matrices only", 0.0)
    max_grad_norm: float = _setting("gradients are clipped to this norm", 1.0)
    seed: int = _setting("of the weights of a model made on the spot, the order of files, dropout and sampling", 0)
    dtype: str = _setting(
        "float32, bfloat16, float64, or mixed: float32 weights, bfloat16 arithmetic; auto: mixed on CUDA, else float32",
        "auto",
    )
    device: str = _setting("cpu, cuda or cuda:1; auto: CUDA where there is one", "auto")
    data_format: str = _setting("text, json or parquet; auto: by the files' names", "auto")
    documents: str = _setting(
        "of text in a folder: file, each is a document; repository: each folder with a .git is one, or else the whole",
        "file",
    )
    text_column: str = _setting("of tables: the column of text; else `messages` or `input_ids` are looked for", "text")
    assistant_only: bool = _setting("of `messages`: learn only what the assistant says", False)
    streaming: bool = _setting("read while training, again each epoch, instead of once before; needs steps", False)
    eval_data: str | None = _setting("held-out data of the same form; none: no evaluation", None)
    adapter: str = _setting("none: all weights are trained; lora, or qlora: over a base in 4 bits", "none")
    lora_rank: int = _setting("rank of the adapters", 16)
    lora_alpha: float = _setting("the adapters' scale is this over their rank", 32.0)
    lora_dropout: float = _setting("dropout before the adapters", 0.0)
    lora_targets: str = _setting("modules with adapters: names with commas between, or all-linear", "all-linear")
    rope_type: str | None = _setting(
        "rotary embedding for contexts beyond the model's: yarn, linear or dynamic; none: the model's own", None
    )
    rope_factor: float | None = _setting("how many times longer; none: context over the model's positions", None)
    rope_theta: float | None = _setting("base of the rotary frequencies; none: the model's own", None)
    resume: bool = _setting("go on from the last checkpoint in output, bit for bit on a CPU", False)
    rates: str = _setting(
        "how fast the machine is, for a plan's seconds: auto (a few short steps are timed here), none, a GPU's name "
        "(H200), or numbers a second like matmul=300e12,memory=2e12",
        "auto",
    )
    gpu_memory_bytes: int | None = _setting("oomb plan: of the GPU to plan for, like 80GiB; none: this one's", None)
    host_memory_bytes: int | None = _setting("oomb plan: of the host to plan for; none: what is free here", None)
    generate_tokens: int = _setting("tokens to generate from the saved checkpoint at the end; 0: none", 64)
    trainer: Mapping[str, Any] = field(default_factory=dict)  # transformers.TrainingArguments, by its own names
    chunks: ChunkConfig = field(default_factory=ChunkConfig)

    def __post_init__(self) -> None:
        for name in ("model", "data", "output", "text_column", "lora_targets", "rates", "eval_data"):
            value = getattr(self, name)
            if (not isinstance(value, str) or not value.strip()) and not (name == "eval_data" and value is None):
                raise ValueError(f"{name} must be a name or a path, got {value!r}")
        if self.rates not in ("auto", "none"):
            read_rates(self.rates)
        # A sequence of one token has nothing to predict.
        least_of = {"context": 2, "warmup_steps": 0, "seed": 0, "generate_tokens": 0, "lora_rank": 1}
        for name, least in least_of.items():
            _whole(name, getattr(self, name), least)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        for name in ("steps", "gpu_memory_bytes", "host_memory_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        for name in ("lr", "max_grad_norm", "lora_alpha", "rope_factor", "rope_theta"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name), False)
        for name in ("weight_decay", "lora_dropout"):
            _positive(name, getattr(self, name), True)
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                listed = ", ".join(str(word).lower() for word in words)
                raise ValueError(f"{name} must be one of {listed}, got {getattr(self, name)!r}")
        for name in ("assistant_only", "streaming", "resume"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.lora_dropout >= 1:
            raise ValueError(f"lora_dropout must be below 1, got {self.lora_dropout}")
        if self.streaming and self.steps is None:
            raise ValueError("streaming: steps must be set, since the end of a stream is not known")
        if self.rope_factor is not None and self.rope_type is None:
            raise ValueError("rope_factor belongs to a rope_type: set rope_type to yarn, linear or dynamic")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """Build from one flat mapping; ChunkConfig's fields stand beside this class's own.

        Raises: ValueError naming what is missing, or what a value got wrong
        """
        inner = {f.name for f in dataclasses.fields(ChunkConfig)}
        names = {f.name for f in dataclasses.fields(cls)} - {"chunks", "trainer"}
        own = {name: value for name, value in settings.items() if name in names}
        for name in ("model", "data", "context"):
            if name not in own:
                raise ValueError(f"{name} is not set: give --{name} or `{name}:` in the config file")
        chunks = ChunkConfig(**{name: value for name, value in settings.items() if name in inner})
        others = {name: value for name, value in settings.items() if name not in names | inner}
        return cls(**own, chunks=chunks, trainer=others)

    def to_settings(self) -> dict[str, Any]:
        """The flat mapping that `from_settings` reads, every value written out."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("chunks", "trainer")]
        own = {name: getattr(self, name) for name in names}
        inner = {f.name: getattr(self.chunks, f.name) for f in dataclasses.fields(self.chunks)}
        return own | inner | dict(self.trainer)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _positive(name: str, value: object, zero: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):  # type: ignore[arg-type,operator]
        raise ValueError(f"{name} must be a {'non-negative' if zero else 'positive'} number, got {value!r}")
