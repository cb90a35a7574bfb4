"""How long a step still takes: a chunk costs more the further back it looks, and the walk more than the fill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WALK_LINEAR, WALK_ATTENTION = 3.0, 3.5  # of a forward pass: recomputed forward and backward
PRIOR = 0.01  # weight of "linear and attention run at one speed" against what was measured


@dataclass(frozen=True)
class ModelWork:
    """Floating-point operations of one forward pass.

    Units:  linear in FLOP a token; attention in FLOP a query-key pair, over all layers
    windows: for each layer, how many tokens it looks back at most; None for all
    """

    linear: float
    attention: float
    windows: tuple[int | None, ...]

    @staticmethod
    def of(model: Any, pages_tokens: int | None = None) -> ModelWork:
        """Read off a model. pages_tokens: what sparse attention reads at most, in layers without a window"""
        config = model.config.get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        parameters = sum(p.numel() for p in model.parameters() if p.ndim > 1)
        embeddings = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not embeddings:
            parameters -= embeddings.numel()  # looked up, not multiplied
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        if experts:
            routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
            parameters -= routed * (1 - config.num_experts_per_tok / experts)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        window = getattr(config, "sliding_window", None)
        windows = tuple(window if kind == "sliding_attention" else pages_tokens for kind in kinds)
        return ModelWork(2.0 * parameters, 4.0 * heads * head_dim, windows)

    def pairs(self, start: int, stop: int) -> float:
        """Query-key pairs of the tokens [start, stop), over all layers."""

        def seen(limit: int | None) -> float:
            if limit is None or stop <= limit:
                return (start + stop + 1) / 2 * (stop - start)
            if start >= limit:
                return float(limit * (stop - start))
            return (start + limit + 1) / 2 * (limit - start) + limit * (stop - limit)

        return sum(seen(limit) for limit in self.windows)

    def forward(self, tokens: int) -> float:
        """FLOP of one forward pass over a sequence, for reckoning utilization: three of them are a step."""
        return self.linear * tokens + self.attention * self.pairs(0, tokens)


def passes(work: ModelWork, tokens: int, total: int) -> list[tuple[float, float]]:
    """Linear and attention FLOP of each chunk pass, in the order in which they run.

    total: 2 n - 1 for a training step of n chunks (the last runs once), n for an evaluation
    """
    chunks = (total + 1) // 2 if total % 2 else total
    length = math.ceil(tokens / chunks)
    bounds = [(i * length, min((i + 1) * length, tokens)) for i in range(chunks)]
    forward = [(work.linear * (b - a), work.attention * work.pairs(a, b)) for a, b in bounds]
    walk = [(WALK_LINEAR * linear, WALK_ATTENTION * attention) for linear, attention in reversed(forward)]
    return forward[:-1] + walk


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
