"""The two entry points: a loss whose backward walks the chunks, and both passes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward
from offload import Shelf

from .batch import Batch, Chunks, prepare
from .config import ChunkConfig
from .held import Held
from .hf import Parts, Unsupported, attention_installed, refuse_autocast_of_one_call, refuse_places, take_apart
from .host import HostLease, refuse_fork_with_threads
from .loss import TokenLoss, cross_entropy
from .main_grads import main_grads
from .memory import Machine
from .moe import Balance
from .placement import chunk_length, place
from .probe import Profile, learned_positions, probe, refuse_dropout, structure
from .replay import Replay
from .rope import HeldRope
from .selection import Selection
from .step import DecoderStep, PassContext, prefetch_kept, reentrant_checkpointing
from .storage import TieredPast

PROFILE = "_oomb_profile"


def chunked_loss(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    num_items: float | Tensor | None = None,
    loss_fn: TokenLoss | None = None,
    config: ChunkConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The loss of a causal LM on sequences far longer than a chunk; `.backward()` gives the exact dense gradient.

    Shapes: input_ids, labels, attention_mask, document_ids [B, T]; position_ids [B, T] or [1, T]; loss 0-dim
    Units:  the loss is the sum over valid labels divided by `num_items` (default: their number)
    labels: as transformers has them: shifted inside, -100 ignored; default `input_ids`, padding ignored
    document_ids: packed documents, one run of neighbouring tokens each; they do not see each other, and a label that
            crosses a boundary is ignored. Positions restart with each document unless `position_ids` says otherwise;
            without document_ids, jumps in `position_ids` are boundaries
    loss_fn: (logits [N, V], labels [N]) -> [N], per token, instead of cross-entropy
    progress: called with (chunk passes done, in all)
    Returns: the loss. Without gradients (`torch.no_grad`, nothing trainable) it runs forward only
    Raises: ValueError before anything has run, for input or a model that cannot be honoured exactly
    """
    run = _prepare(
        model, input_ids, labels, attention_mask, position_ids, document_ids, num_items, loss_fn, config, progress
    )
    trainable = [p for p in run.parts.causal.parameters() if p.requires_grad]
    return chunk_recurrent(run.step(fill_loss=True), run.chunks, run.state(), params=trainable, around=run.around)


