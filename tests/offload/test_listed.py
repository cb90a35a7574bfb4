"""Rows that lists on the device name: the kernels (in the interpreter here, on a GPU there) against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.offload.test_engine import noise, same

from offload import PinnedArena, listed, reference

gather = pytest.importorskip("offload.gather")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def cases(draw):
    batch, first, columns = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 12))
    entries = draw(st.sampled_from([1, 5, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtypes = st.sampled_from([torch.int16, torch.int32])
    ids, but = (torch.randint(-2, 20, (batch, 2, entries), generator=generator).to(draw(dtypes)) for _ in range(2))
    return first, columns, ids, but if draw(st.booleans()) else None


@settings(deadline=None, max_examples=40)
@given(cases())
def test_the_rows_of_lists(case):
    first, columns, ids, but = case
    true, ours = (torch.full(listed.rows_for(len(ids), columns), 99, dtype=torch.int32) for _ in range(2))
    reference.list_rows(true, ids, first=first, columns=columns, but=but)
    ours = ours.to(DEVICE)
    gather.list_rows(ours, ids.to(DEVICE), first=first, columns=columns, but=None if but is None else but.to(DEVICE))
    count = 1 + int(true[0])
    assert torch.equal(ours[:count].cpu(), true[:count])
    wanted = []
    for b in range(len(ids)):
        named = {int(i) for i in ids[b].flatten()} - {int(i) for i in ([] if but is None else but[b].flatten())}
        wanted += [b * columns + i - first for i in sorted(named) if 0 <= i - first < columns]
    assert true[1:count].tolist() == wanted


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from([(3,), (40,), (700, 3)]), st.booleans(), st.booleans(), st.integers(1, 5))
def test_copies_of_listed_rows(case, row, to_device, flagged, programs):
    first, columns, ids, _ = case
    dtype = torch.int8 if row == (3,) else torch.float32
    host_first, host_columns = first % 3, columns + 4
    arena = PinnedArena(2**22, device=DEVICE)
    rows = torch.empty(listed.rows_for(len(ids), columns), dtype=torch.int32)
    reference.list_rows(rows, ids, first=first, columns=columns)
    host = arena.take((len(ids) * host_columns, *row), dtype)
    host.copy_(noise(host.shape, dtype))
    device = noise((len(ids) * columns, *row), dtype, seed=1)
    flags = torch.arange(len(host), dtype=torch.uint8) % 2 if flagged else None
    layout = {"columns": columns, "host_columns": host_columns, "host_first": host_first, "gather": to_device}
    true = [host.clone(), device.clone(), None if flags is None else flags.clone()]
    reference.copy_listed(*true[:2], rows, flags=true[2], **layout)
    ours = [host, device.to(DEVICE), None if flags is None else flags.to(DEVICE)]
    gather.copy_listed(*ours[:2], rows.to(DEVICE), flags=ours[2], programs=programs, **layout)
    assert torch.cuda.is_available() is False or torch.cuda.synchronize() is None
    assert all(same(a, b) for a, b in zip(ours, true) if b is not None)
    named = set(rows[1 : 1 + int(rows[0])].tolist())
    quiet = [i for i in range(len(device)) if i not in named]
    assert same(ours[1][quiet], device[quiet])
    arena.close()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-1, 9), max_size=12), st.sampled_from([(3,), (700, 3)]), st.booleans(), st.integers(1, 5))
def test_copies_of_rows_by_id(ids, row, to_device, programs):
    """What engine.Offloader enqueues on a GPU; ids it cannot see may be outside."""
    ids = list(dict.fromkeys(ids))
    arena = PinnedArena(2**20, device=DEVICE)
    host = arena.take((9, *row), torch.float32)
    host.copy_(noise(host.shape, torch.float32))
    device = noise((len(ids), *row), torch.float32, seed=1)
    before, ours = host.clone(), device.to(DEVICE)
    gather.copy_rows(host, ours, torch.tensor(ids, dtype=torch.int32).to(DEVICE), gather=to_device, programs=programs)
    assert torch.cuda.is_available() is False or torch.cuda.synchronize() is None
    for i, id in enumerate(ids):
        if to_device:
            assert same(ours[i], before[id]) if 0 <= id < 9 else ours[i].isnan().all()
        elif 0 <= id < 9:
            assert same(host[id], device[i])
    arena.close()
