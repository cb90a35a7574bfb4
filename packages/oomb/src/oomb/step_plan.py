"""What a step will take: the answer of `oomb plan`, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .config import ChunkConfig
from .eta import Kept


@dataclass(frozen=True)
class StepPlan:
    """What a step will take. Where there is an obstacle the parts and the seconds are of no use.

    gpu: bytes by part, everything alive at the step's peak, empty for a step on a CPU; host: the pinned arena, on a
    CPU everything. kept_attention, kept_layers: of so many chunks. seconds: of a step, its optimizer included, or None
    where no speeds are known. longest: tokens of the longest context that fits; plain: why attention is computed in
    plain torch on a GPU, or None; obstacle: why it does not fit, or None; remedies: what would make it fit
    """

    gpu: dict[str, int]
    host: dict[str, int]
    tokens: int
    chunk_tokens: int
    chunks: int
    longest: int = 0
    kept_attention: int = 0
    kept_layers: int = 0
    kept: Kept = field(default_factory=Kept)
    budgets: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    plain: str | None = None
    obstacle: str | None = None
    remedies: tuple[str, ...] = ()

    def follow(self, config: ChunkConfig) -> ChunkConfig:
        """The config with everything "auto" replaced by what the plan decided."""
        decided: dict[str, Any] = {"chunk_tokens": self.chunk_tokens} | self.budgets
        return replace(config, **{name: value for name, value in decided.items() if getattr(config, name) == "auto"})

    def lines(self) -> list[str]:
        """The plan as a table."""
        rows = [f"{'chunks':28s} {self.chunks} of {self.chunk_tokens:,} tokens"]
        rows.append(f"{'walk back':28s} {'layer by layer' if self.kept.layer_by_layer else 'whole chunks'}")
        if self.plain is not None:
            rows.append(f"{'attention':28s} in plain torch, many times slower: {self.plain}")
        if self.obstacle is not None:
            rows.append(f"{'does not fit':28s} {self.obstacle}")
            return rows + [f"{'would fit':28s} {remedy}" for remedy in self.remedies]
        rows.append(f"{'attention kept of':28s} {self.kept_attention} chunks, layers of {self.kept_layers}")
        for where, parts in (("GPU", self.gpu), ("host", self.host)):
            rows += [f"{where + ', ' + name:28s} {_shown(size)}" for name, size in parts.items() if size]
            if any(parts.values()):
                rows.append(f"{where + ', in all':28s} {_shown(sum(parts.values()))}")
        if self.seconds is not None:
            rows.append(f"{'a step':28s} {self.seconds:9.1f} s, {self.tokens / self.seconds:,.0f} tokens a second")
        rows.append(f"{'longest context here':28s} {self.longest:,} tokens")
        return rows


def _shown(size: int) -> str:
    return f"{size / 2**30:9.2f} GiB" if size >= 2**27 else f"{size / 2**20:9.2f} MiB"
