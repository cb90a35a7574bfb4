"""What is kept of each page to score it by, grown chunk by chunk."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparse_pages.exact import LEAST_EXPONENT, MOST_EXPONENT, integer_bits, largest_dot, ordered_sum, sum_in_turn
from sparse_pages.gpu import triton_for

TILE_ELEMENTS = 1 << 22  # at most so many query-page products, or elements of keys, in the works at once


@runtime_checkable
class Scorer(Protocol):
    """Turns pages and queries into vectors whose dot product says how much a query wants a page.

    Both functions must treat every page and every query by itself (they are called with any number of them), and by
    arithmetic that does not depend on how many there are, if selections are to be the same for all chunk lengths.
    """

    def page_features(self, keys: Tensor) -> Tensor:
        """Shapes: keys [B, N, P, G, D] of complete pages, float32 (float64 for float64) → [B, N, G, F]."""
        ...

    def query_features(self, queries: Tensor) -> Tensor:
        """Shapes: queries [B, C, H, D], float32 (float64 for float64) → [B, C, H, F]."""
        ...


class MeanKey:
    """The logit of a page's mean key."""

    def page_features(self, keys: Tensor) -> Tensor:
        return ordered_sum(keys, 2) / keys.shape[2]

    def query_features(self, queries: Tensor) -> Tensor:
        return queries


class MinMaxKey:
    """The largest logit that a key within the page's bounds could have: Σ_d max(q_d · min_d, q_d · max_d).

    Source: Quest (arXiv 2406.10774)
    """

    def page_features(self, keys: Tensor) -> Tensor:
        return torch.cat([keys.amax(2), keys.amin(2)], -1)

    def query_features(self, queries: Tensor) -> Tensor:
        return torch.cat([queries.clamp(min=0), queries.clamp(max=0)], -1)


