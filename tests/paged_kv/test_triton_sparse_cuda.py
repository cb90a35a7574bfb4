"""What only a GPU shows of attention over listed pages: bfloat16, compiled kernels, races."""

import pytest
import torch
from tests.paged_kv.sparse_case import SparseCase

from paged_kv import triton_attention, triton_sparse

pytestmark = pytest.mark.cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {
    "plain": {"tokens": 512, "heads": 14, "groups": 2, "dim": 128, "page": 128, "lengths": (2048,), "entries": 6},
    "part past, part own": {"tokens": 300, "heads": 14, "groups": 2, "dim": 128, "page": 128, "lengths": (1000,)},
    "no past": {"tokens": 200, "heads": 4, "groups": 4, "dim": 64, "lengths": (0,), "per_head": True},
    "uneven": {"batch": 3, "tokens": 130, "heads": 6, "groups": 2, "dim": 96, "lengths": (640, 0, 129)},
    "segments": {"batch": 2, "tokens": 190, "heads": 7, "groups": 1, "dim": 80, "lengths": (700, 320), "split": 4},
    "wide": {"tokens": 150, "heads": 8, "groups": 2, "dim": 256, "page": 128, "lengths": (512,), "per_head": True},
    "one token": {"tokens": 1, "heads": 28, "groups": 4, "dim": 128, "page": 128, "lengths": (5000,), "entries": 9},
    "hot": {"tokens": 1500, "heads": 8, "groups": 1, "dim": 64, "page": 64, "lengths": (640,), "kind": "hot"},
    "window": {"tokens": 400, "heads": 14, "groups": 2, "dim": 128, "page": 128, "lengths": (900,), "window": 200},
    "documents": {"batch": 2, "tokens": 300, "heads": 7, "groups": 1, "dim": 128, "lengths": (400, 70)}
    | {"documents": "some", "kind": "all"},
}


def case(shape, dtype, **more):
    options = {"scale": shape["dim"] ** -0.5, "device": "cuda", "dtype": dtype, "seed": 5, "entries": 4}
    return SparseCase(**(options | shape | more))


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_dense_attention(shape, dtype, share, monkeypatch):
    if share is not None:  # every page with two readers is split
        monkeypatch.setattr(triton_sparse._Launch, "_share", lambda self, tile: share)
    problem = case(SHAPES[shape], dtype)
    problem.check(problem.run(triton_attention))


def test_gradient_pages_in_bfloat16():
    problem = case(SHAPES["plain"], BF16, grad_dtype=BF16)
    problem.check(problem.run(triton_attention))


@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.parametrize("shape", ["plain", "uneven", "segments", "hot", "documents"])
def test_two_runs_give_the_same_bits(shape, share, monkeypatch):
    if share is not None:
        monkeypatch.setattr(triton_sparse._Launch, "_share", lambda self, tile: share)
    problem = case(SHAPES[shape], BF16)
    first = problem.run(triton_attention)
    for _ in range(4):
        for a, b in zip(first, problem.run(triton_attention)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", ["plain", "part past, part own", "segments", "window", "documents"])
def test_wide_and_narrow_tiles_give_the_same_bits(shape, dtype, monkeypatch):
    """Where both mask the same pages: a masked score is rounded before its largest is taken from it, others are not."""
    problem = case(SHAPES[shape], dtype)
    narrow = problem.run(triton_attention)

    def wide(p, blocks):
        rows = p.geometry.page_tokens * p.repeat
        whole = rows // 256 * 256
        assert 0 < whole < rows and p.tile("fwd").rows == 256
        return [(p.tile("fwd"), 0, whole), (p.tile("rest fwd"), whole, rows - whole)]

    monkeypatch.setattr(triton_sparse, "row_tiles", wide)
    ours = problem.run(triton_attention)
    problem.check(ours)
    for a, b in zip(ours, narrow):
        assert torch.equal(a, b)
