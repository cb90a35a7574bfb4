"""Transfers against loops, and refusals that leave the destination as it was."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import offload.engine
from offload import Offloader, PinnedArena, reference
from offload.engine import LEAVING, Handle
from offload.lanes import InlineLanes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def noise(shape, dtype, seed=0):
    """Bytes of any pattern, NaN included: transfers must not look at them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(high, (max(count, 1),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data[:count].view(dtype).view(shape)


def same(a, b):
    return a.shape == b.shape and torch.equal(bits(a.cpu()), bits(b.cpu()))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@st.composite
def row_moves(draw):
    rows = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, rows - 1), max_size=12))
    row = draw(st.lists(st.integers(0, 3), max_size=3))
    return rows, ids, row, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([torch.int32, torch.int64]))


@pytest.mark.parametrize("device", DEVICES)
@given(move=row_moves())
@settings(deadline=None, max_examples=60)
def test_gather_equals_loop(device, move):
    rows, ids, row, dtype, id_dtype = move
    src = noise((rows, *row), dtype)
    expected = noise((len(ids), *row), dtype, seed=1)
    dst = expected.clone().to(device)
    reference.gather(expected, src, torch.tensor(ids, dtype=id_dtype))
    handle = Offloader(device).gather(dst, src, torch.tensor(ids, dtype=id_dtype))
    handle.wait()
    handle.wait()
    assert same(dst, expected)


@pytest.mark.parametrize("device", DEVICES)
@given(move=row_moves())
@settings(deadline=None, max_examples=60)
def test_scatter_equals_loop(device, move):
    rows, ids, row, dtype, id_dtype = move
    ids = torch.tensor(sorted(set(ids), key=lambda i: (i * 7) % 11), dtype=id_dtype)
    src = noise((len(ids), *row), dtype)
    expected = noise((rows, *row), dtype, seed=1)
    dst = expected.clone()
    reference.scatter(expected, src, ids)
    Offloader(device).scatter(dst, src.to(device), ids.to(device)).wait()
    assert same(dst, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_through_an_arena(device, dtype):
    offloader, arena = Offloader(device), PinnedArena(4096)
    original = noise((3, 5, 4), dtype)
    away, back = arena.take((3, 5, 4), dtype), noise((3, 5, 4), dtype, seed=1).to(device)
    assert isinstance(offloader.write_back(away, original.to(device)), Handle)
    offloader.fetch(back, away).wait()
    assert same(away, original) and same(back, original)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device):
    offloader = Offloader(device)
    src = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    dst = torch.full((4, 4, 3), float("nan"), device=device)[:, ::2]
    offloader.fetch(dst, src).wait()
    assert torch.equal(dst.cpu(), src)
    pages = torch.full((10, 3), float("nan"))
    offloader.scatter(pages[1::3], dst[:2, 0], torch.tensor([2, 0])).wait()
    assert torch.equal(pages[7], src[0, 0]) and torch.equal(pages[1], src[1, 0])
    assert torch.isnan(pages[[0, 2, 3, 4, 5, 6, 8, 9]]).all()


def test_autograd_sees_nothing():
    offloader = Offloader("cpu")
    leaf = torch.ones(3, 2, requires_grad=True)
    dst, ids = torch.zeros(3, 2, requires_grad=True), torch.tensor([2, 0, 1])
    offloader.fetch(dst, leaf), offloader.write_back(dst, leaf)
    offloader.gather(dst, leaf, ids), offloader.scatter(dst, leaf, ids)
    assert dst.grad_fn is None and dst.is_leaf and torch.equal(dst, leaf)


