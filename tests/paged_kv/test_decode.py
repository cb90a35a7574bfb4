"""Mixed batches: the decode kernel and the padded path beside it against dense float64 attention, and refusals."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.compiling import compiled
from tests.paged_kv.oracle import poisoned
from tests.paged_kv.packed_case import Packed

from paged_kv import PagedKV, PagePool, paged_attention

triton_decode = pytest.importorskip("paged_kv.triton_decode")
ON_CPU = not torch.cuda.is_available()
interpreted = pytest.mark.skipif(not ON_CPU, reason="runs in Triton's interpreter")


@st.composite
def problems(draw, most=4):
    batch = draw(st.integers(1, 4))
    page = draw(st.sampled_from([16, 32, 48]))
    return {
        "starts": tuple(draw(st.lists(st.integers(0, 150), min_size=batch, max_size=batch))),
        "counts": tuple(draw(st.lists(st.integers(1, most), min_size=batch, max_size=batch))),
        "groups": draw(st.integers(1, 2)),
        "repeat": draw(st.sampled_from([1, 3, 7, 8])),
        "dim": draw(st.sampled_from([8, 16, 24, 64])),
        "page": page,
        "window": draw(st.none() | st.integers(1, 90)),
        "with_sinks": draw(st.booleans()),
        "lists": draw(st.none() | st.integers(0, 5)),
        "list_heads": draw(st.booleans()),
        "scale": draw(st.sampled_from([0.3, -0.2])),
        "seed": draw(st.integers(0, 99)),
    }


@interpreted
@settings(max_examples=12, deadline=None)
@given(problems(most=3))
def test_the_decode_kernel_equals_dense_attention(options):
    case = Packed(**options)
    with poisoned():
        out = case.run("triton")
    case.check(out)


@settings(max_examples=25, deadline=None)
@given(problems(most=40), st.sampled_from([torch.float64, torch.float32]))
@example(
    {"starts": (148, 129), "counts": (1, 1), "groups": 1, "repeat": 1, "dim": 8, "scale": 0.3, "seed": 21},
    torch.float64,
)
def test_the_reference_equals_dense_attention(options, dtype):
    case = Packed(**options, dtype=dtype)
    case.check(case.run("reference"))
    assert torch.equal(case.run("auto"), case.run("reference")), "on a CPU auto is the reference"


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prompts_parts_of_prompts_and_single_tokens_in_one_call(dtype):
    case = Packed((0, 70, 130, 9, 64), (33, 20, 1, 2, 1), page=64, dim=64, dtype=dtype)
    case.check(case.run("triton"))


@interpreted
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("counts", [(1, 2), (20, 1)], ids=str)
def test_lists_that_name_no_page_of_the_sequence_read_nothing(backend, counts):
    """Also where page times tokens a page is beyond int32."""
    for size, fill in ((0, 0), (2, -1), (2, 2**31 - 1), (1, 2**26), (3, 2**25 + 1), (1, -(2**31))):
        case = Packed((70, 3), counts, page=64, dim=64, lists=size)
        case.selected = case.selected.fill_(fill)
        assert not case.run(backend).any(), (size, fill)
        case.sinks = torch.zeros(6)
        assert not case.run(backend).any(), (size, fill)


@interpreted
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_sequence_without_a_token_in_the_block_is_passed_over(backend):
    """`extend` of one number a sequence allows 0."""
    pool = PagePool(
        layers=1, slots=8, page_tokens=64, kv_heads=1, head_dim=64, dtype=torch.float32, device="cpu"
    )  # fmt: skip
    kv = PagedKV(pool, 3)
    for counts in ([3, 2, 5], [2, 0, 1], [0, 30, 1], [30, 0, 30]):
        kv.extend(counts)
        q, k, v = torch.randn(sum(counts), 2, 64), *torch.randn(2, sum(counts), 1, 64)
        kv.append(0, k, v)
        out = paged_attention(q, k, v, kv, 0, scale=0.1, backend=backend)
        at = 0
        for s, count in zip(kv.sequences, counts):
            rows = torch.tensor(pool.table.slots(s))
            keys, values = (x[0][rows].flatten(0, 1)[: kv.length(s)].double()[:, 0] for x in (pool.k, pool.v))
            for i in range(count):
                end = kv.length(s) - count + i + 1
                true = (q[at].double() @ keys[:end].T * 0.1).softmax(-1) @ values[:end]
                torch.testing.assert_close(out[at].double(), true, rtol=1e-4, atol=1e-4)
                at += 1


@interpreted
def test_a_sequence_longer_than_all_programs_shares_beside_short_ones():
    case = Packed((400, 3, 0, 40), (1, 1, 1, 2), groups=1)
    case.check(case.run("triton"))


@interpreted
def test_rows_of_one_unit_fill_and_overflow_its_tile():
    for repeat in (16, 33, 100):
        case = Packed((20, 3), (5, 1), groups=1, repeat=repeat, dim=16)
        case.check(case.run("triton"))


def test_what_a_mixed_batch_refuses():
    case = Packed((30, 5), (3, 1))
    good = {"q": case.q, "k": case.k, "v": case.v, "past": case.kv, "layer": 1, "scale": 0.2}

    def refused(match, **change):
        with pytest.raises(ValueError, match=match):
            paged_attention(**(good | change))

    refused("the open block has 4 tokens", q=case.q[:3])
    refused("expected k", k=case.k[:, :1])
    refused("expected v", v=case.v.double())
    refused("expected k", k=case.k.to("meta"))
    refused("expected q", q=case.q[..., :8])
    refused(r"all \[T, heads, D\]", k=case.k[None])
    refused("multiple of 2", q=case.q[:, :5])
    refused("no backward", q=case.q.clone().requires_grad_())
    refused("append the block", layer=0)
    refused("expected a layer", layer=2)
    refused("documents", documents=torch.zeros(1))
    refused("first_token", first_token=0)
    refused("kept", kept={})
    refused("expected backend", backend="fast")
    refused("window", window=0)
    refused("scale", scale=float("nan"))
    refused("sinks", sinks=torch.zeros(5))
    refused("sinks to be a tensor", sinks=[0.0] * 6)
    refused("no backward", sinks=torch.zeros(6, requires_grad=True))
    refused("selected to be a tensor", selected=[[0]])
    refused(r"selected \[2, 2 or 1, 2, K\]", selected=torch.zeros(2, 2, 1, 4, dtype=torch.int32))
    refused("int32", selected=torch.zeros(2, 2, 2, 4, dtype=torch.int64))
    refused("need a PagedKV", past=object())
    case.kv.free(case.ids[0])
    refused("no block is open")
    with torch.no_grad():
        fresh = Packed((20,), (1,))
        paged_attention(fresh.q.requires_grad_(), fresh.k, fresh.v, fresh.kv, 1, scale=0.2)


def test_a_sequence_that_goes_leaves_the_open_block_as_it_was_sent():
    """Sending it again would make append wait for the device."""
    case = Packed((20, 40, 7), (1, 2, 1))
    case.kv.append(0, case.k, case.v)
    other = case.kv.fork(case.ids[1])
    case.kv.extend(dict.fromkeys(case.ids[:2], 1))
    sent = case.kv.step()
    for gone in (other, case.ids[2]):
        case.kv.free(gone)
    assert case.kv.step() is sent and case.kv.tokens == (1, 1) and case.kv.lengths == (21, 42)
    case.kv.free(case.ids[0])
    with pytest.raises(ValueError, match="no block is open"):
        case.kv.append(0, case.k[:2], case.v[:2])


@interpreted
@pytest.mark.parametrize(
    "change, match",
    [
        ({"dtype": torch.float64}, "float64"), ({"dtype": torch.bfloat16}, "interpreter"), ({"page": 20}, "16 tokens"),
        ({"dim": 260, "groups": 1}, "head dim"), ({"repeat": 129, "groups": 1}, "128 query heads"),
    ],
)  # fmt: skip
def test_what_the_decode_kernel_refuses(change, match):
    with pytest.raises(ValueError, match=match):
        Packed(**({"starts": (20,), "counts": (1,)} | change)).run("triton")


BLOCKED = """
import sys
for name in ("triton", "numpy", "transformers"):
    sys.modules[name] = None  # as if it were not installed
