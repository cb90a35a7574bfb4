"""The arena: exact bytes, disjoint views, and every way of using it wrongly."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload.arena
from offload import HostOutOfMemory, PinnedArena

MIB = 1 << 20
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_takes_are_aligned_disjoint_and_within(nbytes, requests):
    arena = PinnedArena(nbytes)
    taken = []
    for shape, dtype in requests:
        used = arena.used_bytes
        try:
            view = arena.take(shape, dtype)
        except HostOutOfMemory as error:
            wanted = torch.Size(shape).numel() * dtype.itemsize
            assert (error.requested, error.free, error.largest) == (wanted, nbytes - used, nbytes - used)
            assert wanted > nbytes - used
            assert arena.used_bytes == used
            continue
        assert list(view.shape) == shape and view.dtype == dtype and view.is_contiguous()
        if view.numel():
            assert view.data_ptr() % 256 == 0
            assert view.untyped_storage().nbytes() == view.numel() * dtype.itemsize
            view.view(-1).view(torch.uint8).fill_(len(taken) + 1)
            taken.append(view)
        assert arena.used_bytes <= nbytes
    for number, view in enumerate(taken):
        assert (view.view(-1).view(torch.uint8) == number + 1).all()


def test_every_byte_can_be_taken_and_no_more():
    arena = PinnedArena(1000)
    arena.take((1000,), torch.uint8).fill_(7)
    assert arena.used_bytes == arena.nbytes == 1000
    with pytest.raises(HostOutOfMemory, match="1 bytes asked for, 0 of 1000 free"):
        arena.take((1,), torch.uint8)


def test_last_bytes_behind_an_aligned_view():
    arena = PinnedArena(256 + 3)
    arena.take((1,), torch.float64)
    assert arena.used_bytes == 256
    arena.take((3,), torch.uint8)
    assert arena.used_bytes == 259


def test_views_are_apart_for_autograd_and_for_saving():
    arena = PinnedArena(MIB)
    one, two = arena.take((4,), torch.float32), arena.take((4,), torch.float32)
    before = two._version
    one.fill_(1)
    assert two._version == before
    assert one._base is None and one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def test_view_taken_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        arena = PinnedArena(4096)
        view, nothing = arena.take((4,), torch.float32), arena.take((0, 4), torch.float32)
    assert not nothing.is_inference()
    view.fill_(2).requires_grad_()
    (view * view).sum().backward()
    assert (view.grad == 4).all()


def test_reset_makes_all_takeable_again():
    arena = PinnedArena(4096)
    first = arena.take((4096,), torch.uint8)
    arena.reset()
    assert arena.used_bytes == 0
    assert arena.take((4096,), torch.uint8).data_ptr() == first.data_ptr()


def test_closed_is_closed():
    with PinnedArena(4096) as arena:
        view = arena.take((8,), torch.float32).fill_(3)
    arena.close()
    assert not arena.pinned and "closed" in repr(arena)
    for call in (lambda: arena.take((1,), torch.uint8), lambda: arena.take((0,), torch.uint8), arena.reset):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert (view == 3).all()  # still mapped: a view that outlives the arena is no wild pointer


@linux
def test_memory_is_there_at_once_and_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size, before = 200 * MIB + 1, resident()
    arena = PinnedArena(size, "cpu")  # starting CUDA takes memory of its own
    assert resident() - before > 0.95 * size
    arena.close()
    gc.collect()
    assert resident() - before < 0.2 * size


@linux
def test_huge_pages_and_no_inheritance_are_asked_for():
    arena = PinnedArena(8 * MIB)
    address = arena.take((1,), torch.uint8).data_ptr()
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " dc" in flags  # do not copy on fork
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert " hg" in flags


@linux
def test_forked_child_is_refused_and_unharmed():
    """In the child the range is free, so its own memory may be there: dropping the arena must not unmap that."""
    code = """
        import gc, mmap, os
        import torch
        from offload import PinnedArena
        arena = PinnedArena(64 << 20)
        pid = os.fork()
        if pid == 0:
            try:
                arena.take((1,), torch.uint8)
            except ValueError as error:
                assert "fork" in str(error)
            else:
                os._exit(3)
            own = [mmap.mmap(-1, 16 << 20) for _ in range(8)]  # some of these fall into the hole
            del arena
            gc.collect()
            for block in own:
                block[:] = bytes(len(block))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, "child failed"
        arena.take((64 << 20,), torch.uint8).fill_(1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_too_large_says_what_fits(monkeypatch):
    monkeypatch.setattr(offload.arena, "free_host_bytes", lambda: 64 * MIB)
    with pytest.raises(HostOutOfMemory, match=f"{65 * MIB} bytes does not fit.*{64 * MIB} bytes are free") as caught:
        PinnedArena(65 * MIB)
    assert caught.value.requested == 65 * MIB and caught.value.free == 64 * MIB
    PinnedArena(caught.value.largest).close()
    with pytest.raises(HostOutOfMemory):
        PinnedArena(caught.value.largest + 1)


@pytest.mark.parametrize("free", [None, 1 << 80])
def test_what_the_system_refuses_is_the_same_error(monkeypatch, free):
    monkeypatch.setattr(offload.arena, "free_host_bytes", lambda: free)
    for nbytes in (1 << 61, 1 << 70):
        with pytest.raises(HostOutOfMemory):
            PinnedArena(nbytes)


@linux
def test_a_limit_of_the_process_is_named_by_what_fits():
    """Memory is free, but the process may not have it (ulimit -v)."""
    code = """
        import resource
        from pathlib import Path
        from offload import HostOutOfMemory, PinnedArena
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
        try:
            PinnedArena(2 << 30)
        except HostOutOfMemory as error:
            assert error.requested == 2 << 30 and error.largest <= error.free, str(error)
            assert 900 << 20 < error.largest < 1 << 30, str(error)
        else:
            raise AssertionError("no limit")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


@linux
def test_too_large_for_this_machine():
    with pytest.raises(HostOutOfMemory) as caught:
        PinnedArena(1 << 60)
    assert 0 < caught.value.largest <= caught.value.free < caught.value.requested == 1 << 60


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "1", None, True])
def test_bad_size(nbytes):
    with pytest.raises(ValueError, match="positive integer"):
        PinnedArena(nbytes)


@pytest.mark.parametrize("device", ["meta", "gpu", "cuda:x", object()])
def test_bad_device(device):
    with pytest.raises(ValueError, match="device must be"):
        PinnedArena(16, device)


@pytest.mark.parametrize("shape", [(-1,), (1.0,), 3, None, (True,), "12"])
def test_bad_shape(shape):
    with pytest.raises(ValueError, match="shape"):
        PinnedArena(16).take(shape, torch.uint8)


def test_bad_dtype():
    with pytest.raises(ValueError, match="dtype"):
        PinnedArena(16).take((1,), "float32")


class FakeCuda:
    """What the arena asks of CUDA, recorded."""

    def __init__(self, monkeypatch, code: int = 0, *, interrupted: bool = False) -> None:
        self.calls: list[tuple] = []
        self.code, self.interrupted = code, interrupted
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 2,
            "device": lambda device: nullcontext(self.calls.append(("device", device.index))),
            "synchronize": lambda: self.calls.append(("synchronize",)),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        if self.interrupted:
            raise KeyboardInterrupt  # Python raises what came meanwhile when the call is over: the memory is pinned
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0

    def named(self, name: str) -> list[tuple]:
        return [call for call in self.calls if call[0] == name]


def test_registered_once_in_exact_bytes_and_unregistered_once(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    arena = PinnedArena(10001, "cuda:1")
    assert arena.pinned
    address = arena.take((1,), torch.uint8).data_ptr()
    assert cuda.named("register") == [("register", address, 10001, 3)] and ("device", 1) in cuda.calls
    arena.reset()
    assert not cuda.named("unregister")
    arena.close()
    arena.close()
    assert not arena.pinned
    assert cuda.named("unregister") == [("unregister", address)]
    assert cuda.calls.index(("synchronize",)) < cuda.calls.index(("unregister", address))


def test_unregistered_when_forgotten(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    arena = PinnedArena(4096)
    view = arena.take((4096,), torch.uint8)
    del arena
    gc.collect()
    assert cuda.named("unregister") == [("unregister", view.data_ptr())]
    view.fill_(1)


def test_an_interrupt_while_pinning_leaves_nothing_pinned(monkeypatch):
    cuda = FakeCuda(monkeypatch, interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        PinnedArena(4096)
    gc.collect()
    assert [call[1] for call in cuda.named("unregister")] == [call[1] for call in cuda.named("register")] != []


def test_unregistered_at_exit():
    code = """
        import torch
        from contextlib import nullcontext
        from types import SimpleNamespace
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device, torch.cuda.device_count = (lambda: 0), (lambda: 1)
        torch.cuda.device, torch.cuda.synchronize = (lambda device: nullcontext()), (lambda: None)
        torch.cuda.cudart = lambda: SimpleNamespace(
            cudaHostRegister=lambda *a: 0, cudaHostUnregister=lambda *a: print("unregistered", flush=True))
        from offload import PinnedArena
        arena = PinnedArena(4096)
        print("end", flush=True)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["end", "unregistered"]


def test_refused_pinning_warns_and_works(monkeypatch):
    cuda = FakeCuda(monkeypatch, code=2)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: torch.ones(1))  # the fake has no device to launch on
    with pytest.warns(UserWarning, match="refused.*pageable") as caught:
        arena = PinnedArena(4096)
    assert len(caught) == 1 and not arena.pinned
    arena.take((4096,), torch.uint8).fill_(1)
    arena.close()
    assert not cuda.named("unregister")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_without_cuda():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not PinnedArena(16).pinned
        assert not PinnedArena(16, "cpu").pinned
    with pytest.warns(UserWarning, match="no CUDA"):
        assert not PinnedArena(16, "cuda").pinned


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnCuda:
    def test_pinned_until_closed(self):
        arena = PinnedArena(64 * MIB + 1)
        view = arena.take((1024,), torch.float32)
        assert arena.pinned and view.is_pinned()
        arena.close()
        assert not view.is_pinned()

    def test_cpu_means_pageable(self):
        assert not PinnedArena(4096, "cpu").pinned

    def test_refusal_leaves_no_error_behind(self):
        arena = PinnedArena(MIB)
        address = arena.take((MIB,), torch.uint8).data_ptr()
        with pytest.warns(UserWarning, match="refused"):
            assert not offload.arena._register(address, MIB, torch.device("cuda", 0))  # registered already
        assert torch.ones(3, device="cuda").sum().item() == 3

    def test_no_such_device(self):
        with pytest.raises(ValueError, match="does not exist"):
            PinnedArena(16, f"cuda:{torch.cuda.device_count()}")
