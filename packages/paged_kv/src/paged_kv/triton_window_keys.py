"""The keys that a small window sees, wherever they lie, and which of them a row sees.

Places count from the chunk's first token: negative ones are past.

Letters: B batch · C chunk tokens · P tokens a page · G KV heads · D head dim · W window
"""

import triton
import triton.language as tl


@triton.jit
def _page_rows(
    table_ptr, position, first, columns, group, exists, GROUPS: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Rows of [slots * P * G] where positions of the past lie by a table of slots, and which of them are there."""
    column = (position - first) // PAGE
    exists = exists & (position >= first) & (column < columns)
    slot = tl.load(table_ptr + column, mask=exists, other=-1)
    exists = exists & (slot >= 0)
    return (tl.maximum(slot, 0).to(tl.int64) * PAGE + position % PAGE) * GROUPS + group, exists


@triton.jit
def _window_tiles(
    k_own, v_own, k_pages, v_pages, table_ptr, base, length, first, columns, tokens, batch, group,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):  # fmt: skip
    """Keys and values from place `base` on in tiles of WIDTHS, zeros where there are none, and which exist.

    Only places come out of the branch: 16-bit values would be packed and unpacked on their way.
    """
    TILES: tl.constexpr = len(WIDTHS)
    dims = tl.arange(0, DIM)[None, :]
    k_tiles = ()
    v_tiles = ()
    exists_tiles = ()
    for i in tl.static_range(TILES):
        place = base + STARTS[i] + tl.arange(0, WIDTHS[i])
        exists = place < tokens
        own = (((batch * tokens).to(tl.int64) + place) * GROUPS + group) * HEAD_DIM
        k_ptrs = k_own + own
        v_ptrs = v_own + own
        if base + STARTS[i] < 0:
            past = (place < 0) & (length + place >= 0)
            row, past = _page_rows(table_ptr, tl.maximum(length + place, 0), first, columns, group, past, GROUPS,
                                   PAGE)  # fmt: skip
            k_ptrs = tl.where(past, k_pages + row * HEAD_DIM, k_ptrs)
            v_ptrs = tl.where(past, v_pages + row * HEAD_DIM, v_ptrs)
            exists = past | (exists & (place >= 0))
        inside = exists[:, None] & (dims < HEAD_DIM)
        # rows begin at multiples of 16 bytes, which the compiler forgets across the branch
        k_rows = tl.multiple_of(k_ptrs[:, None] + dims, [1, 16])
        v_rows = tl.multiple_of(v_ptrs[:, None] + dims, [1, 16])
        k_tiles += (tl.load(k_rows, mask=inside, other=0.0),)  # type: ignore[assignment]
        v_tiles += (tl.load(v_rows, mask=inside, other=0.0),)  # type: ignore[assignment]
        exists_tiles += (exists,)  # type: ignore[assignment]
    return k_tiles, v_tiles, exists_tiles


@triton.jit
def _window_keys(
    k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, one_length, first_query, columns, first,
    tokens, batch, group, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """All that QUERIES queries from `first_query` on see: keys and values in tiles, which exist, and from which of them
    on each of the tile's rows may look."""
    length = one_length
    if not UNIFORM:
        length = tl.load(lengths_ptr + batch)
    base = first_query - WINDOW
    low = tl.zeros([QUERIES * SHARE], tl.int32)
    if DOCUMENTS:
        query = tl.minimum(first_query + tl.arange(0, QUERIES * SHARE) // SHARE, tokens - 1)
        low = tl.load(documents_ptr + batch * tokens + query) - length - base
    k, v, exists = _window_tiles(k_own, v_own, k_pages, v_pages, slots_ptr + batch.to(tl.int64) * columns, base, length,
                                 first, columns, tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, STARTS,
                                 WIDTHS)  # fmt: skip
    return k, v, exists, low


@triton.jit
def _own_keys(
    k_own, v_own, first_query, tokens, batch, group, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """As _window_keys for queries whose whole window lies in the own block: no key is missing, but behind the end."""
    TILES: tl.constexpr = len(WIDTHS)
    base = first_query - WINDOW
    dims = tl.arange(0, DIM)[None, :]
    first = (((batch * tokens).to(tl.int64) + base) * GROUPS + group) * HEAD_DIM
    k_tiles = ()
    v_tiles = ()
    for i in tl.static_range(TILES):
        key = STARTS[i] + tl.arange(0, WIDTHS[i])
        offsets = key[:, None] * (GROUPS * HEAD_DIM) + dims
        inside = (base + key < tokens)[:, None] & (dims < HEAD_DIM)
        k_tiles += (tl.load(k_own + first + offsets, mask=inside, other=0.0),)  # type: ignore[assignment]
        v_tiles += (tl.load(v_own + first + offsets, mask=inside, other=0.0),)  # type: ignore[assignment]
    return k_tiles, v_tiles


@triton.jit
def _seen(
    x, other, behind, low, exists, WINDOW: tl.constexpr, QUERIES: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """`other` where a row does not see the key. Row r is query `behind[r]`, whose window begins behind that key.

    LIMITED: keys may be missing, or lie before the row's `low`.
    """
    key = START + tl.arange(0, WIDTH)[None, :]
    if START < QUERIES:
        x = tl.where(key > behind[:, None], x, other)
    if START + WIDTH > WINDOW + 1:
        x = tl.where(key <= behind[:, None] + WINDOW, x, other)
    if LIMITED:
        x = tl.where(exists[None, :] & (key >= low[:, None]), x, other)
    return x
