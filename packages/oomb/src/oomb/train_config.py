"""Everything one training run may be told, as one flat set of named settings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oomb.config import ChunkConfig

TINY = "tiny"  # as `model`: a small Qwen2 made on the spot
STDLIB = "stdlib"  # as `data`: the source of the running interpreter's standard library


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
    data: str = _setting(f"text file, folder of text files, or `{STDLIB}`: the running Python's own library")
    context: int = _setting("tokens of one training sequence")
    output: str = _setting("folder for the checkpoint, the metrics and the loss curve", "runs/train")
    steps: int | None = _setting("optimizer steps, one sequence each; none: one pass over the data", None)
    lr: float = _setting("peak learning rate of AdamW", 1e-5)
    warmup_steps: int = _setting("steps over which the learning rate rises; then it falls as a cosine to a tenth", 0)
    weight_decay: float = _setting("AdamW's weight decay, on matrices only", 0.0)
    max_grad_norm: float = _setting("gradients are clipped to this norm", 1.0)
    seed: int = _setting("of the weights of a model made on the spot, the order of files, dropout and sampling", 0)
    dtype: str = _setting(
        "float32, bfloat16, float64, or mixed: float32 weights, bfloat16 arithmetic; auto: mixed on CUDA, else float32",
        "auto",
    )
    device: str = _setting("cpu, cuda or cuda:1; auto: CUDA where there is one", "auto")
    generate_tokens: int = _setting("tokens to generate from the saved checkpoint at the end; 0: none", 64)
    chunks: ChunkConfig = field(default_factory=ChunkConfig)

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ValueError(f"{name} must be a name or a path, got {getattr(self, name)!r}")
        # A sequence of one token has nothing to predict.
        for name, least in (("context", 2), ("warmup_steps", 0), ("seed", 0), ("generate_tokens", 0)):
            _whole(name, getattr(self, name), least)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if self.steps is not None:
            _whole("steps", self.steps, 1)
        for name, zero in (("lr", False), ("weight_decay", True), ("max_grad_norm", False)):
            _positive(name, getattr(self, name), zero)
        if self.dtype not in ("auto", "mixed", "float32", "bfloat16", "float64"):
            raise ValueError(f"dtype must be auto, mixed, float32, bfloat16 or float64, got {self.dtype!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """Build from one flat mapping; ChunkConfig's fields stand beside this class's own.

        Raises: ValueError naming what is missing, or what a value got wrong
        """
        inner = {f.name for f in dataclasses.fields(ChunkConfig)}
        own = {name: value for name, value in settings.items() if name not in inner}
        for name in ("model", "data", "context"):
            if name not in own:
                raise ValueError(f"{name} is not set: give --{name} or `{name}:` in the config file")
        chunks = ChunkConfig(**{name: value for name, value in settings.items() if name in inner})
        return cls(**own, chunks=chunks)

    def to_settings(self) -> dict[str, Any]:
        """The flat mapping that `from_settings` reads, every value written out."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "chunks"}
        return own | {f.name: getattr(self.chunks, f.name) for f in dataclasses.fields(self.chunks)}


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _positive(name: str, value: object, zero: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):  # type: ignore[arg-type,operator]
        raise ValueError(f"{name} must be a {'non-negative' if zero else 'positive'} number, got {value!r}")
