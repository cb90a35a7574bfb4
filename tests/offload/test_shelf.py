"""What is put away comes back as it was, under any timing and within the budget; mutants of the waits are caught."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator import SimulatedLanes, mutant

from offload import HostOutOfMemory, PinnedArena, Shelf, lanes_for

NUMBERS = 3  # in a tensor
SIZE = NUMBERS * 8  # in bytes


class WatchedLanes(SimulatedLanes):
    """Remembers what was given up: nobody may write there afterwards."""

    def __init__(self, choose) -> None:
        super().__init__(choose)
        self.given_up: list[torch.Tensor] = []

    def empty(self, shape, dtype):
        tensor = super().empty(shape, dtype)
        self.given_up = [x for x in self.given_up if x is not tensor]
        return tensor

    def release(self, tensor) -> None:
        super().release(tensor)
        self.given_up.append(tensor)


def exercise(kind: type, seed: int, device_bytes: int, keys: int) -> None:
    """Two steps over one arena; in each, keys are put away, then asked for, prefetched and dropped at random."""
    chooser = random.Random(seed)
    lanes = WatchedLanes(chooser.randrange)
    arena = PinnedArena(keys * 2 * 256, device="cpu")
    for step in range(2):
        shelf = kind(lanes, arena, device_bytes=device_bytes)
        truth = {key: float(1000 * step + key) for key in range(keys)}
        for key in truth:
            put(lanes, shelf, key, truth[key], near=chooser.randrange(5) == 0)
            if chooser.randrange(3) == 0:
                look(lanes, shelf, truth, chooser.randrange(key + 1))
        left = list(truth)
        while left:
            key = chooser.choice(left)
            action = chooser.choice((shelf.prefetch, "get", "get", "drop"))
            if action == "get":
                look(lanes, shelf, truth, key)
            elif action == "drop":
                left.remove(key)
                shelf.drop(key)
                assert key not in shelf
            else:
                action(key)
            if len(left) < 3 and chooser.randrange(4) == 0:
                break  # the rest is cleared
        shelf.clear()
        lanes.synchronize()
        arena.reset()
    for tensor in lanes.given_up:
        assert tensor.isnan().all(), "somebody wrote to memory that was given up"


def put(lanes, shelf, key: int, value: float, *, near: bool) -> None:
    pair = tuple(lanes.empty((NUMBERS,), torch.float64) for _ in range(2))
    for sign, tensor in zip((1, -1), pair, strict=True):
        # as a device does it: the version that the shelf watches does not change when the work is done
        lanes.run("compute", lambda tensor=tensor, sign=sign: tensor.data.fill_(sign * value))
    shelf.put(key, pair, near=near)


def look(lanes, shelf, truth: dict[int, float], key: int) -> None:
    pair, value = shelf.get(key), truth[key]

    def check() -> None:
        for sign, tensor in zip((1, -1), pair, strict=True):
            assert bool((tensor == sign * value).all()), f"{key} came back as {tensor.tolist()}, expected {value}"

    lanes.run("compute", check)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), room=st.integers(0, 5 * 2 * SIZE), keys=st.integers(1, 12))
def test_right_under_any_timing(seed, room, keys):
    exercise(Shelf, seed, room, keys)


MUTANTS = {
    "reads before arrival": (
        'self._lanes.hold("compute", entry.arrived)\n            entry.arrived = None', "entry.arrived = None",
    ),
    "leaves before it is computed": ('after=(self._lanes.mark("compute"),))', "after=())"),
    "given up before it left": (
        "self._leaving.popleft()\n        self._wait_until_left(entry)", "self._leaving.popleft()",
    ),
    "fetched before it left": ('(self._lanes.mark("compute"), entry.left)', '(self._lanes.mark("compute"),)'),
    "new memory filled while others use it": ('(self._lanes.mark("compute"), entry.left)', "(entry.left,)"),
    "given up before it arrived": (
        'self._lanes.hold("compute", entry.arrived)\n        self._room', "pass\n        self._room",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name):
    changed = mutant("offload.shelf", *MUTANTS[name])
    for seed in range(300):
        try:
            exercise(changed.Shelf, seed, 0, 8)
        except AssertionError:
            return
    pytest.fail(f"{name}: nobody noticed")


def shelf_of(device_bytes: int, host_bytes: int = 0) -> Shelf:
    arena = PinnedArena(host_bytes, device="cpu") if host_bytes else None
    return Shelf(lanes_for("cpu"), arena, device_bytes=device_bytes)


def numbers(count: int = NUMBERS) -> torch.Tensor:
    return torch.arange(float(count), dtype=torch.float64)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), room=st.integers(0, 300))
def test_the_device_holds_what_fits_and_not_a_byte_more(data, room):
    """What is put near is beside the budget; what is dropped gives back what it took, no more and no less."""
    shelf = shelf_of(room, 64 * 256)
    held: dict[int, int] = {}
    for key in range(data.draw(st.integers(1, 20))):
        count, near = data.draw(st.integers(0, 12)), data.draw(st.booleans())
        given = numbers(count)
        fits = 8 * count <= room - sum(held.values())
        shelf.put(key, (given,), near=near)
        (back,) = shelf.get(key)
        assert torch.equal(back, given)
        assert (back.data_ptr() == given.data_ptr()) == (near or fits) or count == 0
        if fits and not near:
            held[key] = 8 * count
        if data.draw(st.booleans()):
            gone = data.draw(st.integers(0, key))
            shelf.drop(gone)
            held.pop(gone, None)


def test_gaps_between_elements_do_not_matter():
    shelf = shelf_of(0, 4096)
    grid = torch.arange(12.0).view(3, 4)
    shelf.put("turned", (grid.t(), grid[:, 1:3]))
    for back, expected in zip(shelf.get("turned"), (grid.t(), grid[:, 1:3]), strict=True):
        assert torch.equal(back, expected)


def test_without_room_anywhere_the_numbers_are_named():
    with pytest.raises(HostOutOfMemory, match="24 bytes to put away, 23 bytes left on cpu and no arena") as caught:
        shelf_of(SIZE - 1).put("a", (numbers(),))
    assert (caught.value.requested, caught.value.free) == (SIZE, SIZE - 1)
    shelf = shelf_of(0, 256)
    shelf.put("a", (numbers(),))
    with pytest.raises(HostOutOfMemory, match="arena is full"):
        shelf.put("b", (numbers(),))
    assert "a" in shelf and "b" not in shelf
    assert torch.equal(shelf.get("a")[0], numbers())


@pytest.mark.parametrize("tensors", [numbers(), None, 3, [1.0, 2.0], [numbers(), None], "ab", iter([numbers()])])
def test_only_sequences_of_tensors_are_put_away(tensors):
    """A tensor by itself would be taken for a sequence of its rows."""
    shelf = shelf_of(1000)
    with pytest.raises(ValueError, match="expected a list or tuple of tensors to put away as 'a'"):
        shelf.put("a", tensors)
    assert "a" not in shelf


def test_tensors_of_another_device_are_refused():
    shelf = shelf_of(1000)
    with pytest.raises(ValueError, match="expected tensors on cpu to put away as 'a', got some on cpu, meta"):
        shelf.put("a", (numbers(), numbers().to("meta")))


@pytest.mark.parametrize("device_bytes", [-1, 1.5, "auto", "8GiB", None, True])
def test_a_budget_is_a_number_of_bytes(device_bytes):
    with pytest.raises(ValueError, match="device_bytes must be an integer of at least 0"):
        shelf_of(device_bytes)


def test_a_key_serves_once_at_a_time():
    shelf = shelf_of(1000)
    shelf.put("a", (numbers(),))
    with pytest.raises(ValueError, match="'a', which holds something"):
        shelf.put("a", (numbers(),))
    shelf.drop("a")
    shelf.drop("a")
    shelf.prefetch("a")
    with pytest.raises(KeyError):
        shelf.get("a")
    shelf.put("a", (numbers(),))


@pytest.mark.parametrize("host_bytes", [0, 4096])
def test_a_tensor_written_to_after_it_was_put_away_is_noticed(host_bytes):
    """On a device a copy under way would take some of the old and some of the new."""
    tensor = numbers()
    shelf = shelf_of(0 if host_bytes else 1000, host_bytes)
    shelf.put("a", (tensor,))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written to in place"):
        shelf.get("a")


def test_a_put_that_hears_of_such_a_write_takes_nothing_and_whoever_gets_it_hears_too():
    tensor, shelf = numbers(), shelf_of(0, 1 << 16)
    shelf.put("a", (tensor,))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="written to in place"):
        for key in range(9):
            shelf.put(key, (numbers(),))
    assert key < 8 and key not in shelf
    with pytest.raises(RuntimeError, match="written to in place"):
        shelf.get("a")
    assert torch.equal(shelf.get(0)[0], numbers())
    shelf.clear()
    shelf.put("a", (numbers(),))


def test_what_was_dropped_may_be_written_to_again():
    tensor, shelf = numbers(), shelf_of(0, 1 << 16)
    shelf.put("a", (tensor,))
    shelf.drop("a")
    tensor.add_(1)
    for key in range(9):
        shelf.put(key, (numbers(),))


@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized"])
def test_tensors_that_are_not_dense_are_refused(kind):
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([numbers(), numbers(2)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }[kind]()
    for shelf in (shelf_of(1000), shelf_of(0, 4096)):
        with pytest.raises(ValueError, match="expected dense tensors"):
            shelf.put("a", (tensor,))
        assert "a" not in shelf


def test_what_is_put_away_carries_no_graph():
    weight = numbers().requires_grad_()
    for shelf in (shelf_of(1000), shelf_of(0, 4096)):
        shelf.put("a", (weight * 2,))
        (back,) = shelf.get("a")
        assert not back.requires_grad and torch.equal(back, numbers() * 2)


def test_keys_can_be_dropped_by_a_condition():
    shelf = shelf_of(1000, 4096)
    for key in range(6):
        shelf.put((key, "x"), (numbers(),))
    shelf.drop_where(lambda key: key[0] > 2)
    assert [key for key in range(6) if (key, "x") in shelf] == [0, 1, 2]
