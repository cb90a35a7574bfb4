"""The two passes over the chunks: fill 0 … n-2 without grad, then walk n-1 … 0, one chunk's graph at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunk_recur.hold import Hold
from chunk_recur.loss import LossSum, checked_loss
from chunk_recur.replay import Autocast, RandomState, fresh_casts, preserved_random_state
from chunk_recur.state import Around, Phase, State, Step
from chunk_recur.tree import Outline, Tree, Versions, can_require_grad, kept, leaf


@dataclass(frozen=True, eq=False)
class _Entry:
    """What is needed to run a chunk again."""

    random: RandomState
    carried: Tree  # detached
    versions: Versions  # of the carried tensors
    links: dict[int, int]  # place of a leaf of the chunk that requires grad → its place among the inputs
    outline: Outline  # of the chunk


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of the step: what went in (with grad: leaves of its graph) and what came out."""

    chunk: Tree
    carried_in: Tree
    carried_out: Tree
    loss: Tensor | None


class Engine:
    """One loss: filled once, then walked back once, or only filled.

    params: leaf tensors whose gradient is asked for; only watched, the walk accumulates into every leaf it meets.
    walks:  whether a walk follows. Without one every chunk is a fill and nothing is kept.
    reports: whether the sum of the fill is what the caller is told (then a chunk may not gain a loss in the walk).
    around: entered once for each pass.
    """

    def __init__(
        self,
        step: Step,
        chunks: Sequence[Any],
        state: State,
        params: Sequence[Tensor],
        around: Around,
        *,
        walks: bool,
        reports: bool,
    ) -> None:
        self._step: Step | None = step
        self._around: Around | None = around
        self._chunks, self._count = chunks, len(chunks)
        self._walks, self._reports = walks, reports
        self._initial = Tree.of(state.carried)
        self._initial_links: dict[int, int] = {}
        self._params = Versions(params)
        self._autocast = Autocast.now()
        self._inputs: list[Tensor] = []  # carried and chunk tensors that require grad, held until the fill is done
        self._places: dict[int, int] = {}  # id of an input → its place
        self._entries: list[_Entry] = []
        self._seen: list[weakref.ref[Tensor]] = []  # tensors of chunks
        self._losses: dict[int, Tensor] = {}  # of the fill's chunks that returned one, if it is reported
        self._last: _Run | None = None
        self.filled, self.walked = LossSum(), LossSum()  # the last chunk's loss counts in both
        self._spent: str | None = None
        self._hold = Hold(state.stores)
        # A loss that is dropped without backward must not keep its pages; at the interpreter's exit nobody needs them.
        weakref.finalize(self, self._hold.release, "the loss was dropped").atexit = False

    def fill(self) -> list[Tensor]:
        """Run every chunk forward, the last one with its graph if a walk follows.

        Returns: the carried and chunk tensors that require grad, each once; `walk` returns their gradients
        """
        with self._pass("fill", "its forward failed"), fresh_casts():
            initial, self._initial = self._initial, Tree.of(())
            _refuse_opaque(initial, "State.carried")
            if self._walks:
                self._initial_links = self._link(initial)
            carried = initial.map(lambda _, t: leaf(t, False))
            for index in range(self._count):
                if self._walks and index == self._count - 1:
                    self._fill_last(index, carried)
                else:
                    carried = self._fill(index, carried)
            self._chunk_versions = Versions(t for t in (seen() for seen in self._seen) if t is not None)
            inputs, self._inputs = self._inputs, []
        if not self._walks:
            self._end("it was only run forward")
        return inputs

    def walk(self, grad: Tensor | float) -> list[Tensor | None]:
        """Run the chunks backward, last first; parameters accumulate into `.grad`.

        grad: the incoming gradient of the loss.
        Returns: the gradients of what `fill` returned
        Raises: RuntimeError if the loss is spent, or if a tensor it needs was written in place since
        """
        spent = self._spent or self._hold.released
        if spent is not None:
            raise RuntimeError(
                f"this loss cannot be walked back: {spent}. A chunk-recurrent loss gives one backward; "
                "call chunk_recurrent again for another"
            )
        self._spent = "it was walked back already"
        grads: list[Tensor | None] = [None] * len(self._places)
        with self._pass("walk", "its backward failed"), preserved_random_state():
            _refuse_written(self._chunk_versions, "a tensor of the chunks")
            carried_grads: list[Tensor | None] = []
            for index in reversed(range(self._count)):
                carried_grads = self._walk_back(index, grad, carried_grads, grads)
                self._hold.close(index, "walk")
            for place, at in self._initial_links.items():
                _accumulate(grads, at, carried_grads[place])
        self._end(self._spent)
        return grads

    def _fill(self, index: int, carried: Tree) -> Tree:
        chunk = self._enter(index, carried)
        with torch.no_grad():
            self._hold.open(index, "fill")
            run = self._run(index, "fill", carried, chunk, {})
            self._hold.close(index, "fill")
            self.filled.add(run.loss)
            if run.loss is not None and self._reports and self._walks:
                self._losses[index] = kept(run.loss)
            return run.carried_out.map(lambda _, t: kept(t)) if self._walks else run.carried_out

    def _fill_last(self, index: int, carried: Tree) -> None:
        chunk = self._enter(index, carried)
        with torch.enable_grad(), fresh_casts():
            self._hold.open(index, "walk")
            self._last = self._run(index, "walk", carried, chunk, self._entries[index].links)
        self.filled.add(self._last.loss)

    def _enter(self, index: int, carried: Tree) -> Tree:
        """Fetch a chunk for the first time, and note what it takes to run it again."""
        if not self._walks:
            return Tree.of(self._chunks[index])
        random = RandomState.now()  # before the chunk: making it may draw numbers too
        chunk = Tree.of(self._chunks[index])
        self._seen.extend(weakref.ref(t) for t in chunk.tensors())
        versions = Versions(carried.tensors())
        self._entries.append(_Entry(random, carried, versions, self._link(chunk), chunk.outline()))
        return chunk

    def _link(self, tree: Tree) -> dict[int, int]:
        """Enlist the tensors that require grad among the inputs; a tensor met before keeps its place."""
        links = {}
        for place, tensor in enumerate(tree.leaves):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                links[place] = self._places.setdefault(id(tensor), len(self._places))
                if links[place] == len(self._inputs):
                    self._inputs.append(tensor)
        return links

    def _run(self, index: int, phase: Phase, carried: Tree, chunk: Tree, links: dict[int, int]) -> _Run:
        """Call the step once and check what it returns."""
        where = f"chunk {index}, phase {phase!r}"
        grad = phase == "walk"
        first = index == 0  # the gradient of the initial state is needed only where somebody asked for it
        carried_in = carried.map(
            lambda place, t: leaf(t, grad and (place in self._initial_links if first else can_require_grad(t)))
        )
        chunk_in = chunk.map(lambda place, t: leaf(t, grad and place in links))
        given = Versions(carried_in.tensors() + chunk_in.tensors() if self._walks else [])
        assert self._step is not None
        returned = self._step(index, chunk_in.value(), carried_in.value(), phase)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
            raise ValueError(f"{where}: expected the step to return the pair (loss or None, carried), got {got}")
        written = given.changed()
        if written is not None:
            raise ValueError(
                f"{where}: the step wrote in place to a tensor it was given ({written}); the second run of the chunk "
                "would start from other values: work on a clone"
            )
        carried_out = Tree.of(returned[1])
        _refuse_opaque(carried_out, f"{where}: the carried state returned")
        return _Run(chunk_in, carried_in, carried_out, checked_loss(returned[0], where))

    def _walk_back(
        self, index: int, grad: Tensor | float, carried_grads: list[Tensor | None], grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Backward of one chunk. Its graph is gone when this returns.

        Returns: the gradients of the leaves of its carried input
        """
        _refuse_written(self._params, "a parameter")
        run, self._last = self._last or self._rerun(index), None
        self.walked.add(run.loss)
        roots, root_grads = [], []
        if run.loss is not None and run.loss.requires_grad:
            roots.append(run.loss)
            # A number is filled in on the device: copying it there would make the CPU wait for all that was enqueued.
            given = grad.to(run.loss) if isinstance(grad, Tensor) else torch.full_like(run.loss, grad)
            root_grads.append(given)
        for out, out_grad in zip(run.carried_out.leaves, carried_grads):
            if out_grad is not None and out.requires_grad:
                roots.append(out)
                root_grads.append(out_grad)
        if roots:
            with self._autocast.off():
                # Not autograd.grad, and no `inputs`: reentrant checkpoints allow neither.
                torch.autograd.backward(roots, root_grads)
        for place, at in self._entries[index].links.items():
            _accumulate(grads, at, run.chunk.leaves[place].grad)
        return [x.grad if isinstance(x, Tensor) else None for x in run.carried_in.leaves]

    def _rerun(self, index: int) -> _Run:
        """The chunk once more, now with grad, as it ran in the fill."""
        entry = self._entries[index]
        _refuse_written(entry.versions, f"the carried state before chunk {index}")
        entry.random.restore()
        with torch.enable_grad(), self._autocast.entered():
            chunk = Tree.of(self._chunks[index])
            _refuse_different(chunk.outline(), entry.outline, f"chunks[{index}]")
            if {i for i, t in enumerate(chunk.leaves) if isinstance(t, Tensor) and t.requires_grad} != set(entry.links):
                raise ValueError(
                    f"chunks[{index}]: other tensors require grad in the walk than in the fill; neither the step nor "
                    "what builds the chunks may change which do"
                )
            self._hold.open(index, "walk")
            run = self._run(index, "walk", entry.carried, chunk, entry.links)
        expected = self._entries[index + 1].carried.outline()
        _refuse_different(run.carried_out.outline(), expected, f"the carried state after chunk {index}")
        del self._entries[index + 1 :]
        if self._reports:
            self._refuse_other_loss(index, run.loss)
        return run

    def _refuse_other_loss(self, index: int, walked: Tensor | None) -> None:
        """A loss in one pass alone: the value was summed over the fill, the gradient is the walk's. Zero is no loss."""
        filled = self._losses.pop(index, None)
        if (filled is None) == (walked is None) or not bool((walked if filled is None else filled) != 0):
            return
        had, lacks = ("walk", "fill") if filled is None else ("fill", "walk")
        raise ValueError(
            f"chunk {index}: the step returned no loss in the {lacks} but one in the {had}, so the value that "
            "chunk_recurrent returned and its gradient would not go together; return it in both, or use "
            "chunk_recurrent_backward"
        )

    @contextmanager
    def _pass(self, phase: Phase, why: str) -> Iterator[None]:
        """What surrounds a pass; when it fails, everything is let go of."""
        assert self._around is not None
        finished = False
        try:
            with nullcontext() if phase == "fill" else _plain_mode(), self._around(phase):
                yield
                finished = True
            if not finished:
                raise RuntimeError(
                    f"around({phase!r}) swallowed an error of the pass: its context must let errors through"
                )
        except BaseException as error:
            self._end(f"{why} ({type(error).__name__})", error)
            raise

    def _end(self, why: str, error: BaseException | None = None) -> None:
        """Let go of everything; the loss is spent."""
        self._spent = why
        self._last = self._step = self._around = None
        self._chunks = ()
        self._entries.clear()
        self._losses.clear()
        self._hold.release(why, error)


@contextmanager
def _plain_mode() -> Iterator[None]:
    """No grad unless asked for, and no inference mode: its tensors would be of no use to the next forward."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _accumulate(grads: list[Tensor | None], at: int, grad: Tensor | None) -> None:
    if grad is not None:
        before = grads[at]
        grads[at] = grad if before is None else before + grad


def _refuse_opaque(tree: Tree, where: str) -> None:
    opaque = tree.opaque()
    if opaque is not None:
        raise ValueError(
            f"{where}: expected a pytree of tensors and plain values, got an object of type {opaque}, through which "
            "no gradient would be carried; use tuples, lists and dicts, or register the type with torch's pytree"
        )


def _refuse_written(versions: Versions, what: str) -> None:
    written = versions.changed()
    if written is not None:
        raise RuntimeError(
            f"{what} ({written}) was written in place after the forward; the walk would differentiate another "
            "computation. Call backward before an optimizer step, and clone buffers that are filled again"
        )


def _refuse_different(got: Outline, expected: Outline, what: str) -> None:
    difference = got.difference(expected)
    if difference is not None:
        raise ValueError(
            f"{what} differs between walk and fill ({difference}); the step and the chunks must do the same in both"
        )
