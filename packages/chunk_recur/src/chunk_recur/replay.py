"""The surroundings of a forward pass that its second run must find again: random state and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Torch's own generators: the CPU's and those of every device of an initialised accelerator.

    Generators that a step owns, Python's `random` and numpy are not included.
    """

    cpu: Tensor
    devices: tuple[Tensor, ...]

    @staticmethod
    def now() -> RandomState:
        """The state at this moment; reads host memory only."""
        module, places = _accelerator()
        return RandomState(torch.get_rng_state(), tuple(module.get_rng_state(*place) for place in places))

    def restore(self) -> None:
        """Return the generators to this state; a device that came into use later is left as it is."""
        torch.set_rng_state(self.cpu)
        module, places = _accelerator()
        for state, place in zip(self.devices, places):
            module.set_rng_state(state, *place)


def _accelerator() -> tuple[Any, list[tuple[int, ...]]]:
    """The accelerator's module and the arguments that name each of its generators."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None, []
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return module, []  # nothing has drawn a number yet, and asking would start the device
    if device.type == "mps":  # one generator, which takes no index
        return module, [()]
    return module, [(index,) for index in range(torch.accelerator.device_count())]


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the random state, whatever happens inside, as it was found."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()


@dataclass(frozen=True)
class Autocast:
    """The autocast mode of a forward pass, per device type; backward runs outside of it."""

    modes: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @staticmethod
    def now() -> Autocast:
        """The mode at this moment."""
        device = torch.accelerator.current_accelerator(check_available=True)
        types = ["cpu"] if device is None else ["cpu", device.type]
        modes = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)
        return Autocast(modes, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body as the forward ran, with no cached cast shared with anything outside of it."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.modes:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache_enabled))
            with fresh_casts():
                yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run the body without autocast, as autograd does when it is called outside of the caller's region."""
        with ExitStack() as stack:
            for kind, _, dtype in self.modes:
                stack.enter_context(torch.autocast(kind, dtype, False, self.cache_enabled))
            yield


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Keep autocast's cached weights from crossing the border of the body.

    A weight cast under no_grad and reused with grad would receive no gradient, without a word.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
