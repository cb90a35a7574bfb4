"""Is the chunked gradient that of the whole sequence? Asked of the user's own model, in its own precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .api import chunked_backward, profile_of
from .choices import Choices
from .config import ChunkConfig
from .hf import Parts, take_apart
from .memory import Machine, layer_bytes
from .probe import NOISE, Profile, precision_of

MOST_TOKENS = 2**16
ALLOWED = 2.0  # times the whole run's own distance from the wider one
# What is allowed besides: rounding, where the whole run happens to be exact. The library's own softmax and loss stay in
# float32 in a float64 model.
FLOOR = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
ASTRAY = 0.5  # further off, the whole run says nothing: what is wrong is the model, or the copy
UNSEEN = 1e-4  # a parameter's own gradient counts for no less than this share of the whole


@dataclass(frozen=True)
class ParameterError:
    """How far a parameter's gradient is from the reference, relative to it; and how far the whole run's is."""

    name: str
    chunked: float
    whole: float
    allowed: float

    @property
    def excess(self) -> float:
        """Above 1 it is too far off."""
        return self.chunked / self.allowed if self.chunked == self.chunked else float("inf")


@dataclass(frozen=True)
class Verification:
    """What `verify` found. `reference` is the precision both runs were held against."""

    model: str
    dtype: str
    reference: str
    tokens: int
    chunk_tokens: int
    loss_chunked: float
    loss_whole: float
    total: ParameterError
    parameters: tuple[ParameterError, ...]  # worst first

    @property
    def culprit(self) -> ParameterError | None:
        """The parameter that is furthest off, if one is too far; all together, if the whole run itself is."""
        if not self.total.whole <= ASTRAY:
            return self.total
        if self.parameters[0].excess > 1:
            return self.parameters[0]
        return self.total if self.total.excess > 1 else None

    @property
    def passed(self) -> bool:
        return self.culprit is None

    def lines(self) -> list[str]:
        """What a person reads."""
        worst = self.culprit or self.parameters[0]
        shown = [
            f"model       {self.model}, {self.dtype}; {self.tokens:,} tokens in chunks of {self.chunk_tokens:,}",
            f"loss        {self.loss_chunked:.6f} in chunks, {self.loss_whole:.6f} whole",
            f"gradient    {self.total.chunked:.1e} from {self.reference}; the whole run itself {self.total.whole:.1e}",
            f"worst       {worst.name}: {worst.chunked:.1e}; the whole run itself {worst.whole:.1e}, "
            f"allowed {worst.allowed:.1e}",
        ]
        verdict = "passed"
        if not self.total.whole <= ASTRAY:
            verdict = (
                f"FAILED      the whole run is itself {self.total.whole:.2g} from {self.reference}: it shows nothing"
            )
        elif not self.passed:
            verdict = f"FAILED      {worst.name} is {worst.excess:.3g} times as far off as allowed"
        return [*shown, verdict]


def verify(
    model: nn.Module,
    input_ids: Tensor | None = None,
    *,
    config: ChunkConfig | None = None,
    tokens: int = 512,
    autocast: torch.dtype | None = None,
) -> Verification:
    """Compare a model's chunked gradient with that of its own forward pass over the whole sequence.

    Both are held against a copy of the model in the next wider precision: the chunked one may be twice as far from it
    as the whole one is. Each token takes the experts that it took there, where scores are close enough for rounding to
    decide. Runs in evaluation mode (no dropout); `.grad` and modes are as before afterwards.

    Shapes: input_ids [1, T]; default: `tokens` random ones
    config: as for training; sparse attention is verified as dense (it is an approximation by design), and a chunk
        that holds the whole sequence is cut to a quarter of it
    Returns: per-parameter errors, worst first
    Raises: ValueError for a model that cannot be trained in chunks, and more tokens than run at once (check_room)
    """
    parts = take_apart(model)
    length = tokens if input_ids is None else input_ids.shape[1]
    cast = torch.autocast(parts.device.type, autocast, enabled=autocast is not None)
    with cast:  # the step's own: another probe, among held layers, would be held to what it never asked
        profile = profile_of(parts, length)
        held = next(p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = precision_of(parts, held)
    check_room(parts, profile, length, parts.device, loaded=True)
    if input_ids is None:
        size = min(parts.vocab_size, parts.label_size)
        input_ids = torch.randint(size, (1, tokens), generator=torch.Generator().manual_seed(0), device="cpu")
    ids = input_ids.to(parts.device)
    config = _short(config or ChunkConfig(), ids.shape[1], parts.device)
    choices, names = Choices(ids.shape[1]), profile.stack.names if profile.stack else ()
    with _undisturbed(model):
        name, reference = _reference(model, ids, choices, names)
        with choices.layers_held(_layers(parts, names), NOISE[dtype]):
            with cast:
                loss_chunked = float(chunked_backward(model, ids, config=config))
            chunked = _taken(model)
            loss, whole = _whole(model, ids, cast)
    total, parameters = _compare(chunked, whole, reference, FLOOR[dtype])
    shown = f"{autocast or held}".removeprefix("torch.") + (" autocast" if autocast else "")
    chunk = config.chunk_length(parts.device)
    return Verification(
        type(parts.causal).__name__,
        shown,
        name,
        ids.shape[1],
        chunk,
        loss_chunked,
        loss,
        total,
        parameters,
    )


def check_room(parts: Parts, profile: Profile, tokens: int, device: torch.device, *, loaded: bool) -> str:
    """What a run over all tokens at once takes, said before it begins.

    loaded: whether the model is in the device's memory already
    Raises: ValueError if it cannot be there, or is of no use
    """
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"verify runs all tokens at once, in two precisions: at most {MOST_TOKENS:,} tokens, got {tokens:,}; "
            "what is not exact shows at a few hundred"
        )
    machine = Machine.now(device)
    free = machine.host_free if machine.device_free is None else machine.device_free
    need = whole_bytes(parts, profile, tokens, loaded=loaded)
    if free is not None and need > free:
        raise ValueError(
            f"verify runs all {tokens:,} tokens at once, in two precisions: that takes about {need:,} bytes, there are "
            f"{free:,}; what is not exact shows at a few hundred tokens"
        )
    return f"{need / 2**30:.2f} GiB, about, for all {tokens:,} tokens at once in two precisions" + (
        "" if free is None else f"; {free / 2**30:.2f} GiB are free"
    )


def whole_bytes(parts: Parts, profile: Profile, tokens: int, *, loaded: bool) -> int:
    """Memory of the wider of the two runs over all tokens at once, beside the gradients of the others. An estimate."""
    weights = list(parts.causal.parameters())
    wide = _wider({p.dtype for p in weights}).itemsize
    learning = [p for p in weights if p.requires_grad]
    twin = parts.causal.num_parameters() * wide + sum(p.numel() * (wide + 2 * p.element_size()) for p in learning)
    narrow = min(f.dtype.itemsize for f in profile.layers.values())
    graph = len(profile.layers) * layer_bytes(parts.decoder, profile) // narrow * wide * tokens
    logits = tokens * parts.label_size * (wide + 3 * 4)  # the library's loss is computed in float32
    scores = 0  # of plain attention: what softmax returns, and what it is cast to
    if getattr(parts.causal.config, "_attn_implementation", None) == "eager":
        scores = sum(2 * wide * f.heads * tokens**2 for f in profile.layers.values())
    return twin + graph + logits + scores + (0 if loaded else sum(p.nbytes for p in weights))


def _wider(dtypes: set[torch.dtype]) -> torch.dtype:
    return torch.float64 if dtypes <= {torch.float32, torch.float64} else torch.float32


def _short(config: ChunkConfig, tokens: int, device: torch.device) -> ChunkConfig:
    config = replace(config, attention="dense")
    if config.chunk_length(device) < tokens:
        return config
    return replace(config, chunk_tokens=max(tokens // 4, 1), page_tokens=min(config.page_tokens, 64))


def _layers(parts: Parts, names: tuple[str, ...]) -> dict[str, nn.Module]:
    return {name: parts.decoder.get_submodule(name) for name in names}


def _whole(model: nn.Module, ids: Tensor, cast: AbstractContextManager) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model's own forward pass over everything."""
    with cast:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), _taken(model)


