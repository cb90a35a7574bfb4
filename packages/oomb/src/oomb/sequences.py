"""Training sequences on disk or as a stream, and the report of what became of the data."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from oomb.batch import IGNORED
from oomb.data import Reader, Source
from oomb.packing import Counts, Packer
from oomb.train_config import TrainConfig

_ROW = Features({name: List(Value("int32")) for name in ("input_ids", "labels", "starts")})
_WRITE_TOKENS = 1 << 24  # written to the disk at a time


@dataclass(frozen=True)
class Report:
    """What was read and what became of it."""

    counts: Counts
    reader: Reader
    everything: bool  # the data was read to its end

    def lines(self) -> list[str]:
        """What a person reads about it."""
        c, reader = self.counts, self.reader
        lines = [
            f"{c.documents:,} documents ({reader.files:,} files, {c.tokens:,} tokens) in {c.sequences:,} sequences "
            f"of up to {reader.config.context:,}"
        ]
        if c.split or c.packed:
            lines.append(f"{c.split:,} documents split, {c.packed:,} sequences packed from several")
        if c.dropped:
            lines.append(f"{c.dropped:,} single tokens dropped: nothing stands before or after them")
        if c.unlabelled:
            lines.append(f"{c.unlabelled:,} sequences dropped: no token of theirs has a label")
        if reader.empty:
            lines.append(f"{reader.empty:,} documents without a token")
        if reader.skipped:
            names = ", ".join(reader.skipped[:3]) + (" ..." if len(reader.skipped) > 3 else "")
            lines.append(f"{len(reader.skipped):,} files skipped, not UTF-8 text: {names}")
        if not self.everything:
            lines.append("the rest of the data is not reached by this run")
        return lines


@dataclass(frozen=True)
class Sequences:
    """Sequences in a file on disk, for as long as this object lives.

    rows: a dataset of `input_ids`, `labels`, `starts`
    """

    rows: Dataset
    report: Report
    folder: tempfile.TemporaryDirectory[str]

    def __len__(self) -> int:
        return len(self.rows)


def read_sequences(
    source: Source, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vocab_size: int, *, wanted: int | None
) -> Sequences:
    """Read no further than `wanted` sequences need; None reads everything.

    Raises: ValueError if the text is shorter than one context, or cannot be read
    """
    reader, packer = Reader(source, tokenizer, config, vocab_size), Packer(config.context)
    folder = tempfile.TemporaryDirectory(prefix="oomb-")
    path = str(Path(folder.name, "sequences.arrow"))
    many = max(1, _WRITE_TOKENS // config.context)
    count = 0
    with ArrowWriter(path=path, features=_ROW, writer_batch_size=many) as writer:
        for row in _packed(reader, packer):
            writer.write(row)
            count += 1
            if count == wanted:
                break
        writer.finalize()
    everything = wanted is None or count < wanted
    if packer.counts.tokens < config.context:
        skipped = f" ({len(reader.skipped)} skipped, not UTF-8 text)" if reader.skipped else ""
        raise ValueError(
            f"data: {source.path!r} is shorter than one context: found {packer.counts.tokens:,} tokens in "
            f"{reader.files:,} files{skipped}, need {config.context:,}; give more text or a smaller context"
        )
    if count == 0:
        raise ValueError(
            f"data: {source.path!r} has nothing to learn: none of its {packer.counts.unlabelled:,} sequences has a "
            "label"
        )
    rows = Dataset.from_file(path).with_format("numpy")
    return Sequences(rows, Report(packer.counts, reader, everything), folder)


def _packed(reader: Reader, packer: Packer) -> Iterator[dict[str, np.ndarray]]:
    for finished in itertools.chain(map(packer.add, reader.documents()), [packer.rest()]):
        for sequence in finished:
            row = sequence.row()
            if (row["labels"] != IGNORED).any():
                yield row
            else:
                packer.counts.unlabelled += 1


class Stream(torch.utils.data.IterableDataset):
    """The same sequences without a file between: each pass over it reads, tokenizes and packs again."""

    def __init__(
        self, source: Source, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vocab_size: int
    ) -> None:
        self._make: Any = lambda: Reader(source, tokenizer, config, vocab_size)
        self._context = config.context
        self.report: Report | None = None

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        reader, packer = self._make(), Packer(self._context)
        self.report = Report(packer.counts, reader, everything=False)
        worker = torch.utils.data.get_worker_info()  # each worker reads everything and gives its share
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from itertools.islice(_packed(reader, packer), first, None, step)
        self.report = Report(packer.counts, reader, everything=True)
