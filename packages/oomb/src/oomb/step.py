"""One chunk of a Hugging Face model: what the recurrence calls, and what attention finds on its way through the
layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

from offload import Shelf
from paged_kv import paged_attention

from .batch import Batch, Chunk, Chunks, to_device
from .config import ChunkConfig
from .hf import Parts, Unsupported
from .loss import Head, TokenLoss, tiled_loss
from .moe import Balance
from .probe import Profile, layer_index
from .replay import Replay
from .selection import Selection
from .storage import TieredPast


class _TailSkipped(Exception):
    """Raised after the last layer's keys and values are stored: the fill needs nothing that follows."""


@dataclass
class PassContext:
    """What one loss's attention calls need; travels through the model's keywords.

    `kept_chunks`: whose attention outputs the shelf keeps from the first time on; `replay`: the layers' stand-ins.
    Shapes: documents [B, C] int, real [B, C] bool, or None
    """

    past: TieredPast
    profile: Profile
    config: ChunkConfig
    shelf: Shelf
    kept_chunks: range
    selection: Selection
    replay: Replay | None = None
    index: int = 0
    phase: str = "fill"
    skip_tail: bool = False
    documents: Tensor | None = None
    real: Tensor | None = None
    first_token: int = 0
    calls: Counter = field(default_factory=Counter)

    def begin(self, index: int, phase: str, documents: Tensor | None, real: Tensor | None, first_token: int) -> None:
        self.index, self.phase, self.documents, self.real, self.first_token = index, phase, documents, real, first_token
        self.calls.clear()
        if phase == "walk":  # what frozen layers never took back belongs to chunks that are done
            self.shelf.drop_where(lambda key: key[-2] > index)
            self.selection.begin_walk(index, len(self.past.bounds) - 1)
        if self.replay is not None:
            self.replay.begin(index)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: object, scale: float, sinks: Tensor | None
    ) -> Tensor:
        layer = layer_index(module)
        facts = self.profile.layers.get(layer)
        seen = (q.shape[2], k.shape[2], k.shape[3], k.dtype)
        if facts is None or seen != (facts.heads, facts.kv_heads, facts.head_dim, facts.dtype):
            raise Unsupported(
                f"layer {layer} attends with heads, KV heads, head dim and dtype {seen}, the probe saw {facts}"
            )
        self.calls[layer] += 1
        if self.phase == "fill":
            self.past.append(layer, k.detach(), v.detach())
        else:
            self.past.compare(layer, k, v)
        selected = self.selection.choose(self.index, layer, q, k, self.past.start, self.real, self.documents)
        if self.skip_tail and self.phase == "fill" and self.calls.total() == len(self.profile.layers):
            raise _TailSkipped
        return paged_attention(
            q,
            k,
            v,
            self.past,
            layer,
            scale=scale,
            window=facts.window,
            sinks=sinks,
            documents=self.documents,
            first_token=self.first_token,
            selected=selected,
            kept=self._kept(layer),
            backend=self.config.backend,
            accumulate=self.config.accumulate,
        )

    def _kept(self, layer: int) -> _KeptOutputs | None:
        # the last layer of a replayed chunk runs once, with its graph
        if self.index not in self.kept_chunks or (self.replay is not None and layer == list(self.profile.layers)[-1]):
            return None
        return _KeptOutputs(self.shelf, self.index)


def prefetch_kept(shelf: Shelf, layers: Iterable[int]) -> Callable[[int, int], None]:
    """A function of (chunk, place) that begins to fetch the attention output of the layer at that place, if it is kept.

    Not a method of the context, which holds the replay: held by each other they would keep their tensors until a
    collection.
    layers: in the order of the decoder's calls
    """
    order = list(layers)

    def ahead(index: int, place: int) -> None:
        if place >= 0:
            shelf.prefetch(("attention", index, order[place]))

    return ahead


class _KeptOutputs:
    """One chunk's attention outputs, layer -> (out, lse), on a shelf."""

    def __init__(self, shelf: Shelf, index: int) -> None:
        self.shelf, self.index = shelf, index

    def __contains__(self, layer: int, /) -> bool:
        return ("attention", self.index, layer) in self.shelf

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]:
        out, lse = self.shelf.get(("attention", self.index, layer))
        return out, lse

    def __setitem__(self, layer: int, value: tuple[Tensor, Tensor], /) -> None:
        self.shelf.put(("attention", self.index, layer), value)

    def __delitem__(self, layer: int, /) -> None:
        self.shelf.drop(("attention", self.index, layer))


