"""Which backend `backend="auto"` takes, and why.

The choice looks at the device, dtype, shapes, what limits a query's view, whether pages lie in a row, and whether the
caller asked for determinism. It is made before anything runs, and a backend that then cannot serve is an error.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from .past import Geometry, PastSource

_TRITON_DIMS = (64, 80, 96, 128, 192, 256)
# Head dims at which cuDNN is the faster: 1.1 to 2.1 times, as measured on Hopper (benchmarks/results/attention_h200_*).
_CUDNN_DIMS = (64, 128)
_CUDNN_DIMS_HOPPER = (80, 96, 192, 256)
_CUDNN_LEAST_TOKENS = 256  # below that a launch and a merge cost more than the faster products save


def choose(q: Tensor, k: Tensor, geometry: Geometry, past: PastSource) -> tuple[str, str]:
    """Pick a backend for one call.

    Whether pages are consecutive is asked of the past: `past.contiguous`, where it has such an attribute, is true when
    every segment it will yield has runs. Without it nothing is known and nothing is assumed.
    Shapes: q [B, C, H, D]; k [B, C, G, D]
    Returns: the backend's name, and the reason in words
    """
    obstacle = _why_not_triton(q, geometry)
    if obstacle is not None:
        return "reference", obstacle
    obstacle = _why_not_cudnn(q, geometry, past)
    if obstacle is not None:
        return "triton", obstacle
    return "cudnn", "dense attention over consecutive pages, where cuDNN is the fastest"


def _why_not_triton(q: Tensor, geometry: Geometry) -> str | None:
    if not q.is_cuda:
        return f"the tensors are on {q.device.type}, where plain torch is the only backend of full speed"
    if torch.version.hip is not None:
        return "the kernels were never run on AMD's chips"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no kernel computes in {q.dtype}"
    if q.shape[3] not in _TRITON_DIMS:
        return f"no kernel has head dim {q.shape[3]}"
    if geometry.page_tokens not in (64, 128):
        return f"no kernel has pages of {geometry.page_tokens} tokens"
    return None


def _why_not_cudnn(q: Tensor, geometry: Geometry, past: PastSource) -> str | None:
    for name in ("window", "documents", "selected"):
        if getattr(geometry, name) is not None:
            return f"cuDNN has no {'selection of pages' if name == 'selected' else name}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN does not compute in {q.dtype}"
    if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
        return "TORCH_CUDNN_SDPA_AVOID_RECOMPILE is set, which changes the layout of cuDNN's LSE"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and cuDNN's dQ is not"
    hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    if q.shape[3] not in (_CUDNN_DIMS + _CUDNN_DIMS_HOPPER if hopper else _CUDNN_DIMS):
        return f"head dim {q.shape[3]}"
    if q.shape[1] < _CUDNN_LEAST_TOKENS:
        return f"a block of {q.shape[1]} tokens is too small to pay for cuDNN's launches and merges"
    if any(geometry.lengths) and not getattr(past, "contiguous", False):
        return "pages are not known to lie in consecutive slots"
    return None
