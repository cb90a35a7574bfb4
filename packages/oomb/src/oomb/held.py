"""What must be the same when a loss is walked back as when it was filled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Held:
    """A model's switches and the versions of its parameters at one moment."""

    modes: tuple[tuple[str, bool, object, object], ...]
    parameters: tuple[tuple[str, int, bool, int], ...]

    @staticmethod
    def of(model: nn.Module) -> Held:
        """Read them; costs no device work."""
        modes = tuple(
            (name, m.training, str(getattr(m, "active_adapters", "")), getattr(m, "disable_adapters", None))
            for name, m in model.named_modules()
        )
        parameters = tuple((name, id(p), p.requires_grad, p._version) for name, p in model.named_parameters())
        return Held(modes, parameters)

    def check(self, model: nn.Module) -> None:
        """Raises: RuntimeError naming what changed since, which would make the walk differentiate another loss"""
        now = Held.of(model)
        for mode, mode_now in zip(self.modes, now.modes, strict=False):
            if mode != mode_now:
                what = "train or eval mode" if mode[1] != mode_now[1] else "adapters"
                self._refuse(f"the {what} of module {mode_now[0] or 'the model'}")
        if len(self.modes) != len(now.modes) or len(self.parameters) != len(now.parameters):
            self._refuse("the model's modules or parameters")
        for before, after in zip(self.parameters, now.parameters, strict=True):
            if before[2] != after[2]:
                self._refuse(f"requires_grad of {after[0]}")
            if before != after:
                self._refuse(f"the parameter {after[0]}")

    @staticmethod
    def _refuse(what: str) -> None:
        raise RuntimeError(
            f"{what} changed between forward and backward: the walk would differentiate another computation. "
            f"Call backward "
            "first, then change the model"
        )
