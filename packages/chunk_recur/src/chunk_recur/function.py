"""The two entry points: a loss whose backward walks the chunks, and both passes at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from chunk_recur.engine import Engine
from chunk_recur.replay import preserved_random_state
from chunk_recur.state import Around, State, Step
from chunk_recur.tree import Tree


def chunk_recurrent(
    step: Step, chunks: Sequence[Any], state: State, *, params: Iterable[Tensor], around: Around | None = None
) -> Tensor:
    """Sum a step's loss over chunks so that `backward` holds the graph of one chunk at a time.

    The forward runs every chunk but the last without grad. The backward walks from the last chunk to the first and
    runs each again, from the same carried state, random state and autocast mode. Parameters accumulate into `.grad`;
    the tensors that require grad in `state.carried` and in the chunks receive their gradient as from any operation.

    step:   step(index, chunk, carried, phase) -> (loss or None, carried), the same computation in both phases.
            phase: "fill" without grad, "walk" with. No loss means zero. It must not write to what it is given.
    chunks: a sequence of pytrees, indexed once in each pass; `__getitem__` may build them.
    params: the leaf tensors that the step uses; those that do not require grad are ignored.
    around: around(phase) -> a context manager that holds during a pass and not between them; entered with "fill" for
            the forward (the last chunk's too) and with "walk" for the backward.

    Shapes: each loss [] floating point
    Returns: the sum [], in the dtype of the losses (summed in at least float32). Under no_grad, in inference mode or
             when nothing requires grad: a plain value, every chunk a fill, nothing kept
    Raises: ValueError for what the step or the arguments get wrong; RuntimeError from a second backward, from
            create_graph=True, from autograd.grad for params, and if parameters or inputs were written to in between
    Source: oracle: reference.chunk_recurrent
    """
    leaves = _checked(step, chunks, state, params, around)
    walks = _records() and (bool(leaves) or _inputs_require_grad(chunks, state))
    engine = Engine(step, chunks, state, leaves, around or nullcontext, walks=walks, reports=True)
    inputs = engine.fill()
    device = _device(leaves, inputs)
    if not walks:
        return engine.filled.value(device)
    return _WalkBack.apply(engine, device, leaves, *leaves, *inputs)


def chunk_recurrent_backward(
    step: Step,
    chunks: Sequence[Any],
    state: State,
    *,
    params: Iterable[Tensor] = (),
    scale: float | Tensor = 1.0,
    around: Around | None = None,
) -> Tensor:
    """Do what `(scale * chunk_recurrent(...)).backward()` does, at once.

    The step may leave out of a fill what only the loss needs, and return None for it: the losses are taken from the
    walk.

    params: watched for writes between the passes; every leaf that the step uses accumulates, named here or not.
    scale:  the incoming gradient, a number or a tensor [].
    around: as in chunk_recurrent.

    Returns: the sum of the losses [], detached and not scaled. Without grad: the sum of the fill
    Raises: as chunk_recurrent; ValueError without grad if the step returned no loss at all
    """
    leaves = _checked(step, chunks, state, params, around)
    if isinstance(scale, Tensor) and scale.dim() != 0:
        raise ValueError(f"scale: expected a number or a 0-dim tensor, got shape {tuple(scale.shape)}")
    if not isinstance(scale, (int, float, Tensor)):
        raise ValueError(f"scale: expected a number or a 0-dim tensor, got {type(scale).__name__}")
    walks = _records()
    engine = Engine(step, chunks, state, leaves, around or nullcontext, walks=walks, reports=False)
    inputs = engine.fill()
    device = _device(leaves, inputs)
    if not walks:
        if engine.filled.empty:
            raise ValueError(
                "chunk_recurrent_backward without grad: expected losses from the fill, got None from every chunk; "
                "enable grad, or use a step that computes its loss in phase 'fill'"
            )
        return engine.filled.value(device)
    grads = engine.walk(scale)
    reached = [(tensor, grad) for tensor, grad in zip(inputs, grads) if grad is not None]
    if reached:
        torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached])
    return engine.walked.value(device)


class _WalkBack(torch.autograd.Function):
    """Connects a filled engine to the caller's graph.

    The parameters are inputs, so that the result requires grad and `backward(inputs=...)` reaches this node; they get
    None back because the walk has accumulated their gradient itself.
    """

    @staticmethod
    def forward(ctx: Any, engine: Engine, device: torch.device, params: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.engine, ctx.params = engine, params
        return engine.filled.value(device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("chunk_recurrent has no second derivative; call backward without create_graph=True")
        with _only_into(_wanted(ctx), ctx.params):
            grads = ctx.engine.walk(grad)
        return (None, None, None, *map(_returned, ctx.params), *grads)


def _returned(param: Tensor) -> Tensor | None:
    """What the Function gives back for a parameter whose gradient the walk has accumulated.

    Nothing; but hooks would be called with None, so a parameter that has some gets zeros.
    """
    hooked = param._backward_hooks or param._post_accumulate_grad_hooks
    return torch.zeros_like(param) if hooked else None


def _wanted(ctx: Any) -> list[bool]:
    """Which parameters the running backward accumulates into: all of them, or those named in its `inputs`."""
    nodes = [node for node, _ in ctx.next_functions[: len(ctx.params)]]
    try:
        return [torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError as error:  # torch's refusal to answer about a leaf that autograd.grad was asked for
        raise RuntimeError(
            "chunk_recurrent accumulates the gradient of params into .grad, so torch.autograd.grad cannot return it; "
            "use loss.backward(), or loss.backward(inputs=[...]) for some of them"
        ) from error


@contextmanager
def _only_into(wanted: list[bool], params: list[Tensor]) -> Iterator[None]:
    """Undo what the body accumulates into the parameters that are not wanted.

    Asking the walk for the wanted ones alone would prune its graphs, and with them the gradient that runs through
    stores from one chunk to another, where autograd sees no path.
    """
    others = [(param, param.grad) for param, want in zip(params, wanted) if not want]
    for param, _ in others:
        param.grad = None
    try:
        yield
    finally:
        for param, before in others:
            param.grad = before


def _records() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _inputs_require_grad(chunks: Sequence[Any], state: State) -> bool:
    if any(tensor.requires_grad for tensor in Tree.of(state.carried).tensors()):
        return True
    with preserved_random_state():  # building a chunk may draw numbers
        return any(t.requires_grad for index in range(len(chunks)) for t in Tree.of(chunks[index]).tensors())


def _device(*tensors: list[Tensor]) -> torch.device:
    return next((tensor.device for group in tensors for tensor in group), torch.device("cpu"))


def _checked(step: Any, chunks: Any, state: Any, params: Any, around: Any) -> list[Tensor]:
    """Refuse what cannot work before any of it is run.

    Returns: the parameters that require grad
    """
    if not callable(step):
        raise ValueError(f"step: expected a function (index, chunk, carried, phase), got {type(step).__name__}")
    indexable = hasattr(chunks, "__len__") and hasattr(chunks, "__getitem__")
    if not indexable or isinstance(chunks, (Mapping, str, bytes)):
        raise ValueError(
            f"chunks: expected a sequence, got {type(chunks).__name__}; each chunk is read twice and by its index: "
            "pass a list, or an object with __len__ and __getitem__"
        )
    if len(chunks) == 0:
        raise ValueError("chunks: expected at least one chunk, got an empty sequence")
    if not isinstance(state, State):
        raise ValueError(f"state: expected a State, got {type(state).__name__}; write State(carried, stores)")
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"params: expected an iterable of tensors, got {type(params).__name__}; pass module.parameters(), or a list"
        )
    if around is not None and not callable(around):
        raise ValueError(
            f"around: expected a function from phase to context manager, got {type(around).__name__}; "
            "a context manager serves once, and is entered for two passes"
        )
    leaves: list[Tensor] = []
    for place, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise ValueError(f"params[{place}]: expected a tensor, got {type(param).__name__}")
        if param.requires_grad and not param.is_leaf:
            raise ValueError(
                f"params[{place}]: expected a leaf tensor, got the result of an operation; "
                "bring it in through State.carried or the chunks, which return its gradient"
            )
        if param.requires_grad:
            leaves.append(param)
    return leaves