def _reference(
    model: nn.Module, ids: Tensor, choices: Choices, names: tuple[str, ...]
) -> tuple[str, dict[str, Tensor]]:
    """Gradients of a copy in wider precision, and what its layers chose."""
    wide = _wider({p.dtype for p in model.parameters()})
    twin: Any = copy.deepcopy(model)
    _dequantize(take_apart(twin).causal)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, p in twin.named_parameters():  # dequantized weights would learn
        p.requires_grad_(name in learning)
    twin = twin.to(wide)
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")  # the grouped kernels know no float64
    with choices.layers_noted(_layers(take_apart(twin), names)):
        return f"{wide}".removeprefix("torch."), _whole(twin, ids, nullcontext())[1]


def _dequantize(causal: Any) -> None:
    """Raises: ValueError where the library knows no way from the quantized weights to numbers"""
    if not getattr(causal, "is_quantized", False):
        return
    try:
        causal.dequantize()
    except NotImplementedError as error:
        raise ValueError(
            f"verify holds both runs against a copy in wider precision, and these quantized weights have none: {error}"
        ) from error


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        model.eval()
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        for module, training in modes:
            module.training = training
        for p, grad in grads:
            p.grad = grad


def _taken(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return grads


def _compare(
    chunked: dict[str, Tensor], whole: dict[str, Tensor], reference: dict[str, Tensor], floor: float
) -> tuple[ParameterError, tuple[ParameterError, ...]]:
    norm = _norm([*reference.values()])
    least = max(norm * UNSEEN, 1e-300)

    def error(name: str) -> tuple[float, float, float]:
        """Distances of both runs, and the length they are measured by."""
        exact = reference[name].double()
        if name not in chunked:
            return float("inf"), 0.0, 1.0
        far, near = (float((grads[name].double() - exact).norm()) for grads in (chunked, whole))
        return far, near, max(float(exact.norm()), least)

    found, squares = [], [0.0, 0.0]
    for name in reference:
        far, near, length = error(name)
        squares = [squares[0] + far**2, squares[1] + near**2]
        # rounding errors of a parameter are as large as those of its neighbours, however small its own gradient is
        allowed = ALLOWED * near / length + floor * max(1.0, 0.01 * norm / length)
        found.append(ParameterError(name, far / length, near / length, allowed))
    found.sort(key=lambda one: one.excess, reverse=True)
    total = (square**0.5 / max(norm, 1e-300) for square in squares)
    far, near = total
    return ParameterError("all together", far, near, ALLOWED * near + floor), tuple(found)


def _norm(tensors: list[Tensor]) -> float:
    return sum(float(t.double().norm()) ** 2 for t in tensors) ** 0.5
