"""One decode step as a CUDA graph: a launch of one's own for each kernel is what small steps spend their time on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .resident import PagedKV

T = TypeVar("T")


class DecodeGraph(Generic[T]):
    """A decode step, captured once and replayed for other tokens, lengths and pages, and for other sequences as many.

    `run` reads its input from tensors that the caller writes in place, appends to every layer of the cache's open block
    and attends with [T, H, D]; what it returns is overwritten by each replay. It is run a few times before it is
    captured, on the block that is open then, so it must change nothing else that matters. Each step is
    `kv.extend({sequence: 1, …})`, then `replay()`; everything that moves with the step lies in the cache's device
    tables, which `extend` updates in place.

    Raises: ValueError where there is no CUDA device, no block is open, or the block has too many tokens for addresses
        that stay
    """

    def __init__(self, kv: PagedKV, run: Callable[[], T], *, warmup: int = 2) -> None:
        if kv.pool.device.type != "cuda":
            raise ValueError(
                f"DecodeGraph: expected a cache on a CUDA device, got {kv.pool.device}; run the step as it is"
            )
        if kv.block is None or any(kv.appended(layer) for layer in range(kv.pool.layers)):
            raise ValueError("DecodeGraph: expected a block just opened by extend({sequence: 1, …}), not yet appended")
        self._kv, self._tokens = kv, kv.block.tokens
        self._step = kv.step()
        if not self._step.fixed:
            raise ValueError(
                f"DecodeGraph: a block of {sum(self._tokens)} tokens has no fixed addresses; expected a decode step, "
                "or a cache of more max_sequences"
            )
        stream = torch.cuda.Stream(kv.pool.device)
        stream.wait_stream(torch.cuda.current_stream(kv.pool.device))
        with torch.cuda.stream(stream):
            for _ in range(max(1, warmup)):
                run()
                self._layers = [layer for layer in range(kv.pool.layers) if kv.appended(layer)]
                kv.unmark_appended()
        torch.cuda.current_stream(kv.pool.device).wait_stream(stream)
        if len(self._layers) < kv.pool.layers:
            raise ValueError(f"DecodeGraph: the step appended to layers {self._layers} of {kv.pool.layers}, not to all")
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):  # torch's own would be the first graph's, on any device
            self.output = run()
        kv.unmark_appended()
        self.replay()

    def replay(self) -> T:
        """Run the step on the block that is open now, which it appends to.

        Returns: what `run` returned when it was captured, overwritten
        Raises: ValueError if the block is not of the captured form, or was appended to already
        """
        kv = self._kv
        if kv.block is None or kv.block.tokens != self._tokens:
            got = None if kv.block is None else kv.block.tokens
            raise ValueError(
                f"DecodeGraph: captured for a block of {self._tokens} tokens, got {got}; open one like it by extend, "
                "or capture another graph"
            )
        step = kv.step()
        same = all(a.data_ptr() == b.data_ptr() for a, b in zip(self._addresses(self._step), self._addresses(step)))
        if not same:
            raise RuntimeError("DecodeGraph: the cache's device tables have moved since the capture; capture it again")
        kv.mark_appended(self._layers)
        self._graph.replay()
        return self.output

    @staticmethod
    def _addresses(step: object) -> tuple[torch.Tensor, ...]:
        return tuple(value for name, value in vars(step).items() if name != "fixed" and name != "places_on_host")
