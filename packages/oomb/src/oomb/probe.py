"""Is this model exact in chunks? Asked of the model itself, on a few tokens, before any work starts.

A chunked run of a short sequence must give what the model's own attention gives on the whole of it. That catches
whatever
a list of architectures would miss: states besides keys and values, attention that is called twice or changed in some
way
we do not see, positions counted from the chunk's start. Masks are asked separately, since a window or a cut may only
show
at lengths the probe does not reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .choices import Choices
from .held import Touched
from .hf import ASKING, MaskSpec, Parts, Unsupported, attention_installed
from .layers import Stack, layer_stack
from .loss import Head, cross_entropy
from .masks import window_of
from .moe import Balance, Router, router_of
from .rope import HeldRope
from .unlaunched import unlaunched

PROBE_TOKENS = 24
PROBE_CHUNK = 7
WHOLE = "the decoder"
OUTLINED = 2**20  # tokens over which a plan asks a mask: windows are shorter, and each costs
# how far the model's own attention may be from ours on the whole probe, by the precision of the hidden states
NOISE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
FEWER_DIGITS = {"tf32": torch.float16, "bf16": torch.bfloat16}  # of float32 products, where torch may drop some
STATE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class LayerFacts:
    """What a layer's attention calls look like. Units: window in tokens, None for full causal attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True)
class Profile:
    """What a chunked step knows of a model. `layers` is in the order in which the decoder calls them.

    stack: the decoder's layers, if each hands its output, one tensor, on to the next untouched
    touched: parameters that forward passes count as written and leave as they are
    """

    layers: dict[int, LayerFacts]
    output_type: type
    router: Router | None
    stack: Stack | None
    touched: frozenset[str] = frozenset()


@dataclass
class _Probe:
    """The attention context of the probe: plain causal attention over everything seen so far, facts written down."""

    tokens: int
    past: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    facts: dict[int, LayerFacts] = field(default_factory=dict)
    masks: dict[int, Callable] = field(default_factory=dict)
    calls: Counter = field(default_factory=Counter)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    asked: dict[Callable, int | None] = field(default_factory=dict)  # layers share few masks
    length: int = 0

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: object, scale: float, sinks: Tensor | None
    ) -> Tensor:
        layer = layer_index(module)
        self.calls[layer] += 1
        self.modules[layer] = module
        self._note(module, layer, q, k, v, mask)
        self.past.setdefault(layer, []).append((k, v))
        k, v = (torch.cat(rows, 1) for rows in zip(*self.past[layer], strict=True))
        group = q.shape[2] // k.shape[2]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k, v = (x.to(wide).repeat_interleave(group, 2) for x in (k, v))
        scores = torch.einsum("bchd,bshd->bhcs", q.to(wide), k) * scale
        key = torch.arange(k.shape[1], device=q.device)
        behind = key[-q.shape[1] :, None] - key
        seen = (behind >= 0) & (behind < (self.windows[layer] or math.inf))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return torch.einsum("bhcs,bshd->bchd", weights, v).to(q.dtype).contiguous()  # as attention's: layers view it

    def distance(self, other: _Probe) -> float:
        """How far the keys and values of any layer are from another run's, relative."""
        worst = 0.0
        for layer, rows in self.past.items():
            for mine, theirs in zip(zip(*rows, strict=True), zip(*other.past[layer], strict=True), strict=True):
                worst = max(worst, _distance(torch.cat(mine, 1), torch.cat(theirs, 1)))
        return worst

    def _note(self, module: nn.Module, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: object) -> None:
        name = type(module).__name__
        if getattr(module, "is_causal", True) is False:
            raise Unsupported(f"{name} (layer {layer}) is not causal")
        if k.shape != v.shape:
            raise Unsupported(
                f"{name} has keys of shape {tuple(k.shape)} and values of shape {tuple(v.shape)}: both need one "
                f"head dim"
            )
        if q.shape[2] % k.shape[2] or q.shape[1] != k.shape[1]:
            raise Unsupported(
                f"{name} attends with {q.shape[2]} query heads over {k.shape[2]} KV heads, {q.shape[1]} over "
                f"{k.shape[1]} tokens"
            )
        if not isinstance(mask, MaskSpec):
            raise Unsupported(
                f"{name} (layer {layer}) got its mask from elsewhere than the library's mask functions "
                f"({type(mask).__name__}): "
                "what each token may see cannot be established"
            )
        if layer not in self.windows:
            device = torch.device("cpu") if q.is_meta else q.device
            if mask.mask_function not in self.asked:
                self.asked[mask.mask_function] = window_of(mask.mask_function, self.length, device)
            self.windows[layer] = self.asked[mask.mask_function]
        self.facts[layer] = LayerFacts(q.shape[2], k.shape[2], q.shape[3], k.dtype, self.windows[layer])


