"""Does a step fit, and how long does it take? One model on one machine, with everything else decided or left to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from torch import nn

from offload import HostOutOfMemory

from .config import ChunkConfig
from .eta import ModelWork
from .hf import Parts
from .kernels import why_plain
from .memory import Machine, Rooms, layer_bytes, process_bytes
from .optimizer_states import Optimizer
from .placement import Placement, chunk_length, keep_costs, place
from .probe import Profile
from .rates import Rates, Speeds, stated_speeds
from .step_plan import StepPlan
from .traffic import chunk_moves, kept_of, step_seconds

MOST_CHUNKS = 2**21  # a list of more would take long, and memory, for a step that takes years
PACKED = 0.53  # bytes of a weight in 4 bits, its scales included


@dataclass(frozen=True)
class Cut(Sequence[tuple[int, int]]):
    """Where chunks begin and end, however many there are."""

    tokens: int
    chunk: int

    def __len__(self) -> int:
        return -(-self.tokens // self.chunk)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        starts = range(0, self.tokens, self.chunk)[index]
        if isinstance(starts, range):
            return [(start, min(start + self.chunk, self.tokens)) for start in starts]
        return starts, min(starts + self.chunk, self.tokens)


@dataclass(frozen=True)
class Question:
    """machine: before the model is there; adapted: what learns over a frozen base, None: the base itself learns;
    quantized: the base's linear maps are in 4 bits; accumulation: batches whose gradients one step adds up
    """

    parts: Parts
    profile: Profile
    machine: Machine
    config: ChunkConfig
    tokens: int
    batch: int
    optimizer: Optimizer | None
    adapted: tuple[nn.Parameter, ...] | None
    quantized: bool
    accumulation: int

    @property
    def on_gpu(self) -> bool:
        return self.machine.device_free is not None

    @cached_property
    def learning(self) -> tuple[nn.Parameter, ...]:
        """What the optimizer updates."""
        return tuple(self.parts.causal.parameters()) if self.adapted is None else self.adapted

    @cached_property
    def state_bytes(self) -> int:
        """What the optimizer keeps between steps."""
        if self.optimizer is None:
            return 0
        tables = {id(m.weight) for m in self.parts.causal.modules() if isinstance(m, nn.Embedding)}
        return sum(self.optimizer.state_bytes(p, embedding=id(p) in tables) for p in self.learning)

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Bytes that are there between steps too."""
        weights = sum(p.nbytes for p in self.parts.causal.parameters())
        if self.quantized:  # peft holds what stays wide in float32
            packed = {id(m.weight) for m in self.parts.decoder.modules() if isinstance(m, nn.Linear)}
            weights = sum(
                int(PACKED * p.numel()) if id(p) in packed else p.numel() * max(p.element_size(), 4)
                for p in self.parts.causal.parameters()
            )
        if self.adapted is None:
            return {"weights": weights, "optimizer": self.state_bytes}
        return {"weights": weights, "adapters": sum(2 * p.nbytes for p in self.adapted) + self.state_bytes}

    @cached_property
    def left(self) -> Machine:
        """The machine once the model is there."""
        machine, fixed = self.machine, sum(self.fixed.values())
        if machine.device_free is None:
            host = machine.host_free
            return replace(machine, host_free=None if host is None else max(host - fixed, 0))
        return replace(machine, device_free=machine.device_free - fixed)

    def chunk_tokens(self, tokens: int) -> int:
        """Of a context of so many."""
        self.parts.causal.requires_grad_(self.adapted is None)
        length = chunk_length(
            self.config, self.parts, self.profile, tokens, batch=self.batch, train=True, machine=self.left
        )
        return min(length, tokens)

    def answer(self) -> tuple[StepPlan, Placement]:
        """All but the seconds, what would make it fit, and the longest context."""
        tokens, machine = self.tokens, self.left
        chunk = self.chunk_tokens(tokens)
        bounds = Cut(tokens, chunk)
        if len(bounds) > MOST_CHUNKS:
            raise ValueError(
                f"a context of {tokens:,} tokens is {len(bounds):,} chunks of {chunk:,}, at most {MOST_CHUNKS:,} are "
                "planned: shorten the context or make chunk_tokens larger"
            )

        def placed_on(config: ChunkConfig, machine: Machine) -> Placement:
            return place(
                config,
                self.parts,
                self.profile,
                bounds,
                batch=self.batch,
                chunk_tokens=chunk,
                train=True,
                machine=machine,
            )

        try:
            placed, obstacle = placed_on(self.config, machine), None
        except HostOutOfMemory as error:
            obstacle = str(error)
            endless = replace(machine, device_free=machine.device_free and 1 << 60, host_free=1 << 60)
            placed = placed_on(replace(self.config, gpu_kv_budget_bytes="auto", host_budget_bytes="auto"), endless)
        gpu, host = self._told(placed)
        if obstacle is None:
            obstacle = self._obstacle(gpu, host)
        found = StepPlan(
            gpu, host, self.accumulation * self.batch * tokens, chunk, len(bounds),
            kept_attention=len(placed.keep.attention), kept_layers=len(placed.keep.layers),
            kept=kept_of(placed, len(bounds)), budgets=_budgets(placed.room), obstacle=obstacle,
            plain=why_plain(self.config, self.profile, gpu=self.on_gpu),
        )  # fmt: skip
        return found, placed

    def fits(self) -> bool:
        return self.answer()[0].obstacle is None

    def _told(self, placed: Placement) -> tuple[dict[str, int], dict[str, int]]:
        pages, keep = placed.budget, placed.keep
        near = {**self.fixed, **placed.working, "pages": placed.near_bytes, "kept": placed.kept_bytes}
        near["update"] = self._update(near)
        far = {"pages": pages.host_bytes, "kept": keep.host_bytes}
        if self.on_gpu:
            return near, far
        both = {name: near.get(name, 0) + far.get(name, 0) for name in near}
        return {}, {"process": process_bytes()} | both

    def _update(self, near: dict[str, int]) -> int:
        """What AdamW over all parameters at once (on a GPU) takes beyond what is there during the passes."""
        if not self.on_gpu or not self.state_bytes or self.adapted is not None:
            return 0
        passing = sum(near.values()) - sum(near[name] for name in ("weights", "optimizer", "gradients"))
        return max(near["weights"] - passing, 0)

    def _obstacle(self, gpu: dict[str, int], host: dict[str, int]) -> str | None:
        asked = [(host, "of host memory, there are" if self.on_gpu else "of memory, there are", self.machine.host_free)]
        if self.on_gpu:
            asked.insert(0, (gpu, "on the GPU, it has", self.machine.device_free))
        for parts, where, room in asked:
            need = sum(size for name, size in parts.items() if name != "process")
            if room is not None and need > room:
                return f"{need:,} bytes are needed {where} {room:,}"
        return None

    def seconds(
        self, speeds: Rates | Callable[[int], Speeds | None], found: StepPlan, placed: Placement
    ) -> float | None:
        """Of a step, its optimizer included; None where speeds are not known."""
        c, facts = self.config, list(self.profile.layers.values())
        read = (c.top_k_pages + c.recent_pages + c.sink_pages) * c.page_tokens if c.attention == "sparse" else None
        work = ModelWork.of(self.parts.causal, read)
        known: Speeds | None
        if not isinstance(speeds, Rates):
            known = speeds(found.chunk_tokens)
        elif found.plain is not None:  # rates are those of the kernels
            known = None
        else:
            each = layer_bytes(self.parts.decoder, self.profile)
            head_dim = max(f.head_dim for f in facts)
            known = stated_speeds(speeds, work, layer_bytes=each, head_dim=head_dim, sparse=read is not None)
        if known is None:
            return None
        bounds = list(Cut(self.tokens, found.chunk_tokens))
        costs = keep_costs(self.parts, self.profile, self.batch, layered=placed.layered)
        moves = chunk_moves(c, self.profile, placed, costs, bounds)
        learning = sum(p.numel() for p in self.learning)
        return step_seconds(
            work, bounds, placed, moves, known,
            batch=self.batch, learning=learning, accumulation=self.accumulation,
        )  # fmt: skip


def _budgets(room: Rooms) -> dict[str, int]:
    """What the plan decided, as settings; a budget of nothing is one byte there."""
    budgets = {"gpu_keep_budget_bytes": room.device_kept, "host_budget_bytes": max(room.host, 1)}
    if room.device_pages is not None:
        budgets["gpu_kv_budget_bytes"] = max(room.device_pages, 1)
    return budgets
