"""The cuDNN backend's own work (runs, merges, additions to pages), with plain torch in the operators' place.

The operators themselves run in test_cuda.py.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from tests.paged_kv.backend_case import Case
from tests.paged_kv.oracle import poisoned

from paged_kv import cudnn, triton_problem
from paged_kv.past import Geometry

pytestmark = pytest.mark.skipif(not triton_problem.INTERPRETED, reason="the merges are compiled in this process")


def weights(q, k, scale, causal):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores


def operator(q, k, v, bias, want_lse, dropout, causal, debug, *, scale):
    """aten::_scaled_dot_product_cudnn_attention: heads first, grouped heads, LSE [B, H, C, 1]."""
    assert bias is None and want_lse and dropout == 0.0 and not debug and k.shape[2] > 1
    scores = weights(q, k, scale, causal)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).double()
    out = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), values).to(q.dtype)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the layout of q, as the operator does
    return out, scores.logsumexp(-1, keepdim=True).float(), None, None, 0, 0, None, None, None


def operator_backward(dout, q, k, v, out, lse, seed, offset, bias, cq, ck, max_q, max_k, dropout, causal, *, scale):
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and bias is cq is ck is None and dropout == 0.0
    assert max_k > 1 and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    # One layout for all: torch's cache of plans does not look at these strides.
    assert all(x.transpose(1, 2).is_contiguous() for x in (dout, q, out))
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, 1).double() for x in (k, v))
    p = torch.exp(weights(q, k, scale, causal) - lse.double())
    dv = torch.einsum("bhij,bhid->bhjd", p, dout.double())
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (torch.einsum("bhid,bhjd->bhij", dout.double(), values) - delta) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, q.double())
    dk, dv = (x.unflatten(1, (-1, share)).sum(2).to(k.dtype) for x in (dk, dv))
    return torch.einsum("bhij,bhjd->bhid", ds, keys).to(q.dtype), dk, dv


@contextmanager
def plain_operators(run_tokens=cudnn.RUN_TOKENS):
    with mock.patch.multiple(
        cudnn, _forward=operator, _backward=operator_backward, _check=lambda *a: None, RUN_TOKENS=run_tokens
    ):
        yield


@pytest.mark.parametrize("run_tokens", [65536, 100])
@pytest.mark.parametrize(
    "shape",
    [
        {"lengths": (150,)},
        {"lengths": (0,)},
        {"lengths": (300,), "split": 2, "heads": 7, "groups": 1},
        {"lengths": (260, 0, 65), "batch": 3},
        {"lengths": (129, 320), "batch": 2, "split": 1, "page": 128, "dim": 80},
        {"lengths": (65,), "split": 1, "tokens": 1},
        {"lengths": (1,), "tokens": 5, "scale": -0.1},
    ],
    ids=lambda shape: ",".join(f"{k}={v}" for k, v in shape.items()),
)
def test_equals_dense_attention(shape, run_tokens):
    case = Case(**({"shuffle": False, "dtype": torch.float16} | shape))
    with plain_operators(run_tokens):
        ours = case.run(cudnn)
    case.check(ours)


def test_gradient_pages_may_lie_anywhere():
    case = Case(lengths=(200,), shuffle=False, dtype=torch.float16)
    order = torch.randperm(len(case.pages_k))
    segments = case.segments

    def scattered(grads=None, first_page=0):
        for s in segments(grads, first_page):
            yield (
                s
                if grads is None
                else type(s)(s.first_page, s.k, s.v, s.slots, s.runs, s.dk, s.dv, order[s.slots.long()].int(), None)
            )

    case.segments = scattered
    with plain_operators():
        ours = case.run(cudnn)
    case.table = order[case.table.long()].int()
    case.check(ours)


def test_without_past_gradients_no_page_is_touched():
    case = Case(lengths=(100,), shuffle=False)
    with plain_operators():
        full = case.run(cudnn)
        part = cudnn.backward(
            case.dout, case.q, case.k, case.v, *full[:2], case.segments(), case.geometry,
            past_grad=False, accumulate="owner",
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(full[2:5], part))


def test_pages_in_scattered_slots_are_refused():
    case = Case(lengths=(150,))
    with plain_operators(), pytest.raises(ValueError, match="consecutive slots; use backend="):
        case.run(cudnn)


def test_its_gradient_is_refused_under_deterministic_algorithms():
    case = Case(lengths=(150,), shuffle=False)
    with plain_operators(), poisoned(), pytest.raises(RuntimeError, match="not deterministic"):
        case.run(cudnn)


def test_a_cpu_is_refused():
    case = Case(shuffle=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="CUDA tensors, got cpu"):
        cudnn.forward(case.q, case.k, case.v, case.segments(), case.geometry)


class OnGpu:
    """What the checks ask of a tensor, answered as a GPU's would."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, dim=128, dtype=torch.bfloat16):
        self.shape, self.dtype = (1, 64, 8, dim), dtype


@pytest.mark.parametrize(
    "tensor, more, match",
    [
        (OnGpu(dtype=torch.float32), {}, "float32"),
        (OnGpu(dim=100), {}, "got 100"),
        (OnGpu(dim=512), {}, "got 512"),
        (OnGpu(), {"window": 64}, "window is not supported"),
        (OnGpu(), {"documents": torch.zeros(1, 64, dtype=torch.int32)}, "documents is not supported"),
        (OnGpu(), {"selected": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}, "selected is not supported"),
    ],
)
def test_what_cudnn_cannot_do_is_refused(tensor, more, match):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        with pytest.raises(ValueError, match=match):
            cudnn._check(tensor, Geometry(0.1, (64,), 64, **more))
        cudnn._check(OnGpu(), Geometry(0.1, (64,), 64))


def test_an_environment_that_changes_the_layout_of_the_lse_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        pytest.raises(ValueError, match="AVOID_RECOMPILE"),
    ):
        cudnn._check(OnGpu(), Geometry(0.1, (64,), 64))
