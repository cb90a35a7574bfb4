"""What only a GPU shows of mixed batches: bfloat16, compiled kernels, large offsets, and that nothing waits."""

import pytest
import torch
from tests.paged_kv.packed_case import Packed

from paged_kv import PagedKV, PagePool, paged_attention

pytestmark = pytest.mark.cuda
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {
    "one": {"starts": (5000,), "counts": (1,), "groups": 4, "repeat": 7},
    "long": {"starts": (70000, 3), "counts": (1, 1), "groups": 2, "repeat": 4},
    "batch": {"starts": (0, 900, 127, 128, 3000, 64), "counts": (1,) * 6, "groups": 8, "repeat": 8, "dim": 64},
    "few": {"starts": (0, 900, 127, 3000), "counts": (1, 5, 16, 9), "groups": 4, "repeat": 7},
    "mixed": {"starts": (0, 900, 127, 3000, 500), "counts": (300, 1, 700, 2, 17), "groups": 2, "repeat": 7},
    "window": {"starts": (5000, 10, 100), "counts": (1, 2, 1), "window": 128, "with_sinks": True, "dim": 64},
    "sparse": {"starts": (5000, 900, 100), "counts": (1, 1, 3), "lists": 12, "groups": 4, "repeat": 7},
    "sinks": {"starts": (5000, 900), "counts": (1, 1), "with_sinks": True, "window": 3000},
    "odd": {"starts": (700, 90), "counts": (1, 1), "dim": 80, "groups": 3, "repeat": 5},
    "wide": {"starts": (700, 90), "counts": (1, 3), "dim": 256, "groups": 2, "repeat": 8},
    "tiny": {"starts": (50, 9), "counts": (1, 1), "dim": 8, "page": 16},
}


def on_gpu(shape, dtype, **more):
    options = {"dim": 128, "page": 128, "device": "cuda", "dtype": dtype} | SHAPES[shape]
    return Packed(**options, **more, scale=options["dim"] ** -0.5)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mixed_batch_on_a_gpu_equals_dense_attention(shape, dtype):
    case = on_gpu(shape, dtype)
    out = case.run("auto")
    case.check(out)
    for _ in range(3):
        assert torch.equal(case.run("auto"), out), "two runs give the same bits"


def test_offsets_beyond_two_to_the_31():
    slots = 2**31 // (128 * 4 * 128) + 6
    pool = PagePool(layers=1, slots=slots, page_tokens=128, kv_heads=4, head_dim=128, dtype=BF16, device="cuda")
    for x in (*pool.k, *pool.v):
        x.fill_(torch.nan)
    kv = PagedKV(pool)
    filler, a = kv.add(), kv.add()
    kv.pool.table.extend({filler: (slots - 5) * 128})
    kv.extend({a: 600})
    q, k, v = (torch.randn(600, h, 128, device="cuda", dtype=BF16) for h in (8, 4, 4))
    kv.append(0, k, v)
    kv.extend({a: 1})
    kv.append(0, k[:1], v[:1])
    assert int(kv.step().table[kv.step().rows[0], 0]) >= slots - 5
    out = paged_attention(q[:1], k[:1], v[:1], kv, 0, scale=0.1)
    keys, values = (torch.cat((x, x[:1])).double().repeat_interleave(2, 1) for x in (k, v))
    weights = (torch.einsum("hd,jhd->hj", q[0].double(), keys) * 0.1).softmax(-1)
    true = torch.einsum("hj,jhd->hd", weights, values)
    assert float((out[0].double() - true).norm() / true.norm()) < 1e-2


def test_decoding_waits_for_nothing():
    case = on_gpu("batch", BF16)
    case.run("auto")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.kv.append(0, case.k, case.v)
        case.run("auto")
        for step in range(130):  # across a page
            forks = [case.kv.fork(case.ids[0])] if step % 50 == 20 else []  # whose last page is copied
            case.kv.extend(dict.fromkeys(case.ids[:2], 1))
            for fork in forks:
                case.kv.free(fork)
            for layer in (0, 1):
                case.kv.append(layer, case.k[:2], case.v[:2])
            paged_attention(case.q[:2], case.k[:2], case.v[:2], case.kv, 1, scale=0.1)
    finally:
        torch.cuda.set_sync_debug_mode(before)
