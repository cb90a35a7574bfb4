"""What must be the same when a loss is walked back as when it was filled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .hf import Unsupported


class Touched:
    """Watches two forward passes for parameters that are written, or only counted as written: their sums tell.

    peft hangs adapters on experts by putting a parametrization on the parameter and taking it off again, which
    counts its version up at every call and leaves its values alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._versions = model, {name: p._version for name, p in model.named_parameters()}
        self._sums: dict[str, Tensor] = {}

    def after_one(self) -> None:
        self._sums = {
            name: _sum(p) for name, p in self._model.named_parameters() if p._version != self._versions.get(name)
        }

    def after_two(self) -> frozenset[str]:
        """Names of parameters whose versions say nothing.

        Raises: Unsupported if a forward pass changes a parameter
        """
        for name, p in self._model.named_parameters():
            if name in self._sums and not torch.equal(self._sums[name], _sum(p)):
                raise Unsupported(f"{type(self._model).__name__}: a forward pass changes its own parameter {name}")
        return frozenset(self._sums)


def _sum(parameter: Tensor) -> Tensor:
    return parameter.detach().nansum(dtype=torch.float64)


@dataclass(frozen=True)
class Held:
    """A model's switches and the versions of its parameters at one moment."""

    modes: tuple[tuple[str, bool, object, object], ...]
    parameters: tuple[tuple[str, int, bool, int], ...]
    sums: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, touched: frozenset[str] = frozenset()) -> Held:
        """Read them, without waiting for the device.

        touched: parameters whose versions every forward pass counts up: their sums, worked out there, stand in
        """
        modes = tuple(
            (name, m.training, str(getattr(m, "active_adapters", "")), getattr(m, "disable_adapters", None))
            for name, m in model.named_modules()
        )
        parameters = tuple(
            (name, id(p), p.requires_grad, 0 if name in touched else p._version) for name, p in model.named_parameters()
        )
        return Held(modes, parameters, {name: _sum(p) for name, p in model.named_parameters() if name in touched})

    def check(self, model: nn.Module) -> None:
        """Raises: RuntimeError naming what changed since, which would make the walk differentiate another loss"""
        now = Held.of(model, frozenset(self.sums))
        for mode, mode_now in zip(self.modes, now.modes, strict=False):
            if mode != mode_now:
                what = "train or eval mode" if mode[1] != mode_now[1] else "adapters"
                self._refuse(f"the {what} of module {mode_now[0] or 'the model'}")
        if len(self.modes) != len(now.modes) or len(self.parameters) != len(now.parameters):
            self._refuse("the model's modules or parameters")
        for before, after in zip(self.parameters, now.parameters, strict=True):
            if before[2] != after[2]:
                self._refuse(f"requires_grad of {after[0]}")
            name = after[0]
            if before != after or (name in self.sums and not torch.equal(self.sums[name], now.sums[name])):
                self._refuse(f"the parameter {name}")

    @staticmethod
    def _refuse(what: str) -> None:
        raise RuntimeError(
            f"{what} changed between forward and backward: the walk would differentiate another computation. "
            f"Call backward "
            "first, then change the model"
        )