class _Outline(_Probe):
    """The attention context of a model without weights: facts written down, nothing computed."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: object, scale: float, sinks: Tensor | None
    ) -> Tensor:
        layer = layer_index(module)
        self.modules[layer] = module
        self._note(module, layer, q, k, v, mask)
        return torch.zeros_like(q)  # a model with weights may look at values


def layer_index(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unsupported(
            f"{type(module).__name__} has no layer_idx: its pages could not be told from those of other layers"
        )
    return layer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients or random numbers, every module's own mode restored after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def probe(parts: Parts, length: int) -> Profile:
    """Establish that `parts` is exact in chunks for sequences of up to `length` tokens.

    Raises: Unsupported with the reason
    """
    _refuse_hidden_state(parts.decoder)
    tokens = min(PROBE_TOKENS, learned_positions(parts.decoder))
    size, generator = min(parts.vocab_size, parts.label_size), torch.Generator().manual_seed(0)
    ids = torch.randint(size, (1, tokens), generator=generator, device="cpu").to(parts.device)
    name, touched = type(parts.causal).__name__, Touched(parts.causal)
    with evaluating(parts.given), HeldRope(parts.decoder, tokens - 1).installed():
        choices = Choices(tokens)
        with choices.noted(WHOLE):
            own = _own_run(parts, ids)
        touched.after_one()

        def run(chunk: int) -> tuple[Tensor, _Probe]:
            return _chunked_run(parts, ids, chunk, length, choices, NOISE[precision_of(parts, own.hidden.dtype)])

        with attention_installed(parts.causal, ASKING):
            whole, one = run(tokens)
            stack = layer_stack(parts.decoder, one.modules, lambda: run(tokens))
            chunked, many = run(PROBE_CHUNK)
        logits = Head(parts, own.output_type)(own.hidden.flatten(0, 1))
    if not bool(torch.isfinite(own.hidden).all()):
        raise ValueError(f"{name}: its hidden states are not finite; do its weights hold NaN or inf?")
    _check_calls(parts, many, -(-tokens // PROBE_CHUNK))
    kind = precision_of(parts, own.hidden.dtype)
    noise = _distance(whole, own.hidden)
    if not noise <= NOISE[kind]:
        raise Unsupported(
            f"{name}: on {tokens} tokens our attention differs from the model's own by {noise:.1e} (relative); it does "
            "something to attention that the library's attention interface does not tell"
        )
    state = max(_distance(chunked, whole), many.distance(one))
    if not state <= max(STATE[kind], 3 * noise if kind.itemsize == 2 else 0):
        raise Unsupported(
            f"{name}: a short sequence run in chunks differs from the whole by {state:.1e} (relative): the "
            f"model carries "
            "state between tokens besides keys and values (a convolution, a recurrence), or counts positions in "
            "another way"
        )
    if not _distance(logits, own.logits.flatten(0, 1)) <= NOISE[kind]:
        raise Unsupported(f"{name}: its logits depend on more than the decoder's last hidden state")
    router = router_of(parts.causal)
    _check_loss(name, own, ids, router, kind)
    return Profile(many.facts, own.output_type, router, stack, touched.after_two())


def outline(parts: Parts, length: int) -> Profile:
    """The profile of a model without weights, for planning: what its layers look like, not whether it is exact.

    Raises: Unsupported as `probe`, as far as shapes tell
    """
    _refuse_hidden_state(parts.decoder)
    context = _Outline(PROBE_TOKENS, length=min(max(length, 2), OUTLINED))
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=parts.device)
    # with a mask given the library does not look into the positions, which are not there to be looked into
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    seen: list = []

    def run() -> tuple[Tensor, object]:
        seen.append(parts.decoder(**inputs, oomb=context))
        return seen[-1].last_hidden_state, context

    if parts.device.type == "meta" and hasattr(parts.causal, "set_experts_implementation"):
        parts.causal.set_experts_implementation("batched_mm")  # others ask where tokens go
    launches = unlaunched() if parts.device.type == "meta" else nullcontext()
    with evaluating(parts.given), attention_installed(parts.causal, ASKING), launches:
        try:
            run()
            stack = layer_stack(parts.decoder, context.modules, run)
        except Unsupported:
            raise
        except Exception as error:  # it looks at numbers, or does something of its own with masks
            raise Unsupported(
                f"{type(parts.causal).__name__} does not run without its weights, as plans and commands need it; "
                f"chunked_loss may serve it: {type(error).__name__}: {error}"
            ) from error
    if not context.facts:
        raise Unsupported(f"{type(parts.causal).__name__}: none of its layers calls an attention that can be replaced")
    return Profile(context.facts, type(seen[0]), router_of(parts.causal), stack)


def learned_positions(decoder: nn.Module) -> int:
    """How many positions a decoder with learned position embeddings has; very many where it has none."""
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name.rpartition(".")[2] or name.endswith("wpe"))
    ]
    return min(tables, default=1 << 62)


def structure(model: nn.Module) -> int:
    """Changes when a module of the model is replaced or a hook is added: a profile made before says nothing then."""
    return hash(
        tuple(
            (name, type(m), tuple(m._forward_hooks), tuple(m._forward_pre_hooks)) for name, m in model.named_modules()
        )
    )


def refuse_dropout(model: nn.Module) -> None:
    """Raises: Unsupported if a module in training mode would drop attention weights"""
    for name, module in model.named_modules():
        rate = getattr(module, "attention_dropout", 0.0)
        rate = getattr(rate, "p", rate)
        if module.training and isinstance(rate, float) and rate > 0:
            raise Unsupported(
                f"{name} has attention_dropout={rate}: attention dropout cannot be honoured in chunks, set it to 0"
            )


def _refuse_hidden_state(decoder: nn.Module) -> None:
    """What a short probe may not show: selection of keys that starts with longer sequences, small convolutions in 16
    bits.
    """
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if "indexer" in kind.lower() or "compressor" in kind.lower():
            raise Unsupported(f"{name} ({kind}) selects or compresses keys in a way of its own")
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            raise Unsupported(f"{name} is a convolution over tokens: it carries state that is not kept in pages")


@dataclass(frozen=True)
class _OwnRun:
    """The model by itself on the probe's tokens. Shapes: hidden [1, T, E], logits [1, T, V], loss 0-dim"""

    hidden: Tensor
    logits: Tensor
    loss: Tensor | None
    output_type: type
    router_logits: tuple[Tensor, ...] | None


