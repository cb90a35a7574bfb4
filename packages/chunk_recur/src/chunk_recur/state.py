"""What flows through the chunks (`State`) and what may stand beside them (`ChunkStore`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from typing_extensions import Protocol

Phase: TypeAlias = Literal["fill", "walk"]
Phase.__doc__ = 'The pass that a step runs in: "fill" forward, without grad; "walk" with grad, before its backward.'
PyTree: TypeAlias = Any
Step: TypeAlias = Callable[[int, Any, PyTree, Phase], tuple[Tensor | None, PyTree]]
Around: TypeAlias = Callable[[Phase], AbstractContextManager[Any]]

_METHODS = ("open", "close", "abort")


class ChunkStore(Protocol):
    """Memory that a step reads and writes beside the carried state, such as pages of keys and values.

    Every chunk is announced twice, once a phase: `open`, the step, (in the walk: the chunk's backward), `close`.
    The last chunk is announced once, as "walk". Stores are opened in order and closed in reverse order; `open`
    runs in the grad mode of its phase, `close` without grad. One store serves one loss at a time: a later loss that
    is given a store takes it over, and the earlier loss can no longer be walked back.
    """

    def open(self, index: int, phase: Phase) -> None:
        """Prepare for the step of chunk `index`."""
        ...

    def close(self, index: int, phase: Phase) -> None:
        """Finish chunk `index`: after its step, and in phase "walk" after its backward."""
        ...

    def abort(self) -> None:
        """Drop everything, from any state; idempotent. Called when a pass ends, fails, or is never walked back."""
        ...


@dataclass(frozen=True, eq=False)
class State:
    """The state before the first chunk.

    carried: a pytree of tensors and plain values (numbers, strings, None) that the step receives and returns.
             Tensors that require grad (a learned initial state) receive their gradient.
    stores:  opened and closed around every chunk.
    Raises: ValueError if stores is not a sequence of objects with open, close and abort
    """

    carried: PyTree = ()
    stores: tuple[ChunkStore, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.stores, (tuple, list)):
            raise ValueError(
                f"State.stores: expected a tuple of stores, got {type(self.stores).__name__}; write stores=(store,)"
            )
        for place, store in enumerate(self.stores):
            missing = [name for name in _METHODS if not callable(getattr(store, name, None))]
            if missing:
                raise ValueError(
                    f"State.stores[{place}]: expected an object with the methods open(index, phase), "
                    f"close(index, phase) and abort(), got {type(store).__name__} without {', '.join(missing)}"
                )
        if len({id(store) for store in self.stores}) != len(self.stores):
            raise ValueError("State.stores: expected different stores, got the same object twice; name it once")
        object.__setattr__(self, "stores", tuple(self.stores))