import torch
from paged_kv import PagedKV, PagePool, paged_attention
pool = PagePool(layers=1, slots=4, page_tokens=16, kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
kv = PagedKV(pool)
a, b = kv.add(), kv.add()
kv.extend({a: 20, b: 1})
q, k, v = torch.randn(21, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
kv.append(0, k, v)
for backend in ("auto", "reference"):
    assert paged_attention(q, k, v, kv, 0, scale=0.3, backend=backend).isfinite().all()
try:
    paged_attention(q, k, v, kv, 0, scale=0.3, backend="triton")
except ValueError as error:
    print(error)
try:
    import paged_kv.hf_cache
except ImportError as error:
    print(error)
"""


def test_torch_alone_is_enough_and_what_is_missing_is_named(tmp_path):
    (tmp_path / "script.py").write_text(BLOCKED)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    no_kernel, no_adapter = done.stdout.splitlines()
    assert "not available here (import of triton" in no_kernel and 'backend="reference"' in no_kernel
    assert "oomb-paged-kv[hf]" in no_adapter


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_the_decode_kernels_compile(arch):
    pytest.importorskip("triton.backends.nvidia")
    names = ["decode/128/7/1/bf16", "merge/128/7/1/bf16", "decode/64/8/1/bf16/window/sinks"]
    if arch == 90:
        names += ["decode/128/7/9/bf16", "decode/128/7/1/bf16/selected", "decode/256/8/1/fp16", "decode/64/4/1/fp32"]
    rows = compiled(Path(__file__).with_name("compile_decode.py"), arch, names)
    for row in rows:
        assert row["stack"] <= (100 if "/7/9/" in row["name"] or "/256/" in row["name"] else 0), row
        assert row["mma"] or row["name"].startswith("merge") or "fp32" in row["name"], row
        assert row["asynchronous"] or row["name"].startswith("merge"), row
        assert row["narrow"] == 0, row
