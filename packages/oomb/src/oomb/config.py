"""What a chunked step may be told: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sparse_pages import MOST_PAGES, Scorer

AUTO_CHUNK_TOKENS = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class ChunkConfig:
    """How one sequence is cut, where its past lives and how it is attended to.

    Units:  `*_tokens` in tokens, `*_pages` in pages, `*_bytes` in bytes
    Raises: ValueError when a value is not of its kind or two do not fit together
    """

    chunk_tokens: int | Literal["auto"] = "auto"
    page_tokens: int = 128
    attention: Literal["dense", "sparse"] = "dense"
    top_k_pages: int = 64
    recent_pages: int = 16
    sink_pages: int = 1
    first_sparse_layer: int = 0
    select_per_head: bool = False
    scorer: Literal["mean", "minmax"] | Scorer = "mean"  # what a page is scored by: see sparse_pages.PageSummary
    backend: str = "auto"
    accumulate: Literal["owner", "atomic"] = "owner"
    grad_page_dtype: torch.dtype | None = None  # None: float32, float64 for float64 models
    fp32_main_grads: bool = False  # sum parameter gradients over chunks in float32, round into .grad once
    gpu_kv_budget_bytes: int | Literal["auto"] = "auto"  # KV and gradient pages on the device; "auto": what fits
    gpu_keep_budget_bytes: int | Literal["auto"] = "auto"  # outputs of layers and attention kept from the fill
    host_budget_bytes: int | Literal["auto"] = "auto"  # host memory for the rest of both; "auto": what is free
    gpu_selection_budget_bytes: int | None = None  # page summaries and selections on the device; None: all of them
    recompute: Literal["auto", "layer", "chunk"] = "auto"  # what the walk runs again at once; a layer takes less memory
    segment_tokens: int = 32768  # pages in host memory come through the device in runs of this many tokens
    loss_tile_tokens: int | Literal["auto"] = "auto"
    check_recompute: bool = True  # compare recomputed keys with the stored ones

    def __post_init__(self) -> None:
        for name in ("page_tokens", "recent_pages", "segment_tokens"):
            _whole(name, getattr(self, name), 1)
        for name in ("top_k_pages", "sink_pages", "first_sparse_layer"):
            _whole(name, getattr(self, name), 0)
        for name, least in (("gpu_kv_budget_bytes", 1), ("gpu_keep_budget_bytes", 0), ("host_budget_bytes", 1)):
            if getattr(self, name) != "auto":
                _whole(name, getattr(self, name), least, ' byte, or "auto"')
        _one_of("recompute", self.recompute, ("auto", "layer", "chunk"))
        for name in ("chunk_tokens", "loss_tile_tokens"):
            if getattr(self, name) != "auto":
                _whole(name, getattr(self, name), 1, ' or "auto"')
        if self.gpu_selection_budget_bytes is not None:
            _whole("gpu_selection_budget_bytes", self.gpu_selection_budget_bytes, 0, ", or None")
        if self.top_k_pages + self.recent_pages + self.sink_pages > MOST_PAGES:
            raise ValueError(
                f"top_k_pages + recent_pages + sink_pages must be at most {MOST_PAGES} pages, got {self.top_k_pages} + "
                f'{self.recent_pages} + {self.sink_pages}; with a budget that large use attention="dense"'
            )
        if not isinstance(self.scorer, Scorer) or isinstance(self.scorer, type):
            _one_of("scorer", self.scorer, ("mean", "minmax"))
        _one_of("attention", self.attention, ("dense", "sparse"))
        _one_of("accumulate", self.accumulate, ("owner", "atomic"))
        _one_of("backend", self.backend, ("auto", "reference", "triton", "cudnn"))
        if self.grad_page_dtype not in (None, torch.float64, torch.float32, torch.bfloat16):
            raise ValueError(
                f"grad_page_dtype must be torch.float32, torch.bfloat16, torch.float64 or None, got "
                f"{self.grad_page_dtype}"
            )
        if self.attention == "sparse" and self.chunk_tokens != "auto" and self.chunk_tokens % self.page_tokens:
            raise ValueError(
                f"sparse attention selects pages for whole blocks of page_tokens={self.page_tokens} queries: "
                f"chunk_tokens must be a multiple of it, got {self.chunk_tokens}"
            )

    def chunk_length(self, device: torch.device) -> int:
        """Tokens a chunk on this device, with "auto" resolved; a step takes fewer where memory is short (placement)."""
        if self.chunk_tokens != "auto":
            return self.chunk_tokens
        tokens = AUTO_CHUNK_TOKENS.get(device.type, AUTO_CHUNK_TOKENS["cpu"])
        if self.attention == "sparse":  # whole query blocks
            tokens = max(tokens // self.page_tokens, 1) * self.page_tokens
        return tokens


def _whole(name: str, value: object, least: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}{also}, got {value!r}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
