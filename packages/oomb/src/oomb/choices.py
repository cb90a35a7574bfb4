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


class _Choosing(TorchDispatchMode):
    """Every topk of the largest goes through `choose(scores, dim, what torch found)`."""

    def __init__(self, choose: Callable[[Tensor, int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.choose = choose

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is not torch.ops.aten.topk.default or args[3:4] == (False,):
            return found
        return self.choose(args[0], args[2] if len(args) > 2 else -1, found)


@dataclass
class Choices:
    """What one run over a whole sequence of `tokens` chose, for other runs over it, whole or in chunks.

    A run is told by parts that are run in any order (layers, or the whole decoder); a part makes its choices in one.
    """

    tokens: int
    made: dict[str, list[tuple[torch.Size, Tensor]]] = field(default_factory=dict)

    def noted(self, part: str) -> TorchDispatchMode:
        """While entered, what is chosen is written down."""
        made = self.made[part] = []

        def note(scores: Tensor, dim: int, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            made.append((scores.shape, found[1]))
            return found

        return _Choosing(note)

    def held(self, part: str, start: int, stop: int, tolerance: float) -> TorchDispatchMode:
        """While entered, one pass over tokens `start` to `stop` chooses what was chosen for them.

        tolerance: as `nearly_tied`; beyond it a pass keeps its own choice
        """
        made = iter(self.made.get(part, []))

        def choose(scores: Tensor, dim: int, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            shape, ids = next(made, (torch.Size(), found[1]))
            ours = self._of(shape, ids, scores.shape, start, stop)
            return found if ours is None else nearly_tied(scores, dim, found, ours, tolerance)

        return _Choosing(choose)

    def _of(self, whole: torch.Size, ids: Tensor, part: torch.Size, start: int, stop: int) -> Tensor | None:
        """The tokens' rows of what was chosen; None if it is not told by tokens."""
        if len(whole) != len(part):
            return None
        other = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        if not other:
            return ids if stop - start == self.tokens else None
        (d, *more) = other
        if more or whole[d] != self.tokens or part[d] != stop - start:
            return None
        return ids.narrow(d, start, stop - start)

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


def nearly_tied(
    scores: Tensor, dim: int, found: tuple[Tensor, Tensor], ids: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """`ids` instead of what was found, in rows where their scores are as high but for `tolerance`.

    Shapes: found, and what is returned, are topk's values and indices; ids like the indices
    tolerance: as a share of the row's largest score
    """
    values, order = scores.gather(dim, ids).sort(dim, descending=True)
    ids = ids.gather(dim, order)
    best, order = found[0].sort(dim, descending=True)
    largest = torch.where(scores.isfinite(), scores, 0).abs().amax(dim, keepdim=True)
    near = ((best - values).abs() <= tolerance * largest).all(dim, keepdim=True)
    return torch.where(near, values, best), torch.where(near, ids, found[1].gather(dim, order))
