"""What a step will take, in memory and in time, told from a model's config alone."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from offload import HostOutOfMemory

from .config import ChunkConfig
from .eta import Kept, ModelWork
from .hf import Parts, take_apart
from .memory import HOST_SHARE, Machine, Rooms, layer_bytes, process_bytes, rooms
from .placement import LEAST_CHUNK, Placement, chunk_length, keep_costs, place, working_total
from .probe import Profile, learned_positions, outline
from .quiet import quiet
from .rates import Rates, Speeds, stated_speeds
from .traffic import chunk_moves, kept_of, step_seconds

MOST_CHUNKS = 2**21  # a list of more would take long, and memory, for a step that takes years
SMALL_STATES = 2.03  # bytes a parameter of an 8-bit AdamW


@dataclass(frozen=True)
class StepPlan:
    """What a step will take. Where there is an obstacle the parts and the seconds are of no use.

    gpu: bytes by part, everything alive at the step's peak, empty for a step on a CPU; host: the pinned arena, on a
    CPU everything. kept_attention, kept_layers: of so many chunks. seconds: of a step, its optimizer included, or None
    where no speeds are known. longest: tokens of the longest context that fits; page_bytes: of a page of all layers,
    its gradients too. obstacle: why it does not fit, or None; remedies: what would make it fit
    """

    gpu: dict[str, int]
    host: dict[str, int]
    tokens: int
    chunk_tokens: int
    chunks: int
    longest: int
    page_bytes: int
    kept_attention: int = 0
    kept_layers: int = 0
    kept: Kept = field(default_factory=Kept)
    budgets: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
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


def plan(
    model_config: PretrainedConfig,
    context_tokens: int,
    *,
    config: ChunkConfig | None = None,
    batch: int = 1,
    accumulation: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    optimizer_bytes: float = 0.0,
    adapters: bool = False,
    adapter_rank: int = 16,
    quantized: bool = False,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    device: torch.device | str | None = None,
    speeds: Rates | Callable[[int], Speeds | None] | None = None,
) -> StepPlan:
    """Will a training step of the whole model fit, in how much memory, and how long will it take?

    What is "auto" is resolved as a step on such a machine would resolve it; no weights are needed.
    accumulation: batches whose gradients one step adds up. autocast: what is computed in over wider weights.
    adapters: the base is frozen, LoRA of `adapter_rank` on every
    linear layer learns; quantized: the base in 4 bits. device: "cpu" for a step there; default: a GPU of `gpu_bytes`,
    or this machine's device. speeds: rates that are stated, or a function of the chunk's length that measures
    (`calibration.calibrate`); None: no seconds
    Units:  optimizer_bytes of state a parameter that learns; gpu_bytes, host_bytes: memory of the machine (None:
        what is free here)
    Raises: ValueError for a length or a size that is not positive, and a config that makes no model; Unsupported for a
        model that cannot be run in chunks
    """
    config = ChunkConfig() if config is None else config
    for name, value in (
        ("context_tokens", context_tokens),
        ("batch", batch),
        ("accumulation", accumulation),
        ("adapter_rank", adapter_rank),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    for name, size in (("gpu_bytes", gpu_bytes), ("host_bytes", host_bytes)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be a positive number of bytes, got {size!r}")
    if device is None:
        device = "cuda" if gpu_bytes or torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and gpu_bytes is None and not torch.cuda.is_available():
        raise ValueError("there is no GPU here: say for how large a one to plan (gpu_bytes)")
    here = Machine.now(device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu"))
    if device.type == "cpu":
        machine = Machine(None, 0, host_bytes or here.host_free)
    else:
        total = gpu_bytes or here.device_total
        machine = Machine(total if gpu_bytes else here.device_free, total, host_bytes or here.host_free)
    with torch.device("meta"), quiet():
        try:
            model = AutoModelForCausalLM.from_config(_still(model_config), dtype=dtype)
        except Exception as error:  # whatever a library's constructor makes of sizes that contradict each other
            raise ValueError(f"no model can be made from this config: {type(error).__name__}: {error}") from error
    parts = take_apart(model.train())
    profile = _under_autocast(outline(parts, context_tokens), autocast)
    question = _Question(
        parts,
        profile,
        machine,
        config,
        context_tokens,
        batch,
        autocast,
        optimizer_bytes,
        adapters,
        adapter_rank,
        quantized,
        accumulation,
    )
    found = question.answer(speeds)
    return found if found.obstacle is None else replace(found, remedies=tuple(_remedies(question, found)))


def _shown(size: int) -> str:
    return f"{size / 2**30:9.2f} GiB" if size >= 2**27 else f"{size / 2**20:9.2f} MiB"


def _still(model_config: PretrainedConfig) -> PretrainedConfig:
    """The config with rotary frequencies that look at no position: there are none without weights."""
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return model_config
    still = copy.deepcopy(model_config)
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    still.get_text_config().rope_parameters = {"rope_type": "default"} | theta
    return still


def _under_autocast(profile: Profile, autocast: torch.dtype | None) -> Profile:
    """Attention computes in the dtype of autocast; what layers hand on stays as wide as the weights."""
    if autocast is None:
        return profile
    return replace(profile, layers={i: replace(facts, dtype=autocast) for i, facts in profile.layers.items()})


@dataclass(frozen=True)
class _Question:
    parts: Parts
    profile: Profile
    machine: Machine  # before the model is there
    config: ChunkConfig
    tokens: int
    batch: int
    autocast: torch.dtype | None
    optimizer_bytes: float
    adapters: bool
    adapter_rank: int
    quantized: bool
    accumulation: int

    def fixed(self) -> dict[str, int]:
        """Bytes that are there between steps too."""
        model = self.parts.causal
        count = sum(p.numel() for p in model.parameters())
        linear = [m for m in self.parts.decoder.modules() if isinstance(m, nn.Linear)]
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if self.quantized:
            packed = sum(m.weight.numel() for m in linear)
            weights -= sum(m.weight.numel() * m.weight.element_size() for m in linear) - int(0.53 * packed)
        if not self.adapters:
            return {"weights": weights, "optimizer": int(count * self.optimizer_bytes)}
        learning = self.learning()  # float32 weights and gradients, and states to match
        return {"weights": weights, "adapters": int(learning * (8 + self.optimizer_bytes))}

    def learning(self) -> int:
        """Parameters that the optimizer updates."""
        if not self.adapters:
            return sum(p.numel() for p in self.parts.causal.parameters())
        linear = [m for m in self.parts.decoder.modules() if isinstance(m, nn.Linear)]
        return self.adapter_rank * sum(m.in_features + m.out_features for m in linear)

    def left(self, fixed: int) -> Machine:
        """The machine once the model is there."""
        machine = self.machine
        if machine.device_free is None:
            host = machine.host_free
            return replace(machine, host_free=None if host is None else max(host - fixed, 0))
        return replace(machine, device_free=machine.device_free - fixed)

    def answer(self, speeds: Rates | Callable[[int], Speeds | None] | None) -> StepPlan:
        parts, profile, config, batch, tokens = self.parts, self.profile, self.config, self.batch, self.tokens
        parts.causal.requires_grad_(not self.adapters)
        fixed = self.fixed()
        machine = self.left(sum(fixed.values()))
        chunk = chunk_length(config, parts, profile, tokens, batch=batch, train=True, machine=machine)
        chunk = min(chunk, tokens)
        if tokens > MOST_CHUNKS * chunk:
            raise ValueError(
                f"a context of {tokens:,} tokens is {-(-tokens // chunk):,} chunks of {chunk:,}, at most "
                f"{MOST_CHUNKS:,} are planned: shorten the context or make chunk_tokens larger"
            )
        bounds = [(i, min(i + chunk, tokens)) for i in range(0, tokens, chunk)]

        def placed_on(machine: Machine) -> Placement:
            return place(config, parts, profile, bounds, batch=batch, chunk_tokens=chunk, train=True, machine=machine)

        try:
            placed, obstacle = placed_on(machine), None
        except HostOutOfMemory as error:
            obstacle = str(error)
            placed = placed_on(replace(machine, device_free=machine.device_free and 1 << 60, host_free=1 << 60))
        gpu, host = self._told(fixed, placed)
        if obstacle is None:
            obstacle = self._obstacle(gpu, host)
        longest = self._longest(machine, placed.page_bytes)
        if obstacle is None:  # a chunk of its own length is the context's, whatever longer ones would take
            longest = max(longest, tokens)
        kept = kept_of(placed, len(bounds))
        result = StepPlan(
            gpu, host, self.accumulation * batch * tokens, chunk, len(bounds), longest, placed.page_bytes,
            len(placed.keep.attention), len(placed.keep.layers), kept, _budgets(placed.room), obstacle=obstacle,
        )  # fmt: skip
        if speeds is None or obstacle is not None:
            return result
        return replace(result, seconds=self._seconds(speeds, placed, bounds, chunk))

    def _told(self, fixed: dict[str, int], placed: Placement) -> tuple[dict[str, int], dict[str, int]]:
        pages, keep = placed.budget, placed.keep
        near = {**fixed, **placed.working, "pages": placed.near_bytes, "kept": placed.kept_bytes}
        near["update"] = self._update(near)
        far = {"pages": pages.host_bytes, "kept": keep.host_bytes}
        if self.machine.device_free is not None:
            return near, far
        both = {name: near.get(name, 0) + far.get(name, 0) for name in near}
        return {}, {"process": process_bytes()} | both

    def _update(self, near: dict[str, int]) -> int:
        """What AdamW over all parameters at once (on a GPU) takes beyond what is there during the passes."""
        if self.machine.device_free is None or not self.optimizer_bytes or self.adapters:
            return 0
        passing = sum(near.values()) - sum(near[name] for name in ("weights", "optimizer", "gradients"))
        return max(near["weights"] - passing, 0)

    def _obstacle(self, gpu: dict[str, int], host: dict[str, int]) -> str | None:
        on_gpu = self.machine.device_free is not None
        asked = [(host, "of host memory, there are" if on_gpu else "of memory, there are", self.machine.host_free)]
        if on_gpu:
            asked.insert(0, (gpu, "on the GPU, it has", self.machine.device_free))
        for parts, where, room in asked:
            need = sum(size for name, size in parts.items() if name != "process")
            if room is not None and need > room:
                return f"{need:,} bytes are needed {where} {room:,}"
        return None

    def _longest(self, machine: Machine, page_bytes: int) -> int:
        """Tokens whose past fits, in chunks as a context of that length would have them; the last chunk is nobody's."""
        config, longest, found = self.config, 0, self.tokens
        on_gpu = machine.device_free is not None
        if not on_gpu and config.gpu_kv_budget_bytes == "auto":
            config = replace(config, gpu_kv_budget_bytes=1)  # pages are where all is: what would go to the host

        def working(tokens: int) -> int:
            return working_total(self.config, self.parts, self.profile, tokens, chunk, self.batch, True, gpu=on_gpu)

        while found != longest:  # summaries and buffers take more for a longer one, and leave less
            longest = found
            chunk = chunk_length(
                self.config, self.parts, self.profile, longest, batch=self.batch, train=True, machine=machine
            )
            if on_gpu and machine.room() < working(longest):
                return bisect.bisect_right(range(1, chunk), machine.room(), key=working)  # less than one whole chunk
            room = rooms(config, machine, working=working(longest), page_bytes=1 << 60)
            near, far = room.device_pages or 0, room.host  # set by hand they may be more than there is
            free = 1 << 62 if machine.host_free is None else machine.host_free
            if on_gpu:
                near, far = min(near, machine.room() - working(longest)), min(far, free)
            else:
                left = max(int(HOST_SHARE * free) - working(longest), 0)
                near = min(near, left)
                far = min(far, left - near)
            pages = near // page_bytes + far // page_bytes
            found = pages * config.page_tokens // chunk * chunk + chunk
            found = min(found, longest) if longest != self.tokens else found
        return min(longest, learned_positions(self.parts.decoder))

    def _seconds(
        self,
        speeds: Rates | Callable[[int], Speeds | None],
        placed: Placement,
        bounds: list[tuple[int, int]],
        chunk: int,
    ) -> float | None:
        c, facts = self.config, list(self.profile.layers.values())
        read = (c.top_k_pages + c.recent_pages + c.sink_pages) * c.page_tokens if c.attention == "sparse" else None
        work = ModelWork.of(self.parts.causal, read)
        found: Speeds | None
        if isinstance(speeds, Rates):
            each = layer_bytes(self.parts.decoder, self.profile)
            head_dim = max(f.head_dim for f in facts)
            found = stated_speeds(speeds, work, layer_bytes=each, head_dim=head_dim, sparse=read is not None)
        else:
            found = speeds(chunk)
        if found is None:
            return None
        costs = keep_costs(self.parts, self.profile, self.batch, layered=placed.layered)
        moves = chunk_moves(c, self.profile, placed, costs, bounds)
        return step_seconds(
            work, bounds, placed, moves, found,
            batch=self.batch, learning=self.learning(), accumulation=self.accumulation,
        )  # fmt: skip


