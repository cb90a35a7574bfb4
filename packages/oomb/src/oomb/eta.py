"""How long a step takes, or still takes: a chunk costs more the further back it looks, the walk more than the fill.

One model of the work serves the plan of a step (`chunk_passes`, and speeds that were measured or stated) and the bar of
a running one (`passes`, and speeds learnt from the passes that are done).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

BACKWARD_ATTENTION = 2.5  # of a forward pass: five products instead of two
PRIOR = 0.01  # weight of "linear and attention run at one speed" against what was measured


class Pass(NamedTuple):
    """Floating-point operations of one pass over one chunk, or seconds for each, by kind; `chunk` counts a pass of the
    fill (what the walk takes whatever the layers is with the head).
    """

    linear: float = 0.0  # matrix products of the layers, forward
    linear_back: float = 0.0
    attention: float = 0.0
    attention_back: float = 0.0
    head: float = 0.0  # the head and its loss, both ways
    chunk: float = 0.0


@dataclass(frozen=True)
class Kept:
    """Chunks whose outputs of attention and of layers the walk finds, and whether layers are walked back one by one."""

    attention: range = range(0)
    layers: range | None = None  # None: of all
    layer_by_layer: bool = True


@dataclass(frozen=True)
class ModelWork:
    """Floating-point operations of one forward pass.

    Units:  linear in FLOP a token, head those of it that the head takes, entry what projects one layer's queries, keys
            and values; attention in FLOP a query-key pair, of a layer; learned: share of `linear` whose weights learn
    windows: for each layer, how many tokens it looks back at most; None for all
    """

    linear: float
    attention: float
    windows: tuple[int | None, ...]
    head: float = 0.0
    entry: float = 0.0
    learned: float = 1.0

    @staticmethod
    def of(model: Any, pages_tokens: int | None = None) -> ModelWork:
        """Of a Hugging Face model, parameters on the meta device included.

        pages_tokens: how many tokens sparse layers read at most; None for dense attention
        """
        config = model.config.get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        share = config.num_experts_per_tok / experts if experts else 1.0
        embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings()
        weight = None if output is None else getattr(output, "weight", None)
        looked_up = set() if weight is embeddings else {id(embeddings)}  # not multiplied
        sizes = [
            (p.numel() * (share if ".experts." in name else 1.0), p.requires_grad)
            for name, p in model.named_parameters()
            if p.ndim > 1 and id(p) not in looked_up
        ]
        parameters = sum(size for size, _ in sizes)
        learned = sum(size for size, learns in sizes if learns) / max(parameters, 1.0)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        window = getattr(config, "sliding_window", None)
        windows = tuple(window if kind == "sliding_attention" else pages_tokens for kind in kinds)
        head = 0.0 if weight is None else 2.0 * weight.numel()
        entry = 2.0 * config.hidden_size * (heads + 2 * groups) * head_dim
        return ModelWork(2.0 * parameters, 4.0 * heads * head_dim, windows, head, entry, learned)

    def pairs(self, start: int, stop: int) -> float:
        """Query-key pairs of the tokens [start, stop), over all layers."""
        return sum(_seen(limit, start, stop) for limit in self.windows)

    def forward(self, tokens: int) -> float:
        """FLOP of one forward pass over a sequence, for reckoning utilization: three of them are a step."""
        return self.linear * tokens + self.attention * self.pairs(0, tokens)


def _seen(limit: int | None, start: int, stop: int) -> float:
    if limit is None or stop <= limit:
        return (start + stop + 1) / 2 * (stop - start)
    if start >= limit:
        return float(limit * (stop - start))
    return (start + limit + 1) / 2 * (limit - start) + limit * (stop - limit)


def chunk_passes(work: ModelWork, bounds: Sequence[tuple[int, int]], kept: Kept) -> tuple[list[Pass], list[Pass]]:
    """FLOP of each chunk of one training step: in the fill, which the last chunk has no part in, and in the walk.

    The fill leaves out the head, and of the last layer what follows its keys and values. Layers that are walked back
    one by one run again from stored outputs, the last layer only once; where none are stored a forward comes before.
    """
    count, last = len(work.windows), len(bounds) - 1
    layers, fill, walk = work.linear - work.head, [], []
    for i, (start, stop) in enumerate(bounds):
        tokens = stop - start
        linear, end = layers * tokens, layers * tokens / count  # of all layers, of the last one
        attention = work.attention * work.pairs(start, stop)
        attention_end = work.attention * _seen(work.windows[-1], start, stop)
        if i < last:
            fill.append(Pass(linear - end + work.entry * tokens, attention=attention - attention_end, chunk=1.0))
        found = i in kept.attention
        if kept.layer_by_layer:
            before = i == last or (kept.layers is not None and i not in kept.layers)
            again = (1 if i == last else 0) if found else 1 + before
            forward = (linear - end) * (1 + before) + end
            forward_attention = (attention - attention_end) * again + attention_end
        else:
            forward, forward_attention = linear, attention * (not found)
        walk.append(
            Pass(
                forward,
                linear * (1 + work.learned),
                forward_attention,
                attention * BACKWARD_ATTENTION,
                work.head * tokens * (3 + work.learned),
            )
        )
    return fill, walk


def passes(work: ModelWork, tokens: int, total: int, kept: Kept | None = None) -> list[tuple[float, float]]:
    """Linear and attention FLOP of each chunk pass of a training step, in the order in which they run.

    total: 2 n - 1 for n chunks (the last runs once)
    """
    chunks = (total + 1) // 2
    length = math.ceil(tokens / chunks)
    bounds = [(i * length, min((i + 1) * length, tokens)) for i in range(chunks)]
    fill, walk = chunk_passes(work, bounds, kept or Kept())
    return [(p.linear + p.linear_back + p.head, p.attention + p.attention_back) for p in [*fill, *reversed(walk)]]


class StepClock:
    """Learns from the passes that are done how long the others take."""

    def __init__(self, work: Sequence[tuple[float, float]], before: Sequence[float] | None = None) -> None:
        """before: the seconds of each pass of an earlier step of the same shape"""
        self._work = work
        self._before = before if before is not None and len(before) == len(work) else None
        self.seconds: list[float] = []

    def tick(self, seconds: float) -> None:
        """One more pass is done; it took so long."""
        self.seconds.append(seconds)

    def remaining(self) -> float:
        """Seconds the other passes take."""
        return sum(self._predicted()[len(self.seconds) :])

    def whole(self) -> float:
        """Seconds of all passes."""
        return sum(self.seconds) + self.remaining()

    def _predicted(self) -> list[float]:
        done = len(self.seconds)
        if self._before is not None:
            passed = sum(self._before[:done])
            ratio = sum(self.seconds) / passed if passed > 0 else 1.0
            return [ratio * seconds for seconds in self._before]
        if not done:
            return [0.0] * len(self._work)
        turn = len(self._work) // 2  # where the walk begins
        known = min(done, turn) or done
        a, b = _speeds(self._work[:known], self.seconds[:known])
        predicted = [a * linear + b * attention for linear, attention in self._work]
        if done > turn:  # how the walk compares with what the fill promised
            ratio = sum(self.seconds[turn:]) / sum(predicted[turn:done])
            predicted = [ratio * seconds for seconds in predicted]
        return predicted


def _speeds(work: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds a linear and an attention FLOP take: least squares, drawn towards one speed for both."""
    one = sum(seconds) / sum(linear + attention for linear, attention in work)
    weight = PRIOR * len(work)
    mean_x = sum(x for x, _ in work) / len(work)
    mean_y = sum(y for _, y in work) / len(work)
    xx = sum(x * x for x, _ in work) + weight * mean_x**2
    yy = sum(y * y for _, y in work) + weight * mean_y**2
    xy = sum(x * y for x, y in work)
    xt = sum(x * t for (x, _), t in zip(work, seconds, strict=True)) + weight * mean_x**2 * one
    yt = sum(y * t for (_, y), t in zip(work, seconds, strict=True)) + weight * mean_y**2 * one
    determinant = xx * yy - xy * xy
    if determinant <= 0:
        return one, one
    a, b = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
    if b < 0:
        return xt / xx, 0.0
    return (0.0, yt / yy) if a < 0 else (a, b)
