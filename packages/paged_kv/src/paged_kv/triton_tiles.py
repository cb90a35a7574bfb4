"""The tile table: how large a tile each kernel takes, by head dim, dtype and chip. Edit here, and nowhere else.

`benchmarks/attention.py --tune` says which tiles win on a chip; chips that nobody measured get tiles that fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """One kernel's launch shape.

    Units: rows and keys of the tile; stages: depth of the software pipeline; per_sm: programs that fit a multiprocessor
    parts: forward only, the rows are taken in so many parts, one's products beside another's softmax
    ahead: forward only, a tile's softmax runs beside the sum of the tile before
    widest: small windows only, keys of the widest product
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_sm: int = 1
    parts: int = 1
    ahead: bool = False
    widest: int = 128


# (kernel, head dim rounded up to a power of two)
_HOPPER = {
    ("fwd", 64): Tile(128, 128, 4, 3, per_sm=2, parts=2),
    ("fwd", 128): Tile(256, 64, 8, 5, parts=2),
    ("fwd", 256): Tile(128, 64, 8, 2, ahead=True),
    # Where more than 128 rows would often be part empty: chunks of few tokens, and query blocks that read lists.
    ("narrow fwd", 64): Tile(128, 128, 4, 3, per_sm=2, parts=2),
    ("narrow fwd", 128): Tile(128, 64, 4, 3, per_sm=2, parts=2),
    ("narrow fwd", 256): Tile(128, 64, 8, 2),
    # What wide tiles leave of a query block: too few for two programs a multiprocessor.
    ("rest fwd", 128): Tile(128, 64, 8, 5),
    ("dkdv", 64): Tile(64, 64, 4, 3, per_sm=2),
    ("dkdv", 128): Tile(64, 64, 4, 2, per_sm=2),
    ("dkdv", 256): Tile(64, 64, 8, 2),
    ("dq", 64): Tile(64, 64, 4, 5, per_sm=2),
    ("dq", 128): Tile(128, 64, 8, 5),
    ("dq", 256): Tile(128, 64, 8, 1),
}
# Nobody measured these; what Hopper keeps in registers is put into shared memory there.
_BLACKWELL = _HOPPER | {
    ("dq", 64): Tile(128, 64, 4, 2, per_sm=2),
    ("dq", 128): Tile(128, 128, 8, 2),
}
# The kernels for small windows. `keys` is how many queries the rows of "window fwd" and "window dq" are of (of rows /
# keys heads), and what a program of "window dkdv" owns; "more keys": than registers hold the weights of. Head dim 64
# was measured, 128 was not.
_WINDOW = {
    ("window fwd", 64): Tile(64, 16, 4, 1, per_sm=4),
    ("window fwd", 128): Tile(64, 32, 4, 1, per_sm=2, widest=32),
    ("window dq", 64): Tile(64, 32, 4, 3, per_sm=2),
    ("window dq", 128): Tile(64, 32, 4, 1, per_sm=2, widest=32),
    ("window dq, more keys", 64): Tile(64, 64, 4, 3, per_sm=2, widest=64),
    ("window dq, more keys", 128): Tile(64, 32, 4, 1, per_sm=2, widest=32),
    ("window dkdv", 64): Tile(64, 64, 4, 3, per_sm=2),
    ("window dkdv", 128): Tile(64, 64, 8, 2),
}
# Chips with 100 KiB of shared memory for a program, or without asynchronous matrix instructions.
_SMALL = {
    ("fwd", 64): Tile(128, 64, 4, 2),
    ("fwd", 128): Tile(128, 32, 8, 2),
    ("fwd", 256): Tile(64, 32, 8, 1),
    ("dkdv", 64): Tile(64, 64, 8, 1),
    ("dkdv", 128): Tile(32, 64, 8, 1),
    ("dkdv", 256): Tile(16, 32, 8, 1),
    ("dq", 64): Tile(64, 64, 8, 1),
    ("dq", 128): Tile(64, 32, 8, 1),
    ("dq", 256): Tile(32, 16, 8, 1),
}
# float32 runs on the ordinary units. Three tf32 products would be about as exact and faster, but dK and dV so computed
# read outside their memory on Hopper (docs/log.md).
_FLOAT32 = {
    ("fwd", 64): Tile(64, 32, 8, 1),
    ("fwd", 128): Tile(64, 32, 8, 1),
    ("fwd", 256): Tile(32, 16, 8, 1),
    ("dkdv", 64): Tile(32, 32, 8, 1),
    ("dkdv", 128): Tile(32, 32, 8, 1),
    ("dkdv", 256): Tile(16, 16, 8, 1),
    ("dq", 64): Tile(32, 32, 8, 1),
    ("dq", 128): Tile(32, 32, 8, 1),
    ("dq", 256): Tile(16, 16, 8, 1),
}


def tile_for(kernel: str, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The tile of one kernel, as the tables name them, for a padded head dim on a chip of that capability."""
    if kernel.startswith("window"):
        return _WINDOW[kernel, dim]
    if dtype != torch.float32 and capability[0] in (9, 10):
        return (_HOPPER if capability[0] == 9 else _BLACKWELL)[kernel, dim]
    return (_FLOAT32 if dtype == torch.float32 else _SMALL)[kernel.removeprefix("narrow "), dim]
