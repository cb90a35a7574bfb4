"""Where scores nearly tie, rounding decides which experts a token takes, and all that follows is another computation.

Two runs in 16 bits are comparable only if one takes the other's choices wherever its own scores allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .unread import replaced

Found = tuple[Tensor, Tensor]  # values and indices


class _Choosing(TorchDispatchMode):
    """Every topk of the largest goes through `choose(scores, dim, what torch found)`."""

    def __init__(self, choose: Callable[[Tensor, int, Found], Found]) -> None:
        super().__init__()
        self.choose = choose

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is not torch.ops.aten.topk.default or args[3:4] == (False,):
            return found
        return self.choose(args[0], args[2] if len(args) > 2 else -1, found)


@dataclass(frozen=True)
class _Made:
    """One call: what it chose, among scores of what shape, and how far above its mean a row's highest usually was."""

    shape: torch.Size
    ids: Tensor
    above: Tensor

    @staticmethod
    def of(scores: Tensor, dim: int, ids: Tensor) -> _Made:
        finite, values = scores.isfinite(), scores.float()
        highest = values.masked_fill(~finite, -torch.inf).amax(dim)
        mean = values.masked_fill(~finite, 0.0).sum(dim) / finite.sum(dim).clamp_min(1)
        return _Made(scores.shape, ids, (highest - mean).clamp_min(0.0).mean())

    def part(self, shape: torch.Size, dim: int, start: int, stop: int, tokens: int) -> Tensor | None:
        """The rows of tokens `start` to `stop`; None if it is not told by tokens, or tokens were chosen among."""
        if len(self.shape) != len(shape):
            return None
        other = [d for d, (a, b) in enumerate(zip(self.shape, shape, strict=True)) if a != b]
        if not other:
            return self.ids if stop - start == tokens else None
        (d, *more) = other
        if more or d == dim % len(shape) or (self.shape[d], shape[d]) != (tokens, stop - start):
            return None
        return self.ids.narrow(d, start, stop - start)


@dataclass
class Choices:
    """What one run over a whole sequence of `tokens` chose, for other runs over it, whole or in chunks.

    A run is told by parts that are run in any order (layers, or the whole decoder); a part makes its choices in one.
    """

    tokens: int
    made: dict[str, list[_Made]] = field(default_factory=dict)

    def noted(self, part: str) -> TorchDispatchMode:
        """While entered, what is chosen is written down."""
        made = self.made[part] = []

        def note(scores: Tensor, dim: int, found: Found) -> Found:
            made.append(_Made.of(scores, dim, found[1]))
            return found

        return _Choosing(note)

    def held(self, part: str, start: int, stop: int, tolerance: float) -> TorchDispatchMode:
        """While entered, one pass over tokens `start` to `stop` chooses what was chosen for them.

        tolerance: how far below its own a choice may score, as a share of how far the highest are above the mean;
            beyond it a pass keeps its own. What all scores have in common (a bias) chooses nothing, and does not count.
        """
        made = iter(self.made.get(part, []))

        def choose(scores: Tensor, dim: int, found: Found) -> Found:
            whole = next(made, None)
            ids = None if whole is None else whole.part(scores.shape, dim, start, stop, self.tokens)
            if whole is None or ids is None or ids.shape != found[1].shape:
                return found
            return nearly_tied(scores, dim, found, ids, tolerance * whole.above)

        return _Choosing(choose)

    @contextmanager
    def layers_noted(self, layers: dict[str, nn.Module]) -> Iterator[None]:
        """As `noted`, of every layer by its name."""
        with _around(layers, lambda name, _: self.noted(name)):
            yield

    @contextmanager
    def layers_held(self, layers: dict[str, nn.Module], tolerance: float) -> Iterator[None]:
        """As `held`, of every layer that is told its tokens' positions."""

        def hold(name: str, positions: Tensor | None) -> TorchDispatchMode | None:
            if positions is None or positions.shape[0] != 1:
                return None
            start = int(positions[0, 0])
            return self.held(name, start, start + positions.shape[1], tolerance)

        with _around(layers, hold):
            yield


@contextmanager
def _around(
    layers: dict[str, nn.Module], mode: Callable[[str, Tensor | None], TorchDispatchMode | None]
) -> Iterator[None]:
    """Enter a mode around each call of a layer, in whichever thread it comes: a backward's is not the caller's."""

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            entered = mode(name, kwargs.get("position_ids"))
            if entered is None:
                return forward(*args, **kwargs)
            with entered:
                return forward(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(replaced(layer, "forward", around(name, layer.forward)))
        yield


def nearly_tied(scores: Tensor, dim: int, found: Found, ids: Tensor, tolerance: Tensor | float) -> Found:
    """`ids` instead of what was found, in rows where their scores are as high but for `tolerance` and rounding.

    Shapes: found, and what is returned, are topk's values and indices; ids like the indices
    tolerance: in the units of scores
    """
    values, order = scores.gather(dim, ids).sort(dim, descending=True)
    ids = ids.gather(dim, order)
    best, order = found[0].sort(dim, descending=True)
    last_places = 2 * torch.finfo(scores.dtype).eps * best.abs() if scores.is_floating_point() else 0
    near = ((best - values).abs() <= tolerance + last_places).all(dim, keepdim=True)
    return torch.where(near, values, best), torch.where(near, ids, found[1].gather(dim, order))