BAD_MOVES = {
    "dtype": lambda o: o.fetch(torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "broadcast": lambda o: o.fetch(torch.zeros(3, 2), torch.zeros(2)),
    "broadcast back": lambda o: o.write_back(torch.zeros(3, 2), torch.zeros(1)),
    "not a tensor": lambda o: o.fetch(torch.zeros(3), [0.0, 0.0, 0.0]),
    "nothing": lambda o: o.fetch(None, torch.zeros(3)),
    "a module": lambda o: o.write_back(torch.zeros(3), torch.nn.Linear(2, 2)),
    "a list of lists": lambda o: o.fetch([[torch.zeros(3)]], [[torch.zeros(3)]]),
    "an array": lambda o: o.fetch(torch.zeros(3), torch.zeros(3).numpy()),
    "expanded": lambda o: o.fetch([torch.zeros(3), torch.zeros(1).expand(3)], [torch.zeros(3)] * 2),
    "gather into expanded": lambda o: o.gather(torch.zeros(1, 2).expand(2, 2), torch.zeros(5, 2), torch.tensor([1, 2])),
    "gather sparse": lambda o: o.gather(torch.zeros(1, 3), torch.eye(3).to_sparse(), torch.tensor([0])),
    "fetch sparse": lambda o: o.fetch(torch.zeros(3, 3), torch.eye(3).to_sparse()),
    "write back nested": lambda o: o.write_back(torch.zeros(2), torch.nested.nested_tensor([torch.ones(2)])),
    "gather conjugated": lambda o: o.gather(lazy(1).resolve_conj(), lazy(3), torch.tensor([2])),
    "scatter conjugated": lambda o: o.scatter(lazy(3).resolve_conj(), lazy(1), torch.tensor([2])),
    "scatter negated": lambda o: o.scatter(torch.zeros(3), lazy(1).imag, torch.tensor([2])),
    "meta": lambda o: o.fetch(torch.zeros(3), torch.zeros(3, device="meta")),
    "gather rows": lambda o: o.gather(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([1, 2])),
    "gather row shape": lambda o: o.gather(torch.zeros(2, 1), torch.zeros(5, 2), torch.tensor([1, 2])),
    "gather high": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), torch.tensor([1, 5])),
    "gather padding": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), torch.tensor([1, -1])),
    "gather from no rows": lambda o: o.gather(torch.zeros(1, 2), torch.zeros(0, 2), torch.tensor([0])),
    "gather 0-dim": lambda o: o.gather(torch.zeros(1), torch.tensor(0.0), torch.tensor([0])),
    "ids float": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), torch.tensor([1.0, 2.0])),
    "ids 2-d": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), torch.tensor([[1, 2]])),
    "ids list": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), [1, 2]),
    "ids elsewhere": lambda o: o.gather(torch.zeros(2, 2), torch.zeros(5, 2), torch.zeros(2, dtype=int, device="meta")),
    "scatter twice": lambda o: o.scatter(torch.zeros(5, 2), torch.zeros(2, 2), torch.tensor([1, 1])),
    "scatter rows": lambda o: o.scatter(torch.zeros(5, 2), torch.zeros(3, 2), torch.tensor([0, 1])),
    "scatter low": lambda o: o.scatter(torch.zeros(5, 2), torch.zeros(2, 2), torch.tensor([0, -1])),
    "scatter dtype": lambda o: o.scatter(torch.zeros(5, 2), torch.zeros(2, 2, dtype=int), torch.tensor([0, 1])),
}


def lazy(rows):
    """Numbers that are not what their bytes say."""
    return torch.full((rows,), 1 + 2j).conj()


@pytest.mark.parametrize("move", BAD_MOVES.values(), ids=BAD_MOVES)
def test_bad_moves_are_refused(move):
    with pytest.raises(ValueError, match=r"^(fetch|write_back|gather|scatter): "):
        move(Offloader("cpu"))


def test_a_list_of_which_one_is_refused_changes_nothing():
    first = torch.zeros(3)
    for second in (torch.zeros(1).expand(3), torch.zeros(3, dtype=torch.int64), torch.zeros(4), None):
        with pytest.raises(ValueError, match="fetch: "):
            Offloader("cpu").fetch([first, second], [torch.ones(3)] * 2)
    assert not first.any()


def test_fetched_as_they_read_whatever_their_bytes_say():
    away = lazy(3).resolve_conj().zero_()
    Offloader("cpu").fetch(away, lazy(3)).wait()
    assert torch.equal(away, lazy(3))


def test_refused_scatter_changes_nothing():
    dst = torch.zeros(5, 2)
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
        Offloader("cpu").scatter(dst, torch.ones(2, 2), torch.tensor([0, 5]))
    assert not dst.any()


@pytest.mark.parametrize("device", ["meta", "gpu", None, "cuda:x"])
def test_bad_device(device):
    with pytest.raises(ValueError, match="device must be"):
        Offloader(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cuda_asked_for_but_absent():
    with pytest.raises(ValueError, match="CUDA is not available"):
        Offloader("cuda")


@pytest.mark.cuda
def test_cuda_sides_are_checked():
    offloader = Offloader("cuda")
    assert offloader.device == torch.device("cuda", torch.cuda.current_device())
    near, far = torch.zeros(3, device="cuda"), torch.zeros(3)
    for call in (offloader.fetch, offloader.write_back):
        dst, src = (far, near) if call == offloader.fetch else (near, far)
        with pytest.raises(ValueError, match="must be on"):
            call(dst, src)
        with pytest.raises(ValueError, match="must be on"):
            call(near, near)


class SilentLanes(InlineLanes):
    """A device that holds no numbers: transfers are enqueued and that is all."""

    class Mark:
        def synchronize(self) -> None:
            pass

    def run(self, lane, work, after=()):
        return self.Mark()

    def mark(self, lane):
        return self.Mark()


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_device_memory_is_given_up_once_a_transfer_from_it_was_waited_for(wait):
    lanes = SilentLanes(torch.device("meta"))
    with mock.patch.object(offload.engine, "lanes_for", lambda _device: lanes):
        offloader = Offloader("cpu")
    handles, sent = [], []
    for _ in range(LEAVING + 3):
        source = torch.empty(3, device="meta")
        sent.append(StorageWeakRef(source.untyped_storage()))
        handles.append(offloader.write_back(torch.empty(3), source))
        del source
    assert kept_alive(sent) == LEAVING
    getattr(handles[-2], wait)()
    assert kept_alive(sent) == 1
    for handle in reversed(handles):
        getattr(handle, wait)()
    assert kept_alive(sent) == 0


def kept_alive(storages: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)
