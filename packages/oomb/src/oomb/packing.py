"""Documents into sequences of at most one context: long ones split, short ones packed, nothing cut off."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import IGNORED

OPEN_SEQUENCES = 64  # how many unfinished sequences wait for pieces that fit


@dataclass(frozen=True)
class Tokens:
    """Some tokens of a document, and their labels where those are not the tokens themselves.

    Shapes: ids, labels [T] int32
    """

    ids: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.ids[part], None if self.labels is None else self.labels[part])


@dataclass
class Sequence:
    """Pieces of documents side by side; they do not see each other."""

    pieces: list[Tokens] = field(default_factory=list)
    tokens: int = 0

    def add(self, piece: Tokens) -> None:
        self.pieces.append(piece)
        self.tokens += len(piece)

    def row(self) -> dict[str, np.ndarray]:
        """Columns of a dataset: ids, labels with -100 where nothing is to be learned, where each piece begins."""
        lengths = [len(piece) for piece in self.pieces]
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        labels = [piece.ids if piece.labels is None else piece.labels for piece in self.pieces]
        row = {"input_ids": np.concatenate([piece.ids for piece in self.pieces]), "labels": np.concatenate(labels)}
        row["labels"][starts] = IGNORED  # the first token of a piece has nothing before it
        return {"input_ids": row["input_ids"], "labels": row["labels"], "starts": starts}


@dataclass
class Counts:
    """What became of the documents."""

    documents: int = 0
    tokens: int = 0
    split: int = 0  # longer than a context
    dropped: int = 0  # pieces of a single token, which has nothing to predict
    sequences: int = 0
    unlabelled: int = 0  # sequences dropped because they hold no label to learn
    packed: int = 0  # sequences that hold pieces of more than one document


class Packer:
    """Takes documents, gives sequences; the same ones in the same order for the same documents.

    Whole contexts leave at once. What is left of a document goes to the fullest unfinished sequence that has room.
    """

    def __init__(self, context: int) -> None:
        self.counts = Counts()
        self._context = context
        self._open: list[tuple[int, int, Sequence]] = []  # (free tokens, age, sequence), sorted
        self._age = 0

    def add(self, document: Iterable[Tokens]) -> Iterator[Sequence]:
        """Read a document, part by part. Returns: the sequences that are finished"""
        self.counts.documents += 1
        waiting: list[Tokens] = []
        count, whole = 0, 0
        for part in document:
            self.counts.tokens += len(part)
            while len(part):
                take = part[: self._context - count]
                part = part[len(take) :]
                waiting.append(take)
                count += len(take)
                if count == self._context:
                    yield self._finish([_joined(waiting)])
                    waiting, count, whole = [], 0, whole + 1
        self.counts.split += whole > 0 and whole + (count > 0) > 1
        if count == 1:
            self.counts.dropped += 1
        elif count:
            yield from self._place(_joined(waiting))

    def rest(self) -> Iterator[Sequence]:
        """The sequences that are not full, fullest first."""
        while self._open:
            yield self._finish(self._open.pop(0)[2].pieces)

    def _place(self, piece: Tokens) -> Iterator[Sequence]:
        fits = bisect.bisect_left(self._open, (len(piece), -1))
        if fits < len(self._open):
            free, age, sequence = self._open.pop(fits)
        else:
            self._age += 1
            free, age, sequence = self._context, self._age, Sequence()
        sequence.add(piece)
        bisect.insort(self._open, (free - len(piece), age, sequence))
        if self._open[0][0] < 2 or len(self._open) > OPEN_SEQUENCES:
            yield self._finish(self._open.pop(0)[2].pieces)

    def _finish(self, pieces: list[Tokens]) -> Sequence:
        self.counts.sequences += 1
        self.counts.packed += len(pieces) > 1
        return Sequence(pieces, sum(map(len, pieces)))


def _joined(parts: list[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids for part in parts])
    if all(part.labels is None for part in parts):
        return Tokens(ids)
    return Tokens(ids, np.concatenate([part.ids if part.labels is None else part.labels for part in parts]))


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of `Sequence.row` as one batch, padded on the right where lengths differ.

    `document_ids` are there only if some row holds more than one piece.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    shape = (len(rows), longest)
    ids, real, documents = (torch.zeros(shape, dtype=torch.int64, device="cpu") for _ in range(3))
    batch = {"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}
    for index, row in enumerate(rows):
        count = len(row["input_ids"])
        for name in ("input_ids", "labels"):
            batch[name][index, :count] = torch.from_numpy(np.asarray(row[name], dtype=np.int64))
        real[index, :count] = 1
        for start in row["starts"][1:]:
            documents[index, int(start) :] += 1
    if not bool(real.all()):
        batch["attention_mask"] = real
    if bool(documents.any()):
        batch["document_ids"] = documents
    return batch
