"""The reference backend's rule in one place: does a tile of queries see none of some keys, all, or a masked part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .past import Geometry, Segment


@dataclass(frozen=True)
class Keys:
    """A block of keys: some pages of a segment, or some tokens of the own block (segment None).

    Units: starts [B] position of each sequence's first key; counts [B] keys each sequence has here; size = max(counts);
        column: first column of the segment's table, or first token of the own block
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    size: int
    segment: Segment | None
    column: int


class Visibility:
    """The geometry of one call, made ready to be asked about (tile of queries, block of keys) pairs.

    Shapes: tiles [(first, end) query of the block]; device is that of documents and selected
    """

    def __init__(self, geometry: Geometry, tokens: int, device: torch.device, tiles: list[tuple[int, int]]) -> None:
        self.geometry = geometry
        self.tiles = tiles
        self.lengths = torch.tensor(geometry.lengths, device=device)[:, None]  # [B, 1] int64
        self.queries = self.lengths + torch.arange(tokens, device=device)  # [B, C] positions
        self.low = self._low()
        # Per tile and sequence: no query sees a key before `lowest`; every query sees all keys from `highest` on.
        zeros = [0] * len(geometry.lengths)
        self.lowest, self.highest = [zeros] * len(tiles), [zeros] * len(tiles)
        if self.low is not None:
            parts = [self.low[:, c0:c1] for c0, c1 in tiles]
            bounds = torch.stack([torch.stack((part.amin(1), part.amax(1))) for part in parts]).tolist()
            self.lowest, self.highest = [low for low, _ in bounds], [high for _, high in bounds]

    def _low(self) -> Tensor | None:
        """[B, C] the first position each query may see, or None when nothing bounds it."""
        window, documents = self.geometry.window, self.geometry.documents
        low = None if window is None else self.queries - (window - 1)
        if documents is None:
            return low
        return documents.long() if low is None else torch.maximum(low, documents)

    def tiles_of(self, keys: Keys) -> list[tuple[int, Tensor | None]]:
        """The tiles that see any of these keys, each with its mask [B, 1 or G, queries, S], None where all is seen."""
        found = [(t, self._sees_all(t, keys)) for t in range(len(self.tiles)) if self._sees_any(t, keys)]
        if self.geometry.selected is None:
            return [(t, None if whole else self._mask(t, keys)) for t, whole in found]
        if not found:
            return []
        picked = self._picked(keys)
        result: list[tuple[int, Tensor | None]] = []
        for t, whole in found:
            mask = self._picked_mask(t, keys, picked)
            if mask is not None:
                result.append((t, mask if whole else mask & self._mask(t, keys)))
        return result

    def named(self, keys: Keys) -> Tensor:
        """[B, S] whether some list names the page that each key lies in."""
        pages = self._picked(keys).flatten(1, 2).any(1)
        columns = self._positions(keys) // self.geometry.page_tokens
        return pages.gather(1, columns - columns[:, :1])

    def _sees_any(self, tile: int, keys: Keys) -> bool:
        if keys.segment is None and keys.column >= self.tiles[tile][1]:
            return False
        return any(n and start + n > low for start, n, low in zip(keys.starts, keys.counts, self.lowest[tile]))

    def _sees_all(self, tile: int, keys: Keys) -> bool:
        if keys.segment is None and keys.column + keys.size - 1 > self.tiles[tile][0]:
            return False
        return all(
            n == keys.size and start >= high for start, n, high in zip(keys.starts, keys.counts, self.highest[tile])
        )

    def _mask(self, tile: int, keys: Keys) -> Tensor:
        """[B, 1, queries, S]: causal, window, documents, and each sequence's end."""
        c0, c1 = self.tiles[tile]
        positions = self._positions(keys)[:, None]  # [B, 1, S]
        if keys.segment is None:
            mask = positions <= self.queries[:, c0:c1, None]
        else:
            mask = (positions < self.lengths[..., None]).expand(-1, c1 - c0, -1)
        if self.low is not None:
            mask = mask & (positions >= self.low[:, c0:c1, None])
        return mask[:, None]

    def _positions(self, keys: Keys) -> Tensor:
        """[B, S]"""
        device = self.queries.device
        return torch.tensor(keys.starts, device=device)[:, None] + torch.arange(keys.size, device=device)

    def _picked(self, keys: Keys) -> Tensor:
        """[B, 1 or G, Q, pages] whether a query block selects each page that the keys lie in."""
        selected, page = self.geometry.selected, self.geometry.page_tokens
        assert selected is not None
        first = [start // page for start in keys.starts]
        pages = max((start + keys.size - 1) // page - f for start, f in zip(keys.starts, first)) + 1
        column = selected.long() - torch.tensor(first, device=selected.device)[:, None, None, None]
        inside = (selected >= 0) & (column >= 0) & (column < pages)
        picked = torch.zeros((*selected.shape[:3], pages + 1), dtype=torch.bool, device=selected.device)
        return picked.scatter_(3, torch.where(inside, column, pages), True)[..., :pages]

    def _picked_mask(self, tile: int, keys: Keys, picked: Tensor) -> Tensor | None:
        """[B, 1 or G, queries, S], or None when the tile's query blocks select none of these pages."""
        page = self.geometry.page_tokens
        c0, c1 = self.tiles[tile]
        rows = self.queries[:, c0:c1] // page - self.lengths // page  # [B, queries]
        columns = self._positions(keys) // page
        columns = columns - columns[:, :1]  # [B, S]
        batch, heads, _, pages = picked.shape
        of_queries = picked.gather(2, rows[:, None, :, None].expand(batch, heads, -1, pages))
        if not of_queries.any():
            return None
        return of_queries.gather(3, columns[:, None, None, :].expand(batch, heads, c1 - c0, -1))
