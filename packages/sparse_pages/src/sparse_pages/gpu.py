"""Whether the kernels can serve: they are imported where they are first needed, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor


def triton_for(x: Tensor) -> ModuleType | None:
    """The module of Triton kernels for a tensor on a device that runs them; None where plain torch serves.

    Both give the same bits, so nobody need know which it was.
    """
    if not x.is_cuda or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return None
    return importlib.import_module("sparse_pages.triton_select")
