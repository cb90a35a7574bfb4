"""Documents into sequences: nothing lost, nothing twice, nothing across a border."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomb.packing import OPEN_SEQUENCES, Packer, Tokens, collate

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def documents(lengths):
    """Document d holds the ids 1000 d, 1000 d + 1, ...: every token of all documents is another number."""
    return [Tokens(np.arange(1000 * d, 1000 * d + length, dtype=np.int32)) for d, length in enumerate(lengths)]


def packed(lengths, context, part=None):
    packer = Packer(context)
    sequences = []
    for document in documents(lengths):
        parts = [document] if part is None else [document[i : i + part] for i in range(0, len(document), part)]
        sequences += packer.add(parts)
    return packer, sequences + list(packer.rest())


@given(LENGTHS, st.integers(2, 17))
def test_every_token_is_kept_once_and_in_order(lengths, context):
    packer, sequences = packed(lengths, context)
    pieces = [piece.ids for sequence in sequences for piece in sequence.pieces]
    lonely = sum(length % context == 1 for length in lengths)
    assert packer.counts.dropped == lonely
    assert packer.counts.tokens == sum(lengths) and packer.counts.documents == len(lengths)
    kept = sorted(int(i) for piece in pieces for i in piece)
    dropped = {1000 * d + length - 1 for d, length in enumerate(lengths) if length % context == 1}
    assert kept == [
        1000 * d + i for d, length in enumerate(lengths) for i in range(length) if 1000 * d + i not in dropped
    ]
    for piece in pieces:
        assert (np.diff(piece) == 1).all() and piece[0] // 1000 == piece[-1] // 1000
    assert all(2 <= sequence.tokens <= context for sequence in sequences)
    assert packer.counts.sequences == len(sequences)
    assert packer.counts.packed == sum(len(sequence.pieces) > 1 for sequence in sequences)
    assert packer.counts.split == sum(length > context for length in lengths)


@given(LENGTHS, st.integers(2, 17), st.integers(1, 9))
def test_it_does_not_matter_in_which_parts_a_document_comes(lengths, context, part):
    whole, in_parts = packed(lengths, context)[1], packed(lengths, context, part)[1]
    rows = [[sequence.row()["input_ids"].tolist() for sequence in sequences] for sequences in (whole, in_parts)]
    assert rows[0] == rows[1]


@given(st.lists(st.integers(2, 10), min_size=1, max_size=200))
def test_few_sequences_wait_and_most_are_full(lengths):
    packer = Packer(20)
    for document in documents(lengths):
        list(packer.add([document]))
        assert len(packer._open) <= OPEN_SEQUENCES
    assert packer.counts.sequences + len(list(packer.rest())) <= 2 * -(-sum(lengths) // 20) + 1


def test_the_first_token_of_a_piece_is_not_learned():
    _, (sequence,) = packed([5, 3], 10)
    row = sequence.row()
    assert row["input_ids"].tolist() == [0, 1, 2, 3, 4, 1000, 1001, 1002] and row["starts"].tolist() == [0, 5]
    assert row["labels"].tolist() == [-100, 1, 2, 3, 4, -100, 1001, 1002]


def test_labels_of_their_own_stay_beside_their_tokens():
    packer = Packer(4)
    ids = np.arange(6, dtype=np.int32)
    parts = [Tokens(ids[:3], ids[:3] + 50), Tokens(ids[3:])]
    rows = [s.row() for s in [*packer.add(parts), *packer.rest()]]
    assert [row["labels"].tolist() for row in rows] == [[-100, 51, 52, 3], [-100, 5]]


def test_a_batch_is_padded_on_the_right_and_says_what_is_real():
    rows = [packed([5, 3], 10)[1][0].row(), packed([4], 10)[1][0].row()]
    batch = collate(rows)
    assert batch["attention_mask"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]
    assert batch["document_ids"].tolist() == [[0] * 5 + [1] * 3, [0] * 8]
    assert batch["labels"][1].tolist() == [-100, 1, 2, 3] + [-100] * 4
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_a_batch_of_whole_documents_says_no_more_than_it_must():
    assert set(collate([packed([5], 10)[1][0].row()])) == {"input_ids", "labels"}
