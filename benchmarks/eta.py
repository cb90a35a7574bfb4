"""How early is the end of a step known? Predicted over actual seconds of a step, by the share of it that has passed.

    python -m benchmarks.eta --tokens 16384 --chunk-tokens 512

The first row of each step is what the bar of `oomb train` reckons with in a first step (two speeds, fitted), the second
step's is the step before; "one rate" is what a bar shows that takes all chunks for equal.
"""

from __future__ import annotations

import argparse
import time

import torch

from oomb import ChunkConfig, chunked_backward
from oomb.eta import ModelWork, StepClock, passes
from oomb.tiny import tiny_model

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    given = parser.parse_args()
    config = ChunkConfig(chunk_tokens=given.chunk_tokens)
    model = tiny_model(given.tokens, 0)
    ids = torch.randint(0, 256, (1, given.tokens), generator=torch.Generator().manual_seed(0))
    chunked_backward(model, ids[:, : 4 * given.chunk_tokens], config=config)  # a probe, and caches
    work, before = ModelWork.of(model), None
    print("of a step    " + "".join(f"{share:>8.0%}" for share in SHARES))
    for step in (1, 2):
        told: list[tuple[float, float, float]] = []  # seconds passed, predicted, predicted by one rate
        clocks: list[StepClock] = []
        began = ticked = time.perf_counter()

        def chunk(done: int, total: int) -> None:
            nonlocal ticked
            if done == 1:
                clocks.append(StepClock(passes(work, given.tokens, total), before))  # noqa: B023
            now = time.perf_counter()
            clocks[0].tick(now - ticked)  # noqa: B023
            ticked = now
            told.append((now - began, clocks[0].whole(), (now - began) * total / done))  # noqa: B023

        chunked_backward(model, ids, config=config, progress=chunk)
        actual, before = time.perf_counter() - began, clocks[0].seconds
        for name, column in ((f"step {step}", 1), ("  one rate", 2)):
            at = [next(row[column] for row in told if row[0] >= share * actual) for share in SHARES]
            print(f"{name:<13}" + "".join(f"{predicted / actual:>8.2f}" for predicted in at))


if __name__ == "__main__":
    main()
