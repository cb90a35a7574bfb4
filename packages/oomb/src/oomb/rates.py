"""How fast a machine does the work of a step: stated for a GPU that is not here, or found by calibration.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from .eta import ModelWork, Pass

# What passes through memory beside the matrix products of a layer, in units of what its backward keeps; from the layers
# of a 7B-shaped model as transformers has them (1.34 of the bare products forward, 1.32 with the backward).
TRAFFIC, TRAFFIC_BACK = 5.0, 9.0
UPDATE_BYTES = 48  # of a 16-bit parameter, through clipping and AdamW, one elementwise operation after the other


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second. Units: FLOP, bytes; link: bytes each way, both ways at once."""

    matmul: float
    memory: float
    attention: float
    attention_back: float
    sparse: float  # attention over listed pages, the choice of pages included
    sparse_back: float
    link: float


# Measured: docs/log.md, benchmarks/results/{attention,sparse,step}_h200_2026-11-29*.json
STATED = {"H200": Rates(690e12, 4.1e12, 600e12, 530e12, 330e12, 260e12, 49e9)}
NARROW = 0.79  # of the attention rates with a head dim of 64 instead of 128


@dataclass(frozen=True)
class Speeds:
    """Seconds that a model's work takes on a machine: `each` for a FLOP, of each kind; link for a byte each way; update
    for a parameter.
    """

    each: Pass
    link: float
    update: float

    def seconds(self, work: Pass) -> float:
        return sum(flop * second for flop, second in zip(work, self.each, strict=True))


def read_rates(text: str) -> Rates:
    """A GPU's name from the table, or numbers of one's own: `matmul=300e12,memory=2e12,…`; what is left out is scaled
    from the H200's by `matmul`.

    Raises: ValueError naming what is known
    """
    if text in STATED:
        return STATED[text]
    known = [f.name for f in fields(Rates)]
    words = [word.partition("=") for word in text.split(",")]
    try:
        given = {name.strip(): float(value) for name, _, value in words}
    except ValueError:
        given = {}
    twice = len(given) < len(words)
    if twice or "matmul" not in given or set(given) - set(known) or not all(0 < v < math.inf for v in given.values()):
        raise ValueError(
            f"rates must be auto, none, {', '.join(STATED)}, or numbers a second like matmul=300e12,memory=2e12 (of "
            f"{', '.join(known)}; matmul at least), got {text!r}"
        )
    base = STATED["H200"]
    ratio = given["matmul"] / base.matmul
    return replace(base, **({name: ratio * getattr(base, name) for name in known} | given))


def stated_speeds(rates: Rates, work: ModelWork, *, layer_bytes: int, head_dim: int, sparse: bool) -> Speeds:
    """Speeds of a model's layers. layer_bytes: what a layer keeps of a token for its backward"""
    flops = (work.linear - work.head) / len(work.windows)  # of a token in one layer
    forward, back = rates.attention, rates.attention_back
    if sparse:
        forward, back = rates.sparse, rates.sparse_back
    elif head_dim <= 64:
        forward, back = NARROW * forward, NARROW * back
    each = Pass(
        linear=1 / rates.matmul + TRAFFIC * layer_bytes / rates.memory / flops,
        linear_back=1 / rates.matmul + TRAFFIC_BACK * layer_bytes / rates.memory / (flops * (1 + work.learned)),
        attention=1 / forward,
        attention_back=1 / back,
        head=1 / (0.8 * rates.matmul),  # the loss over its logits included
    )
    return Speeds(each, 1 / rates.link, UPDATE_BYTES / rates.memory)