def chunked_backward(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    num_items: float | Tensor | None = None,
    loss_fn: TokenLoss | None = None,
    config: ChunkConfig | None = None,
    scale: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Both passes at once: `.grad` of the parameters receives `scale` times the gradient of `chunked_loss`.

    The fill skips what the gradient does not need (the head; what follows the last layer's keys and values).

    Shapes: as `chunked_loss`
    Returns: the detached loss, unscaled
    Raises: as `chunked_loss`
    """
    run = _prepare(
        model, input_ids, labels, attention_mask, position_ids, document_ids, num_items, loss_fn, config, progress
    )
    if not run.training:
        with torch.no_grad():
            return chunk_recurrent(run.step(fill_loss=True), run.chunks, run.state(), params=(), around=run.around)
    return chunk_recurrent_backward(run.step(fill_loss=False), run.chunks, run.state(), scale=scale, around=run.around)


@dataclass
class _Run:
    parts: Parts
    profile: Profile
    batch: Batch
    chunks: Chunks
    config: ChunkConfig
    token_loss: TokenLoss
    past: TieredPast
    context: PassContext
    rope: HeldRope
    held: Held
    training: bool
    progress: Callable[[int, int], None] | None

    def state(self) -> State:
        return State(stores=(self.past,))

    def step(self, *, fill_loss: bool) -> DecoderStep:
        balance = None if self.profile.router is None else Balance(self.profile.router)
        self.context.skip_tail = not fill_loss and balance is None
        n = len(self.chunks)
        steps = 2 * n - 1 if self.training else n  # the last chunk runs once
        return DecoderStep(
            self.parts, self.context, self.batch, self.chunks, self.token_loss, fill_loss, steps, self.progress, balance
        )

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """What holds during a pass and not between passes: our attention, the rotary frequencies, fp32 gradients."""
        if phase == "walk":
            self.past.lease.refuse_fork()
            self.held.check(self.parts.causal)
        with ExitStack() as stack:
            stack.enter_context(attention_installed(self.parts.causal))
            if self.context.replay is not None:
                stack.enter_context(self.context.replay.installed())
            stack.enter_context(self.rope.installed())
            if phase == "walk" and self.config.fp32_main_grads:
                stack.enter_context(main_grads(self.parts.causal.parameters()))
            yield


def _prepare(
    model, input_ids, labels, attention_mask, position_ids, document_ids, num_items, loss_fn, config, progress
) -> _Run:
    config = ChunkConfig() if config is None else config
    if not isinstance(config, ChunkConfig):
        raise ValueError(f"config must be a ChunkConfig, got {type(config).__name__}")
    refuse_fork_with_threads()
    parts = take_apart(model)
    refuse_places(parts)
    refuse_autocast_of_one_call(parts)
    if parts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph is being captured: a chunked step waits for the device and moves memory to and from the "
            "host, which a graph cannot hold; call it outside of the capture"
        )
    batch = prepare(
        input_ids,
        vocab_size=parts.vocab_size,
        label_size=parts.label_size,
        labels=labels,
        attention_mask=attention_mask,
        position_ids=position_ids,
        document_ids=document_ids,
        num_items=num_items,
    )
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function (logits [N, V], labels [N]) -> [N], got {type(loss_fn).__name__}")
    last_position = int(batch.positions.max())
    if last_position >= learned_positions(parts.decoder):
        raise ValueError(
            f"the model has learned embeddings for {learned_positions(parts.decoder)} positions, the sequence needs "
            f"{last_position + 1}"
        )
    if config.fp32_main_grads and isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "fp32_main_grads and DDP do not go together: DDP reduces .grad before the sum over chunks is in it"
        )
    refuse_dropout(parts.causal)
    profile = profile_of(parts, batch.tokens)
    if profile.router is not None and torch.is_grad_enabled() and reentrant_checkpointing(parts.decoder):
        raise Unsupported(
            "reentrant activation checkpointing hides the router's logits from the load-balancing loss: enable "
            'checkpointing with {"use_reentrant": False}, or set output_router_logits=False'
        )
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    training = records and any(p.requires_grad for p in parts.causal.parameters())
    machine = Machine.now(parts.device)
    rows, tokens = batch.ids.shape
    chunks = batch.cut(chunk_length(config, parts, profile, tokens, batch=rows, train=training, machine=machine))
    rope = HeldRope(parts.decoder, last_position)
    held = Held.of(parts.causal, profile.touched)
    # last of all: what fails before holds no host memory
    past, context = _storage(parts, profile, batch, chunks, config, training=training, machine=machine)
    token_loss = loss_fn or cross_entropy
    return _Run(parts, profile, batch, chunks, config, token_loss, past, context, rope, held, training, progress)


def profile_of(parts: Parts, tokens: int) -> Profile:
    """The model's profile, probed once per configuration and (power of two of) length, kept on the model."""
    device = parts.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    weight = parts.causal.get_input_embeddings().weight
    length = max(64, 1 << (tokens - 1).bit_length())
    key = (parts.causal.config.to_json_string(), structure(parts.given), str(device), weight.dtype, autocast, length)
    cached = getattr(parts.causal, PROFILE, None)
    if cached is None or cached[0] != key:
        cached = (key, probe(parts, length))
        setattr(parts.causal, PROFILE, cached)
    return cached[1]


def _storage(
    parts: Parts,
    profile: Profile,
    batch: Batch,
    chunks: Chunks,
    config: ChunkConfig,
    *,
    training: bool,
    machine: Machine,
) -> tuple[TieredPast, PassContext]:
    """Decide what lives where, then take the memory."""
    bounds = [chunks.bounds(i) for i in range(len(chunks))]
    rows = batch.ids.shape[0]
    placed = place(
        config,
        parts,
        profile,
        bounds,
        batch=rows,
        chunk_tokens=chunks.chunk_tokens,
        train=training,
        machine=machine,
    )
    lease = HostLease(placed.host_bytes, parts.device)
    selection = Selection(config, -(-bounds[-1][1] // config.page_tokens), profile.layers, lease.lanes)
    past = TieredPast(
        profile.layers,
        bounds,
        batch=rows,
        page_tokens=config.page_tokens,
        grad_dtype=placed.grad_dtype,
        budget=placed.budget,
        segment_tokens=config.segment_tokens,
        check=config.check_recompute,
        lease=lease,
        lists=selection,
    )
    past.shelf = Shelf(lease.lanes, lease.arena, device_bytes=placed.keep.device_bytes)
    context = PassContext(past, profile, config, past.shelf, placed.keep.attention, selection)
    if placed.layered:
        assert profile.stack is not None
        layers = [parts.decoder.get_submodule(name) for name in profile.stack.names]
        context.replay = Replay(layers, past.shelf, placed.keep.layers, prefetch_kept(past.shelf, profile.layers))
    return past, context
