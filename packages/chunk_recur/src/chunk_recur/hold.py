"""Which loss holds which stores, and the promise that every hold ends with `abort` on each of them."""

from __future__ import annotations

from chunk_recur.state import ChunkStore, Phase

# A store outlives the losses that use it, and only the latest of them may touch it: without this record the abort of a
# forgotten loss, whenever the garbage collector gets to it, would empty the store under its successor. By id, because
# stores need not be hashable; an entry keeps its stores alive, so no id is reused while it is listed.
_HOLDS: dict[int, Hold] = {}


class Hold:
    """The stores of one loss, from its first chunk until they are released."""

    def __init__(self, stores: tuple[ChunkStore, ...]) -> None:
        self._stores = stores
        self.released: str | None = None  # why, once it has happened
        for store in stores:
            earlier = _HOLDS.get(id(store))
            if earlier is not None:
                earlier.release("a later loss took over one of its stores")
        _HOLDS.update({id(store): self for store in stores})

    def open(self, index: int, phase: Phase) -> None:
        """Open every store for a chunk, in order."""
        self._check()
        for store in self._stores:
            store.open(index, phase)

    def close(self, index: int, phase: Phase) -> None:
        """Close every store, in reverse order."""
        self._check()
        for store in reversed(self._stores):
            store.close(index, phase)

    def release(self, why: str, error: BaseException | None = None) -> None:
        """Abort every store, even when one fails to; once.

        error: what ended the pass, if something did. A failing abort is then noted on it, and otherwise raised.
        """
        if self.released is not None:
            return
        self.released = why
        failure: BaseException | None = None
        stores, self._stores = self._stores, ()
        for store in stores:
            if _HOLDS.get(id(store)) is self:
                del _HOLDS[id(store)]
            try:
                store.abort()
            except BaseException as abort_error:  # an interrupt too must not keep the next store from its abort
                failure = failure or abort_error
        if failure is None:
            return
        if error is None:
            raise failure
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"In addition, the abort of a store failed: {failure!r}")

    def _check(self) -> None:
        if self.released is not None:
            raise RuntimeError(f"the stores of this loss were released: {self.released}; give each loss its own stores")
