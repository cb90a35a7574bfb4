"""One batch as a chunked step reads it: checked, shifted and cut, still in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens [start, stop) of every sequence; on the host until a step moves them."""

    start: int
    stop: int
    ids: Tensor  # [B, C]
    positions: Tensor  # [B, C]
    targets: Tensor  # [B, C] the next token's label, IGNORED where there is none
    documents: Tensor | None  # [B, C] int32, position in the sequence where each token's document begins
    real: Tensor | None  # [B, C] bool, False on padding


@dataclass(frozen=True, eq=False)
class Batch:
    """Shapes: ids, positions, targets, documents, real [B, T]"""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    documents: Tensor | None
    real: Tensor | None
    num_items: float

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def cut(self, chunk_tokens: int) -> Chunks:
        return Chunks(self, chunk_tokens)


@dataclass(frozen=True, eq=False)
class Chunks(Sequence[Chunk]):
    """The chunks of a batch, cut when asked for."""

    batch: Batch
    chunk_tokens: int

    def __len__(self) -> int:
        return -(-self.batch.tokens // self.chunk_tokens)

    def bounds(self, index: int) -> tuple[int, int]:
        start = index * self.chunk_tokens
        return start, min(start + self.chunk_tokens, self.batch.tokens)

    def __getitem__(self, index: int) -> Chunk:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = self.bounds(index)

        b, part = self.batch, slice(start, stop)
        documents, real = (None if rows is None else rows[:, part] for rows in (b.documents, b.real))
        return Chunk(start, stop, b.ids[:, part], b.positions[:, part], b.targets[:, part], documents, real)

    def __iter__(self) -> Iterator[Chunk]:
        return (self[i] for i in range(len(self)))


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without the CPU waiting for what the device has been given before."""
    if device.type != "cpu":
        # rows that share memory (positions of a batch) cannot be pinned as they are; torch knows when a copy has ended
        rows = rows.contiguous().pin_memory()
    return rows.to(device, non_blocking=True)


def prepare(
    input_ids: Tensor,
    *,
    vocab_size: int,
    label_size: int,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> Batch:
    """Check a batch as a user gives it and bring it into the form the chunks are cut from.

    Shapes: input_ids, labels, attention_mask, document_ids [B, T]; position_ids [B, T] or [1, T]
    Raises: ValueError, before anything has run, for whatever a chunked step would get wrong
    """
    ids = _ids(input_ids, vocab_size)
    real = _real(attention_mask, ids)
    positions, documents = _positions_and_documents(position_ids, document_ids, ids)
    targets = _targets(labels, ids, real, documents, label_size)
    valid = int((targets != IGNORED).sum())
    if num_items is None:
        if valid == 0:
            raise ValueError(
                "no token has a label (all are -100, padding, or the last of their document): nothing to learn from; "
                "give num_items if this batch is part of a larger one"
            )
        num_items = valid
    if isinstance(num_items, bool):
        raise ValueError(f"num_items must be a positive number, got {num_items}")
    num_items = float(num_items)
    if not 0 < num_items < float("inf"):
        raise ValueError(f"num_items must be a positive number, got {num_items}")
    return Batch(ids, positions, targets, documents, real, num_items)


def _ids(input_ids: Tensor, vocab_size: int) -> Tensor:
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or _not_integers(input_ids):
        got = (
            f"{tuple(input_ids.shape)} {input_ids.dtype}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise ValueError(f"input_ids must be an integer tensor of shape [batch, tokens], got {got}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty: {tuple(input_ids.shape)}")
    ids = input_ids.detach().to("cpu", torch.int64, copy=True)  # a caller may fill its buffer again
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must lie in [0, {vocab_size}), the model's vocabulary; got ids from {low} to {high}"
        )
    return ids


def _not_integers(rows: Tensor) -> bool:
    return rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool


def _rows(name: str, rows: Tensor, ids: Tensor, *, boolean: bool = False, broadcast: bool = False) -> Tensor:
    shapes = {tuple(ids.shape)} | ({(1, ids.shape[1])} if broadcast else set())
    if not isinstance(rows, Tensor) or tuple(rows.shape) not in shapes:
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {got}")
    if not boolean and _not_integers(rows):
        raise ValueError(f"{name} must be an integer tensor, got {rows.dtype}")
    rows = rows.detach().to("cpu", copy=True)
    return (rows if boolean else rows.to(torch.int64)).expand_as(ids)


def _real(attention_mask: Tensor | None, ids: Tensor) -> Tensor | None:
    if attention_mask is None:
        return None
    mask = _rows("attention_mask", attention_mask, ids, boolean=True)
    real = mask != 0
    if not bool((real == mask).all()):
        raise ValueError("attention_mask must hold only zeros and ones: additive masks are not understood here")
    if not bool(real[:, 0].all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
        row = int((~real[:, 0] | (real[:, 1:] & ~real[:, :-1]).any(1)).nonzero()[0])
        raise ValueError(
            f"attention_mask pads row {row} on the left or in the middle: pad on the right, so that every row "
            f"begins with "
            "a real token (tokenizer.padding_side = 'right')"
        )
    return None if bool(real.all()) else real


def _positions_and_documents(
    position_ids: Tensor | None, document_ids: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    arange = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # whatever the default device is
    positions = None
    if position_ids is not None:
        positions = _rows("position_ids", position_ids, ids, broadcast=True)
        if int(positions.min()) < 0:
            raise ValueError(f"position_ids must not be negative, got {int(positions.min())}")
    if document_ids is not None:
        rows = _rows("document_ids", document_ids, ids)
        begins = rows[:, 1:] != rows[:, :-1]
        for row, changes in zip(rows, begins.sum(1), strict=True):
            if len(row.unique()) != int(changes) + 1:
                raise ValueError(
                    "document_ids must give each document one run of neighbouring tokens; an id returns after another"
                )
    elif positions is not None:
        begins = positions.diff(dim=1) != 1  # as transformers reads packed position ids
    else:
        return arange, None
    if not bool(begins.any()):
        return (arange if positions is None else positions), None
    starts = torch.where(torch.nn.functional.pad(begins, (1, 0), value=True), arange, 0).cummax(1).values
    return (arange - starts if positions is None else positions), starts.to(torch.int32)


def _targets(
    labels: Tensor | None, ids: Tensor, real: Tensor | None, documents: Tensor | None, label_size: int
) -> Tensor:
    if labels is None:
        labels = ids if real is None else ids.masked_fill(~real, IGNORED)
    else:
        labels = _rows("labels", labels, ids)
    valid = labels[labels != IGNORED]
    if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= label_size):
        raise ValueError(
            f"labels must be {IGNORED} or lie in [0, {label_size}), the model's head; got values from "
            f"{int(valid.min())} "
            f"to {int(valid.max())}"
        )
    if real is not None and bool((labels[~real] != IGNORED).any()):
        raise ValueError(f"labels must be {IGNORED} wherever attention_mask is 0")
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if documents is not None:
        targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    return targets
