"""Boxes of keys and of rows: described by the host where the chip fetches them itself, by the kernel elsewhere.

A box that the host describes is read number by number by a chip that has no unit for it (before sm_90). Strides that
the compiler knows let it fetch 16 bytes at once, ahead of their use.

Letters: B batch · C chunk tokens · P tokens a page · G KV heads · D head dim · M rows
"""

import triton
import triton.language as tl


@triton.jit
def _key_boxes(
    k, v, tokens, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    POINTERS: tl.constexpr,
):  # fmt: skip
    """Tiles of one head's tokens in [slots, tokens, G, D]: of pages, or of the own block, one long page a sequence."""
    if POINTERS:
        page = tl.cast(tokens, tl.int64) * (GROUPS * HEAD_DIM)
        k = tl.make_tensor_descriptor(k, [2147483647, GROUPS, tokens, HEAD_DIM],
                                      [page, HEAD_DIM, GROUPS * HEAD_DIM, 1], [1, 1, BLOCK_N, DIM])  # fmt: skip
        v = tl.make_tensor_descriptor(v, [2147483647, GROUPS, tokens, HEAD_DIM],
                                      [page, HEAD_DIM, GROUPS * HEAD_DIM, 1], [1, 1, BLOCK_N, DIM])  # fmt: skip
    return k, v


@triton.jit
def _row_boxes(
    q, dout, rows, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, POINTERS: tl.constexpr
):  # fmt: skip
    """Tiles of rows in [B * G, M, D]."""
    if POINTERS:
        block = tl.cast(rows, tl.int64) * HEAD_DIM
        q = tl.make_tensor_descriptor(q, [2147483647, rows, HEAD_DIM], [block, HEAD_DIM, 1], [1, BLOCK_M, DIM])
        dout = tl.make_tensor_descriptor(dout, [2147483647, rows, HEAD_DIM], [block, HEAD_DIM, 1], [1, BLOCK_M, DIM])
    return q, dout