class PageSummary:
    """Scores the pages of one layer's keys, kept as the keys come.

    `scorer` is "mean" (the logit of a page's mean key), "minmax" (the bound on its keys' logits) or an object with the
    two functions of `Scorer`. A page is summarized once, when its last key is there, so the summary is bit for bit
    the same however the keys were cut into chunks. What is kept does not require grad.

    With `on_host` the summaries lie in host memory (pinned, where the keys are on a GPU) and come to the keys' device
    when pages are scored, some at a time.

    Units:  page_tokens, tokens in tokens; pages counts the complete ones
    Raises: ValueError for a page length that is not a positive integer, or an unknown scorer
    """

    def __init__(
        self, page_tokens: int, scorer: Literal["mean", "minmax"] | Scorer = "mean", *, on_host: bool = False
    ) -> None:
        self.on_host = on_host
        self.page_tokens = check_integer("page_tokens", page_tokens, 1)
        self.scorer = _scorer(scorer)
        self._tail: Tensor | None = None  # [B, < P, G, D]: keys of the page that is not complete
        self._features: Tensor | None = None  # [B, >= pages, G, F]
        self._pages = 0

    @property
    def pages(self) -> int:
        """Complete pages."""
        return self._pages

    @property
    def tokens(self) -> int:
        """Keys appended."""
        return self._pages * self.page_tokens + (0 if self._tail is None else self._tail.shape[1])

    def append(self, k: Tensor) -> int:
        """Add a chunk's keys, after rotary embedding, as attention will see them.

        Shapes: k [B, C, G, D], any C; B, G, D, dtype and device are those of the first call
        Returns: tokens appended so far
        Raises: ValueError for other shapes, dtypes or devices; nothing is changed then
        """
        self._check_keys(k)
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(k.device.type, enabled=False):
            whole_pages = self._tail is None or self._tail.shape[1] == 0
            keys = k.detach() if whole_pages else torch.cat([self._tail, k.detach()], 1)  # type: ignore[list-item]
            B, tokens, G, D = keys.shape
            P, new_pages = self.page_tokens, tokens // self.page_tokens
            tail = keys[:, new_pages * P :].clone()  # a view would keep the chunk alive, and change with it
            if new_pages and not self._add_means(keys[:, : new_pages * P]):
                paged = keys[:, : new_pages * P].reshape(B, new_pages, P, G, D)
                step = max(1, TILE_ELEMENTS // (B * P * G * D))
                self._store([self._page_features(paged[:, i : i + step]) for i in range(0, new_pages, step)])
            self._pages += new_pages
            self._tail = tail
        return self.tokens

    def scores(
        self, q: Tensor, first_page: int = 0, last_page: int | None = None, real: Tensor | None = None
    ) -> Tensor:
        """How much each block of queries wants each of the pages [first_page, last_page).

        score(block, page) = the largest, over the block's queries, of Σ over the query heads of a KV head of
        query_features · page_features. A block is page_tokens queries; the last may have fewer.

        Shapes: q [B, C, H, D], its first query the first of a block; Q = ceil(C / page_tokens), N pages; real [B, C]
            bool, which queries count (padding does not); default all
        Returns: [B, G, Q, N] float64, the same bits however the queries and pages are cut, and on every device; -inf
            for a block of which no query counts
        Raises: ValueError if q or real does not fit, or the pages are not there
        """
        self.check_queries(q, real)
        last_page = self._pages if last_page is None else last_page
        if not 0 <= first_page <= last_page <= self._pages:
            raise ValueError(f"pages [{first_page}, {last_page}) are not among the {self._pages} complete pages")
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if first_page == last_page:
                blocks = -(-q.shape[1] // self.page_tokens)
                return q.new_empty(q.shape[0], self._like().shape[2], blocks, 0, dtype=torch.float64)
            assert self._features is not None
            kernels = triton_for(q)
            if kernels is None:
                return self._tiled_scores(q, first_page, last_page, real)
            bits, bounds = integer_bits(self._features.shape[3]), (LEAST_EXPONENT, MOST_EXPONENT)
            queries = q.detach() if type(self.scorer) is MeanKey else self._of_queries(q)
            pages = self._features[:, first_page:last_page].to(q.device, non_blocking=True)
            return kernels.scores(queries, pages, self.page_tokens, bits, bounds, real)

    def _tiled_scores(self, q: Tensor, first_page: int, last_page: int, real: Tensor | None) -> Tensor:
        assert self._features is not None
        B, C, _, _ = q.shape
        G, P = self._like().shape[2], self.page_tokens
        N, Q = last_page - first_page, -(-C // P)
        out = torch.empty(B, G, Q, N, dtype=torch.float64, device=q.device)
        page_step = min(N, max(1, TILE_ELEMENTS // (B * G * P)))
        block_step = max(1, TILE_ELEMENTS // (B * G * P * page_step))
        for i in range(0, Q, block_step):
            tokens = slice(i * P, (i + block_step) * P)
            queries = sum_in_turn(self._of_queries(q[:, tokens]).unflatten(2, (G, -1)), 3)
            counted = None if real is None else real[:, tokens]
            whole = queries.shape[1] // P * P  # the ragged end is a block of its own length
            for j in range(0, N, page_step):
                pages = self._features[:, first_page + j : min(first_page + j + page_step, last_page)].to(q.device)
                tile = out[:, :, i : i + block_step, j : j + page_step]
                if whole:
                    flags = None if counted is None else counted[:, :whole].unflatten(1, (-1, P))
                    tile[:, :, : whole // P] = largest_dot(queries[:, :whole].unflatten(1, (-1, P)), pages, flags)
                if whole < queries.shape[1]:
                    flags = None if counted is None else counted[:, None, whole:]
                    tile[:, :, whole // P :] = largest_dot(queries[:, None, whole:], pages, flags)
        return out

    def check_queries(self, q: Tensor, real: Tensor | None = None) -> None:
        """Raise ValueError unless q [B, C, H, D] goes with the keys appended, and real [B, C] with q."""
        like = self._like()
        B, _, G, D = like.shape
        if not isinstance(q, Tensor) or q.dim() != 4 or not q.is_floating_point() or 0 in q.shape:
            raise ValueError(f"q must be a floating-point tensor [B, C, H, D], none of them 0, got {_name(q)}")
        if q.shape[0] != B or q.shape[3] != D or q.shape[2] % G:
            raise ValueError(f"q must be [{B}, C, a multiple of {G}, {D}] to go with the keys, got {tuple(q.shape)}")
        if q.device != like.device:
            raise ValueError(f"q must be on {like.device} as the keys are, got {q.device}")
        if real is None:
            return
        if not isinstance(real, Tensor) or real.dtype != torch.bool or real.shape != q.shape[:2]:
            raise ValueError(f"real must be a bool tensor [{B}, {q.shape[1]}], one for each query, got {_name(real)}")
        if real.device != q.device:
            raise ValueError(f"real must be on {q.device} as q is, got {real.device}")

    def _like(self) -> Tensor:
        """A tensor [B, some, G, D] with the keys' dtype and device."""
        if self._tail is None:
            raise ValueError("the summary is empty: append the chunk's keys first")
        return self._tail

    def _check_keys(self, k: Tensor) -> None:
        if not isinstance(k, Tensor) or k.dim() != 4 or not k.is_floating_point() or 0 in (k.shape[0], *k.shape[2:]):
            raise ValueError(f"k must be a floating-point tensor [B, C, G, D], B, G and D not 0, got {_name(k)}")
        if self._tail is None:
            return
        like = self._tail
        if (k.shape[0], *k.shape[2:], k.dtype, k.device) != (like.shape[0], *like.shape[2:], like.dtype, like.device):
            B, _, G, D = like.shape
            raise ValueError(f"k must be [{B}, C, {G}, {D}] {like.dtype} on {like.device} as before, got {_name(k)}")

    def _page_features(self, keys: Tensor) -> Tensor:
        features = self.scorer.page_features(self._wide(keys))
        width = None if self._features is None else self._features.shape[3]
        return _checked(features, "page_features", (keys.shape[0], keys.shape[1], keys.shape[3]), width)

    def _of_queries(self, q: Tensor) -> Tensor:
        """[B, C, H, F]"""
        assert self._features is not None
        width = self._features.shape[3]
        return _checked(self.scorer.query_features(self._wide(q)), "query_features", tuple(q.shape[:3]), width)

    def _wide(self, x: Tensor) -> Tensor:
        """What a scorer is handed; others' may write into it, and must not into what attention reads."""
        ours = type(self.scorer) in (MeanKey, MinMaxKey)
        return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=not ours)

    def _add_means(self, keys: Tensor) -> bool:
        """Summarize whole pages [B, N * P, G, D] by one kernel; False where none serves."""
        kernels = triton_for(keys) if type(self.scorer) is MeanKey and not self.on_host else None
        if kernels is None:
            return False
        B, tokens, G, D = keys.shape
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        features = self._grown(self._pages + tokens // self.page_tokens, keys.new_empty(B, 0, G, D, dtype=dtype))
        return kernels.mean_keys(keys, self.page_tokens, features, self._pages)

    def _store(self, features: list[Tensor]) -> None:
        total = self._pages + sum(part.shape[1] for part in features)
        room = self._grown(total, features[0])
        room[:, self._pages : total].copy_(torch.cat(features, 1), non_blocking=True)

    def _grown(self, total: int, like: Tensor) -> Tensor:
        """The features, with room for so many pages."""
        if self._features is None or self._features.shape[1] < total:
            room = self._room(like, max(total, 2 * self._pages))
            if self._features is not None:
                room[:, : self._pages] = self._features[:, : self._pages]
            self._features = room
        return self._features

    def _room(self, like: Tensor, pages: int) -> Tensor:
        """Memory for so many pages' features."""
        B, _, G, F = like.shape
        if not self.on_host:
            return like.new_empty(B, pages, G, F)
        if like.is_cuda and self._features is not None:  # what is about to be copied by the host may be on its way
            torch.cuda.current_stream(like.device).synchronize()
        return torch.empty(B, pages, G, F, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def check_integer(name: str, value: object, least: int) -> int:
    """The value, if it is an integer of at least `least`; else ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _scorer(scorer: object) -> Scorer:
    if scorer == "mean":
        return MeanKey()
    if scorer == "minmax":
        return MinMaxKey()
    if isinstance(scorer, Scorer) and not isinstance(scorer, type):
        return scorer
    raise ValueError(
        f"scorer must be 'mean', 'minmax' or an object with page_features and query_features, got {scorer!r}"
    )


def _checked(features: Tensor, name: str, lead: tuple[int, ...], width: int | None) -> Tensor:
    """What a scorer returned, if it has the shape [*lead, width]; float32, or float64 if it was."""
    wanted = f"[{', '.join(map(str, lead))}, {'F' if width is None else width}]"
    good = isinstance(features, Tensor) and features.is_floating_point() and features.dim() == 4
    if not good or features.shape[:3] != lead or features.shape[3] != (width or features.shape[3] or 1):
        raise ValueError(f"the scorer's {name} must return a floating-point tensor {wanted}, got {_name(features)}")
    return features if features.dtype == torch.float64 else features.float()


def _name(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
