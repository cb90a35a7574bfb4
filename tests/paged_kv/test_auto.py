"""Which backend auto takes, and the reason it gives."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from paged_kv import auto, cudnn, triton_attention
from paged_kv.past import Geometry

CONTIGUOUS, SCATTERED, UNKNOWN = SimpleNamespace(contiguous=True), SimpleNamespace(contiguous=False), SimpleNamespace()


def choose(past=CONTIGUOUS, tokens=4096, dim=128, dtype=torch.bfloat16, cuda=True, capability=(9, 0), page=128, **more):
    q = SimpleNamespace(
        is_cuda=cuda, device=torch.device("cuda" if cuda else "cpu"), dtype=dtype, shape=(1, tokens, 28, dim)
    )
    lengths = more.pop("lengths", (65536,))
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        return auto.choose(q, None, Geometry(0.1, lengths, page, **more), past)


def test_dense_attention_over_consecutive_pages_is_for_cudnn():
    assert choose() == ("cudnn", "dense attention over consecutive pages, where cuDNN is the fastest")
    assert choose(lengths=(0,), past=UNKNOWN)[0] == "cudnn"
    assert all(choose(dim=dim)[0] == "cudnn" for dim in (64, 80, 96, 128, 192, 256))


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"past": SCATTERED}, "consecutive"),
        ({"past": UNKNOWN}, "consecutive"),
        ({"window": 128}, "window"),
        ({"documents": torch.zeros(1, 4096, dtype=torch.int32)}, "documents"),
        ({"selected": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}, "selection of pages"),
        ({"dtype": torch.float32}, "float32"),
        ({"dim": 96, "capability": (8, 0)}, "96"),
        ({"dim": 256, "capability": (8, 0)}, "256"),
        ({"tokens": 1}, "1 tokens"),
    ],
)
def test_triton_takes_the_rest(options, reason):
    name, why = choose(**options)
    assert name == "triton" and reason in why


def test_deterministic_algorithms_are_honoured():
    torch.use_deterministic_algorithms(True)
    try:
        name, why = choose()
    finally:
        torch.use_deterministic_algorithms(False)
    assert name == "triton" and "deterministic" in why


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"cuda": False}, "cpu"),
        ({"dtype": torch.float64}, "float64"),
        ({"dim": 48}, "48"),
        ({"page": 100}, "100 tokens"),
        ({"capability": (7, 5)}, "compute capability"),
    ],
)
def test_what_no_kernel_serves_goes_to_the_reference(options, reason):
    name, why = choose(**options)
    assert name == "reference" and reason in why


def test_what_cudnn_refuses_by_its_surroundings_auto_does_not_choose(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    name, why = choose()
    assert name == "triton" and "AVOID_RECOMPILE" in why
    monkeypatch.setattr(torch.version, "hip", "6.4")
    name, why = choose()  # an MI250 calls itself 9.0, as a Hopper chip does
    assert name == "reference" and "AMD" in why


def test_a_missing_triton_is_said():
    with mock.patch.object(auto.importlib.util, "find_spec", return_value=None):
        assert choose() == ("reference", "triton is not installed")


def test_auto_offers_no_more_than_the_backends_accept():
    assert auto._TRITON_DIMS == triton_attention.HEAD_DIMS
    for capability, dims in (((8, 0), auto._CUDNN_DIMS), ((9, 0), auto._CUDNN_DIMS + auto._CUDNN_DIMS_HOPPER)):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            for dim in dims:
                q = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.float16, shape=(1, 300, 8, dim))
                cudnn._check(q, Geometry(0.1, (64,), 64))