def _own_run(parts: Parts, ids: Tensor) -> _OwnRun:
    seen = []
    hook = parts.decoder.register_forward_hook(lambda _module, _args, output: seen.append(output))
    given = parts.given.module if isinstance(parts.given, nn.parallel.DistributedDataParallel) else parts.given
    try:
        output = given(input_ids=ids, labels=ids, use_cache=False)
    except Exception as error:
        raise Unsupported(f"{type(parts.causal).__name__} does not run on {ids.shape[1]} tokens: {error}") from error
    finally:
        hook.remove()
    if len(seen) != 1 or not hasattr(seen[0], "last_hidden_state"):
        raise Unsupported(f"{type(parts.causal).__name__} does not call its decoder once and return hidden states")
    router_logits = getattr(seen[0], "router_logits", None)
    return _OwnRun(seen[0].last_hidden_state, output.logits, output.loss, type(seen[0]), router_logits)


def _check_loss(name: str, own: _OwnRun, ids: Tensor, router: Router | None, kind: torch.dtype) -> None:
    """The loss the model itself returns is ours: nothing is added to it that we would drop."""
    if own.loss is None:
        return
    expected = cross_entropy(own.logits[0, :-1], ids[0, 1:]).mean()
    if router is not None and own.router_logits is not None:
        balance = Balance(router)
        balance.count(own.router_logits, None)
        expected = expected + router.coefficient * balance.total()
    if not _distance(expected, own.loss) <= NOISE[kind]:
        raise Unsupported(
            f"{name}: its own loss is {float(own.loss):.6g} where cross-entropy and what its config asks for give "
            f"{float(expected):.6g}; it adds something to its loss that is not known here"
        )


def _chunked_run(
    parts: Parts, ids: Tensor, chunk: int, length: int, choices: Choices, tolerance: float
) -> tuple[Tensor, _Probe]:
    context = _Probe(ids.shape[1], length=length)
    hidden = []
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        positions = torch.arange(start, start + part.shape[1], device=ids.device)[None]
        try:
            with choices.held(WHOLE, start, start + part.shape[1], tolerance):
                output = parts.decoder(input_ids=part, position_ids=positions, use_cache=False, oomb=context)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(
                f"{type(parts.causal).__name__} does not run with a replaced attention: {type(error).__name__}: {error}"
            ) from error
        hidden.append(output.last_hidden_state)
    return torch.cat(hidden, 1), context


def _check_calls(parts: Parts, context: _Probe, chunks: int) -> None:
    name = type(parts.causal).__name__
    layers = getattr(parts.decoder.config, "num_hidden_layers", len(context.calls))
    if len(context.calls) != layers:
        raise Unsupported(
            f"{name} has {layers} layers but {len(context.calls)} of them attend: layers of other kinds (recurrent, "
            "convolutional, shared keys) carry state that is not kept in pages"
        )
    for layer, calls in context.calls.items():
        if calls != chunks:
            raise Unsupported(
                f"{name}: layer {layer} calls attention {calls / chunks:g} times in a forward, expected once"
            )


def precision_of(parts: Parts, hidden: torch.dtype) -> torch.dtype:
    """The narrowest precision that `hidden` states went through: the residual stream stays wide under autocast, and
    around quantized weights, which multiply in 16 bits.
    """
    device = parts.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if getattr(parts.causal, "is_quantized", False):
        return torch.bfloat16
    products: Any = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return FEWER_DIGITS.get(products.fp32_precision, hidden) if hidden == torch.float32 else hidden


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