def _budgets(room: Rooms) -> dict[str, int]:
    """What the plan decided, as settings; a budget of nothing is one byte there."""
    budgets = {"gpu_keep_budget_bytes": room.device_kept, "host_budget_bytes": max(room.host, 1)}
    if room.device_pages is not None:
        budgets["gpu_kv_budget_bytes"] = max(room.device_pages, 1)
    return budgets


_Change = Callable[["_Question"], "_Question"]


def _remedies(question: _Question, found: StepPlan) -> list[str]:
    """Single changes that would make it fit, or else several together; more memory; a shorter context."""

    def fits(*changes: _Change) -> bool:
        changed = question
        for change in changes:
            changed = change(changed)
        return changed.answer(None).obstacle is None

    changes = dict(_changes(question))
    fitting = [name for name, change in changes.items() if fits(change)]
    if not fitting and len(changes) > 1 and fits(*changes.values()):
        fitting = [", ".join(changes)]
    pages = -(-max(question.tokens - found.longest + found.chunk_tokens, 0) // question.config.page_tokens)
    more = math.ceil(pages * found.page_bytes / HOST_SHARE / 2**30)
    host = (question.machine.host_free or 0) + more * 2**30
    if fits(lambda q: replace(q, machine=replace(q.machine, host_free=host))):
        fitting.append(f"{more:,} GiB more of host memory")
    if LEAST_CHUNK <= found.longest < question.tokens and fits(lambda q: replace(q, tokens=found.longest)):
        fitting.append(f"a context of {found.longest:,} tokens")
    question.parts.causal.requires_grad_(not question.adapters)
    return fitting or ["nothing that is known here"]


def _changes(question: _Question) -> Iterator[tuple[str, _Change]]:
    config = question.config
    if config.chunk_tokens != "auto" and config.chunk_tokens > LEAST_CHUNK:
        yield "chunk_tokens: auto", lambda q: replace(q, config=replace(q.config, chunk_tokens="auto"))
    if config.host_budget_bytes != "auto":
        yield "host_budget_bytes: auto", lambda q: replace(q, config=replace(q.config, host_budget_bytes="auto"))
    if config.grad_page_dtype is None:
        yield (
            "grad_page_dtype: bfloat16",
            lambda q: replace(q, config=replace(q.config, grad_page_dtype=torch.bfloat16)),
        )
    if question.optimizer_bytes > SMALL_STATES and not question.adapters:
        yield "optim: adamw_8bit", lambda q: replace(q, optimizer_bytes=SMALL_STATES)
    if not question.adapters:
        yield "adapter: lora", lambda q: replace(q, adapters=True)
