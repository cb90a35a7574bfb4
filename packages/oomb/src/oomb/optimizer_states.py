"""Bytes that an optimizer keeps of a parameter between steps, by the Trainer's name for it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

# Numbers of each element, by the first word that is in an optimizer's name; AdamW's in all its forms are two.
NUMBERS = (
    ("ademamix", 3), ("grokadamw", 3), ("lion", 1), ("rmsprop", 1), ("adagrad", 1), ("schedule_free_sgd", 1),
    ("sgd", 0), ("", 2),
)  # fmt: skip
BITSANDBYTES = ("bnb", "adamw_8bit", "adamw_32bit", "lion", "ademamix")
LEAST_QUANTIZED = 4096  # elements: smaller parameters keep wide states
BLOCK = 256  # elements that share a float32 scale


@dataclass(frozen=True)
class Optimizer:
    """name, options: the Trainer's `optim` and `optim_args`"""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(name: str, optim_args: str | None = None) -> Optimizer:
        """Raises: ValueError for a name that transformers does not know, and options that are not like key=value"""
        check_name(name)
        words = [word.partition("=") for word in (optim_args or "").replace(" ", "").split(",") if word]
        if not all(key and equals for key, equals, _ in words):
            raise ValueError(f"optim_args must be like momentum=0.9,nesterov=true, got {optim_args!r}")
        return Optimizer(name, {key: value for key, _, value in words})

    def state_bytes(self, p: nn.Parameter, *, embedding: bool = False) -> int:
        """Of one parameter; what the projections of galore and apollo save is not counted, nor counters of steps.

        embedding: whether it is the table of an `nn.Embedding`, whose states the Trainer keeps wide in bitsandbytes
        """
        name, dtype, count = self.name, p.dtype, p.numel()
        if "adafactor" in name:  # rows and columns, in float32 at least
            wide = max(dtype.itemsize, 4)
            return wide * (count if p.dim() < 2 else math.prod(p.shape[:-1]) + math.prod((*p.shape[:-2], p.shape[-1])))
        numbers = next(numbers for word, numbers in NUMBERS if word in name)
        if name in ("sgd", "rmsprop"):
            numbers += float(self.options.get("momentum", 0)) > 0
            numbers += name == "rmsprop" and self._asked("centered")
        if "torch_8bit" in name or "torch_4bit" in name:
            block = int(self.options.get("block_size", BLOCK))
            if count < LEAST_QUANTIZED or count % block:
                return numbers * count * dtype.itemsize
            return int(numbers * count * ((0.5 if "4bit" in name else 1.0) + 4 / block))
        if any(mark in name for mark in BITSANDBYTES):
            if "8bit" not in name or embedding or count < LEAST_QUANTIZED:
                return numbers * count * 4
            return numbers * (count + 4 * -(-count // BLOCK))
        if name == "adamw_anyprecision":
            return count * (8 + 2 * self._asked("use_kahan_summation"))
        narrow = dtype in (torch.bfloat16, torch.float16)
        compensated = name == "stable_adamw" and narrow  # whatever its kahan_sum says, which the Trainer reads as true
        return (numbers + compensated) * count * dtype.itemsize

    def _asked(self, option: str) -> bool:
        return self.options.get(option, "false").lower() in ("true", "1", "yes")


def check_name(name: str) -> None:
    """Raises: ValueError for one that transformers does not know, with the closest"""
    from transformers.training_args import OptimizerNames  # seconds to import

    known = [kind.value for kind in OptimizerNames]
    if name not in known:
        close = difflib.get_close_matches(name, known, 3, 0.4)
        raise ValueError(f"optim: transformers has no {name!r}" + (f"; closest: {', '.join(close)}" if close else ""))
