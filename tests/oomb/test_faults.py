"""What ends a step in its middle: everything is given back and the next step is right; and nothing leaks in many."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.models import build, configs
from tests.numerics import gradients
from tests.oomb.lanes import watched

import oomb.host
from offload import HostOutOfMemory, PinnedArena
from oomb import ChunkConfig, chunked_backward, chunked_loss

ON_HOST = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0}
STEPS = 100
SITES = 7  # where a step is broken, spread over it


@dataclass
class Case:
    """A small model, tokens, and a step with everything on the host."""

    device: str
    tokens: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        config = configs()["qwen2"]
        cuda = self.device == "cuda"
        if cuda:  # heads and pages that the kernels take
            config.head_dim, config.hidden_size = 64, 128
        self.model = build(config, dtype=torch.bfloat16 if cuda else torch.float64, device=self.device)
        tokens, chunk = self.tokens or (300 if cuda else 26), self.chunk or (128 if cuda else 6)
        self.ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(0))
        sizes = (chunk, 64, chunk) if cuda else (chunk, 4, 8)
        names = ("chunk_tokens", "page_tokens", "segment_tokens")
        self.config = ChunkConfig(**dict(zip(names, sizes)), backend="triton" if cuda else "reference", **ON_HOST)
        self.expected = self.step()

    def step(self, entry: Callable = chunked_backward) -> dict[str, torch.Tensor]:
        loss = entry(self.model, self.ids, config=self.config)
        if loss.requires_grad:
            loss.backward()
        return gradients(self.model)

    def check(self) -> None:
        """Host memory is back, and the next step is right."""
        self.model.zero_grad(set_to_none=True)
        assert len(oomb.host._spare) == 1, "the arena was not given back"
        ours = self.step()
        assert all(torch.equal(ours[name], grad) for name, grad in self.expected.items() if "embed" not in name)
        torch.testing.assert_close(ours, self.expected)

    def device_bytes(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def case(request) -> Case:
    oomb.host.close_spare()
    return Case(request.param)


class Fault:
    """Raises a new error when told for the nth time of something; once."""

    def __init__(self, error: type[BaseException], what: tuple[str, ...], at: int) -> None:
        self.error, self.what, self.at, self.count = error, what, at, 0

    def __call__(self, what: str) -> None:
        if what in self.what:
            self.count += 1
            if self.count == self.at:
                raise self.error("planted")


RUNS = ("in", "out", "compute", "after in", "after out", "after compute")
ERRORS = {
    "interrupt": (KeyboardInterrupt, RUNS),
    "exception": (RuntimeError, RUNS),
    "device memory": (torch.OutOfMemoryError, ("memory",)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_anywhere_on_the_way_leaves_the_next_step_right(case, name):
    error, what = ERRORS[name]
    entry = chunked_loss if name == "exception" else chunked_backward
    seen = Fault(error, what, at=0)
    with watched(on=seen):
        case.step(entry)
    before = case.device_bytes()
    for at in range(1, seen.count + 1, max(seen.count // SITES, 1)):
        with watched(on=Fault(error, what, at)), pytest.raises(error, match="planted"):
            case.step(entry)
        case.check()
        assert case.device_bytes() <= before
    assert seen.count > SITES


def test_host_memory_that_ends_in_the_middle(case, monkeypatch):
    take, taken = PinnedArena.take, []

    def counted(arena, *args):
        taken.append(1)
        return take(arena, *args)

    monkeypatch.setattr(PinnedArena, "take", counted)
    case.step()
    for last in range(0, len(taken), max(len(taken) // SITES, 1)):
        taken.clear()

        def full(arena, *args, last=last):
            if len(taken) == last:
                raise HostOutOfMemory("the host is full", 1, 0, 0)
            return counted(arena, *args)

        monkeypatch.setattr(PinnedArena, "take", full)
        with pytest.raises(HostOutOfMemory, match="the host is full"):
            case.step()
        monkeypatch.setattr(PinnedArena, "take", take)
        case.check()


def test_an_arena_that_is_refused_leaves_the_next_step_right(case, monkeypatch):
    oomb.host.close_spare()
    with monkeypatch.context() as patch:
        patch.setattr("offload.arena.free_host_bytes", lambda: 1 << 12)
        with pytest.raises(HostOutOfMemory, match="does not fit"):
            case.step()
    case.step()
    case.check()


@pytest.mark.parametrize("what", ["Held.of", "HeldRope", "Machine.now", "place"])
def test_what_fails_before_the_first_chunk_has_taken_no_host_memory(case, what, monkeypatch):
    """Whoever holds the error would hold the memory with it, and the next step would look for as much again."""

    def fail(*args, **more):
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(f"oomb.api.{what}", fail)
        with pytest.raises(torch.OutOfMemoryError, match="planted") as held:
            case.step()
    case.check()
    del held


def test_a_forgotten_loss_may_end_at_any_moment(case):
    """The garbage collector runs wherever this thread is, in the middle of giving another loss's memory back too."""
    lease = oomb.host.HostLease(oomb.host.spare_bytes(), torch.device(case.device))

    def collected() -> None:
        with oomb.host._lock:
            lease.release()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive(), "it waits for a lock that its own thread holds"
    case.check()


@pytest.mark.cuda
def test_a_device_that_is_really_full():
    """Chunks so large that a step needs far more than torch's allocator has in hand."""
    case = Case("cuda", tokens=32768, chunk=8192)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    least = torch.cuda.memory_reserved()
    case.step()
    most, total = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
    failed = []
    for share in (0.1, 0.4, 0.7, 0.95):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((least + share * (most - least)) / total)
        try:
            case.step()
        except torch.OutOfMemoryError:
            failed.append(share)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        case.check()
    assert failed, f"a step takes {least:,} to {most:,} bytes"


def test_many_steps_leak_nothing(case):
    """Every third of them fails somewhere."""
    steps = STEPS if case.device == "cuda" else STEPS // 2
    base = {}
    for number in range(steps):
        if number % 3 == 2:
            fault = Fault(KeyboardInterrupt, RUNS, at=1 + 7 * number % 120)
            try:
                with watched(on=fault):
                    case.step()
            except KeyboardInterrupt:
                pass
            case.model.zero_grad(set_to_none=True)
        else:
            case.step()
        if number == steps // 5:
            base = measured(case)
    last = measured(case)
    assert last["tensors"] <= base["tensors"] and last["pinned"] == base["pinned"]
    assert last["device"] <= base["device"] and last["reserved"] - base["reserved"] < 64 << 20
    assert last["resident"] - base["resident"] < 24 << 20, "host memory grows"


def measured(case: Case) -> dict[str, int]:
    """Units: bytes, but for tensors"""
    device = case.device_bytes()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        "pinned": oomb.host.spare_bytes(),
        "device": device,
        "reserved": torch.cuda.memory_reserved() if case.device == "cuda" else 0,
        "resident": resident,
    }