@dataclass
class DecoderStep:
    """`step(index, chunk, carried, phase)` of chunk_recur for a causal LM: decoder, loss, nothing carried.

    `fill_loss`: whether the fill computes losses too. `progress(done, steps)` is told after each of the `steps` chunks.
    """

    parts: Parts
    context: PassContext
    batch: Batch
    chunks: Chunks
    token_loss: TokenLoss
    fill_loss: bool
    steps: int
    progress: Callable[[int, int], None] | None = None
    balance: Balance | None = None
    done: int = 0

    def __call__(self, index: int, chunk: Chunk, carried: object, phase: str) -> tuple[Tensor | None, object]:
        device = self.parts.device
        documents = None if chunk.documents is None else to_device(chunk.documents, device)
        first_token = 0 if chunk.documents is None else int(chunk.documents.min())
        real = None if chunk.real is None else to_device(chunk.real, device)
        self.context.begin(index, phase, documents, real, first_token)
        ids, positions = to_device(chunk.ids, device), to_device(chunk.positions, device)
        try:
            output = self._decode(index, phase, ids, positions)
        except _TailSkipped:
            return self._tell(None, carried)
        if self.context.replay is None or phase == "fill":
            self._check_calls()
        loss = None
        if phase == "walk" or self.fill_loss:
            loss = tiled_loss(
                output.last_hidden_state,
                chunk.targets,
                Head(self.parts, self.context.profile.output_type),
                token_loss=self.token_loss,
                tile_tokens=self.context.config.loss_tile_tokens,
                vocab_size=self.parts.label_size,
            )
            loss = loss / self.batch.num_items
        return self._tell(self._with_balance(loss, index, phase, output, chunk.real), carried)

    def _tell(self, loss: Tensor | None, carried: object) -> tuple[Tensor | None, object]:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.steps)
        return loss, carried

    def _decode(self, index: int, phase: str, ids: Tensor, positions: Tensor):
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, "oomb": self.context}
        if self.balance is not None:
            inputs["output_router_logits"] = True
        given = self.parts.given
        if phase == "fill" or not isinstance(given, nn.parallel.DistributedDataParallel):
            return self.parts.decoder(**inputs)
        # DDP learns of a backward from its own forward; only the last chunk to walk back may reduce
        seen: list = []
        hook = self.parts.decoder.register_forward_hook(lambda _module, _args, output: seen.append(output))
        try:
            with given.no_sync() if index else nullcontext():
                given(**inputs, logits_to_keep=1)
        finally:
            hook.remove()
        return seen[0]

    def _check_calls(self) -> None:
        for layer in self.context.profile.layers:
            if self.context.calls[layer] != 1:
                raise Unsupported(
                    f"layer {layer} called attention {self.context.calls[layer]} times in one chunk, expected once"
                )

    def _with_balance(self, loss: Tensor | None, index: int, phase: str, output, real: Tensor | None) -> Tensor | None:
        """Add the chunk's part of the load-balancing loss: its whole value with the last chunk, gradients with each."""
        balance = self.balance
        if balance is None:
            return loss
        logits = output.router_logits
        last = index == len(self.chunks) - 1
        if phase == "fill" or last:
            balance.count(logits, real)
        coefficient = balance.router.coefficient
        if phase == "walk":
            part = balance.loss(logits, real)
            part = part - part.detach()  # gradient only
            assert loss is not None
            loss = loss + coefficient * part
        if last:
            assert loss is not None
            loss = loss + coefficient * balance.total()
        return loss


def reentrant_checkpointing(decoder: nn.Module) -> bool:
    """Whether any layer of a decoder in training is checkpointed in the way that runs its forward without grad."""
    functions = [
        module._gradient_checkpointing_func
        for module in decoder.modules()
        if module.training
        and getattr(module, "gradient_checkpointing", False)
        and hasattr(module, "_gradient_checkpointing_func")
    ]
    return any(getattr(function, "keywords", {}).get("use_reentrant", True) for function in functions)
