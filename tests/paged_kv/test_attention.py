"""The public call: what it refuses, and that autograd in all its modes gets the same numbers."""

import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch
from tests.paged_kv.oracle import SplitPast
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from paged_kv import PagedKV, PagePool, attention, auto, function, paged_attention, reference
from paged_kv.past import Geometry

B, C, H, G, D, P, PAST = 2, 6, 4, 2, 8, 4, (10, 7)


def make_past(dtype=torch.float64, open_block=True, past=PAST):
    torch.manual_seed(3)
    pool = PagePool(layers=2, slots=40, page_tokens=P, kv_heads=G, head_dim=D, dtype=dtype, device="cpu")
    kv = PagedKV(pool, len(past))
    if any(past):
        kv.extend(past)
        for layer in (0, 1):
            kv.append(layer, *(torch.randn(len(past), max(past), G, D, dtype=dtype) for _ in range(2)))
    if open_block:
        kv.extend(C)
    return kv


def make_inputs(dtype=torch.float64, grad=(True, True, True), batch=B):
    torch.manual_seed(4)
    return [
        torch.randn(batch, C, n, D, dtype=torch.float64).to(dtype).requires_grad_(g) for n, g in zip((H, G, G), grad)
    ]


def run(kv, inputs, **options):
    """Output and gradients of one block: of the inputs, and of every past token."""
    out = paged_attention(*inputs, kv, 0, **({"scale": 0.4} | options))
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    past = []
    if kv.pool.grads(0) is not None:
        for sequence, length in zip(kv.pool.table.sequences, kv.lengths):
            slots = torch.tensor(kv.pool.table.slots(sequence))
            past += [pages[slots].flatten(0, 1)[:length].clone() for pages in kv.pool.grads(0)]
    return out.detach(), [x.grad for x in inputs], past


def same(a, b):
    assert torch.equal(a[0], b[0])
    for x, y in zip(a[1], b[1]):
        assert x is not None and torch.equal(x, y)
    assert len(a[2]) == len(b[2]) > 0 and all(torch.equal(x, y) for x, y in zip(a[2], b[2]))


# refusals


def refused(call, match, kv=None):
    before = None if kv is None else [x.clone() for x in kv.pool.k]
    with pytest.raises(ValueError, match=match):
        call()
    if kv is not None:
        assert kv.pool.grads(0) is None and kv.lengths == PAST
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, kv.pool.k))


@pytest.mark.parametrize(
    "name, change, match",
    [
        ("q", lambda x: x[0], r"q \[B, C, heads, D\]"),
        ("q", lambda x: x[:, :0], "no empty dimension"),
        ("q", lambda x: x.tolist(), "got list"),
        ("q", lambda x: x.long(), "floating"),
        ("q", lambda x: x[:, :, :3], "multiple of KV heads"),
        ("q", lambda x: x[:1], "one batch"),
        ("q", lambda x: x[:, 1:], "one batch"),
        ("q", lambda x: x[..., :4], "one batch"),
        ("q", lambda x: x.float(), "one floating dtype"),
        ("k", lambda x: x.float(), "one floating dtype"),
        ("v", lambda x: x.bfloat16(), "one floating dtype"),
        ("v", lambda x: x.to("meta"), "one device"),
        ("v", lambda x: x[..., :4], "k and v of one shape"),
        ("k", lambda x: x[:, :, :1], "k and v of one shape"),
    ],
)
def test_tensors_that_do_not_fit(name, change, match):
    kv = make_past()
    tensors = make_inputs()
    tensors["qkv".index(name)] = change(tensors["qkv".index(name)])
    refused(lambda: paged_attention(*tensors, kv, 0, scale=1.0), match, kv)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"scale": float("nan")}, "finite"),
        ({"scale": float("inf")}, "finite"),
        ({"scale": None}, "finite"),
        ({"scale": True}, "finite"),
        ({"window": 0}, "window"),
        ({"window": -3}, "window"),
        ({"window": 2.0}, "window"),
        ({"window": True}, "window"),
        ({"first_token": -1}, "first_token"),
        ({"first_token": 1.0}, "first_token"),
        ({"sinks": torch.zeros(H - 1)}, "sinks"),
        ({"sinks": torch.zeros(1, H)}, "sinks"),
        ({"sinks": torch.zeros(H, dtype=torch.int64)}, "sinks"),
        ({"sinks": torch.zeros(H, device="meta")}, "sinks"),
        ({"documents": torch.zeros(B, C + 1, dtype=torch.int64)}, "documents"),
        ({"documents": torch.zeros(C, dtype=torch.int64)}, "documents"),
        ({"documents": torch.zeros(B, C)}, "int32 or int64"),
        ({"documents": [0] * B}, "documents to be a tensor"),
        ({"sinks": [0.0] * 4}, "sinks to be a tensor"),
        ({"selected": [[0]]}, "selected to be a tensor"),
        ({"documents": torch.zeros(B, C, dtype=torch.int64, device="meta")}, "documents"),
        ({"selected": torch.zeros(B, 1, 2, 3, dtype=torch.int32)}, "3 query blocks"),
        ({"selected": torch.zeros(B, 1, 4, 3, dtype=torch.int32)}, "3 query blocks"),
        ({"selected": torch.zeros(B, 3, 3, 3, dtype=torch.int32)}, "or 1"),
        ({"selected": torch.zeros(1, 1, 3, 3, dtype=torch.int32)}, "selected"),
        ({"selected": torch.zeros(B, 3, 3, dtype=torch.int32)}, "selected"),
        ({"selected": torch.zeros(B, 1, 3, 3, dtype=torch.int64)}, "int32"),
        ({"backend": "flash"}, "reference, triton, cudnn"),
        ({"backend": None}, "reference, triton, cudnn"),
        ({"accumulate": "add"}, "accumulate"),
        ({"kept": {0: (torch.zeros(B, C, H, D), torch.zeros(B, H, C))}}, "kept"),
        ({"kept": {0: (torch.zeros(B, C + 1, H, D).double(), torch.zeros(B, H, C + 1).double())}}, "kept"),
        ({"kept": {0: (torch.zeros(B, C, H, D).double(), torch.zeros(B, C, H).double())}}, "kept"),
    ],
)
def test_options_that_do_not_fit(options, match):
    kv = make_past()
    refused(lambda: paged_attention(*make_inputs(), kv, 0, **({"scale": 1.0} | options)), match, kv)


@pytest.mark.parametrize("layer", [-1, 2, True, "0", None])
def test_a_layer_that_is_not_there(layer):
    kv = make_past()
    refused(lambda: paged_attention(*make_inputs(), kv, layer, scale=1.0), "layer", kv)


def test_a_past_that_does_not_fit():
    tensors = make_inputs()
    refused(lambda: paged_attention(*tensors, make_past(torch.float32), 0, scale=1.0), "k pages")
    refused(lambda: paged_attention(*tensors, make_past(past=(3, 3, 3)), 0, scale=1.0), "2 ints")
    narrow = [x[..., :4] for x in tensors]
    refused(lambda: paged_attention(*narrow, make_past(), 0, scale=1.0), "k pages")
    fewer = [tensors[0], tensors[1][:, :, :1], tensors[2][:, :, :1]]
    refused(lambda: paged_attention(*fewer, make_past(), 0, scale=1.0), "k pages")
    for name, value in (("page_tokens", 0), ("page_tokens", 2.0), ("lengths", (1.0, 2)), ("lengths", (-1, 2))):
        with mock.patch.object(PagedKV, name, value):
            refused(lambda: paged_attention(*tensors, make_past(open_block=False, past=(0, 0)), 0, scale=1.0), name)


def test_a_segment_without_gradient_pages_is_refused_before_anything_is_written():
    kv = make_past()
    only_read = SplitPast(kv, 1)
    only_read.segments = lambda layer, phase, first: kv.segments(layer, "forward", first)
    out = paged_attention(*make_inputs(), only_read, 0, scale=1.0)
    refused(lambda: out.sum().backward(), "without gradient pages")


# backends


@pytest.mark.parametrize("name", ["triton", "cudnn"])
def test_an_unavailable_backend_is_an_error_and_never_another_backend(name):
    kv = make_past()
    with mock.patch.object(attention.importlib, "import_module", side_effect=ImportError("no such thing")):
        call = lambda: paged_attention(*make_inputs(), kv, 0, scale=1.0, backend=name)  # noqa: E731
        refused(call, f"'{name}' is not available", kv)


def test_auto_takes_the_reference_on_a_cpu_and_says_why():
    q, k, _ = make_inputs()
    name, reason = auto.choose(q, k, Geometry(1.0, PAST, P), make_past())
    assert name == "reference" and "cpu" in reason
    same(run(make_past(), make_inputs()), run(make_past(), make_inputs(), backend="reference"))


def test_the_package_needs_torch_alone():
    code = """
        import sys

        class Without:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, *args):
                absent = name.split(".")[0] in ("triton", "numpy", "transformers")
                return None if absent else self.finder.find_spec(name, *args)

        sys.meta_path = [Without(finder) for finder in sys.meta_path]
        import torch
        from paged_kv import PagedKV, PagePool, paged_attention

        pool = PagePool(layers=1, slots=4, page_tokens=4, kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu")
        kv = PagedKV(pool, 1)
        kv.extend(5)
        x = torch.randn(1, 5, 1, 4)
        kv.append(0, x, x)
        kv.extend(5)
        x.requires_grad_()
        paged_attention(x, x, x, kv, 0, scale=0.5).sum().backward()
        assert x.grad.isfinite().all()
        try:
            paged_attention(x, x, x, kv, 0, scale=0.5, backend="triton")
        except ValueError as error:
            assert "triton" in str(error)
            print("refused")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "refused"


# kept outputs


def test_kept_outputs_are_set_reused_and_popped():
    sinks = torch.randn(H, dtype=torch.float64)
    plain = run(make_past(), make_inputs(), sinks=sinks)
    kept, kv = {}, make_past()
    with torch.no_grad():
        paged_attention(*make_inputs(), kv, 0, scale=0.4, sinks=sinks, kept=kept)
    assert list(kept) == [0] and kept[0][0].shape == (B, C, H, D) and kept[0][1].shape == (B, H, C)
    assert torch.equal(kept[0][0], plain[0]) and not kept[0][0].requires_grad
    with mock.patch.object(reference, "forward", side_effect=AssertionError("computed again")):
        for _ in range(2):  # checkpointing runs the forward twice
            again = paged_attention(*make_inputs(), kv, 0, scale=0.4, sinks=sinks, kept=kept)
            assert again.requires_grad and not kept[0][0].requires_grad, "kept would hold a graph"
        result = run(kv, make_inputs(), sinks=sinks, kept=kept)
    assert kept == {}
    same(result, plain)


def test_what_was_kept_under_inference_mode_can_be_trained_with():
    kept, kv = {}, make_past()
    with torch.inference_mode():
        paged_attention(*make_inputs(), kv, 0, scale=0.4, kept=kept)
    assert kept[0][0].is_inference()
    same(run(kv, make_inputs(), kept=kept), run(make_past(), make_inputs()))


def test_a_failed_forward_keeps_nothing():
    kept = {}
    failing = mock.patch.object(reference, "forward", side_effect=RuntimeError("out of memory"))
    with failing, pytest.raises(RuntimeError):
        paged_attention(*make_inputs(), make_past(), 0, scale=0.4, kept=kept)
    assert kept == {}


# autograd


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_activation_checkpointing(reentrant, keep):
    kept, kv = ({} if keep else None), make_past()
    inputs = make_inputs()
    forward = mock.Mock(wraps=reference.forward)

    def layer(q, k, v):
        return paged_attention(q.sin(), k, v, kv, 0, scale=0.4, kept=kept).sin()

    def grads(out):
        out.sum().backward()
        return [x.grad for x in inputs], [x.clone() for x in kv.pool.grads(0)]

    with mock.patch.object(reference, "forward", forward):
        ours = grads(checkpoint(layer, *inputs, use_reentrant=reentrant))
    assert forward.call_count == (1 if keep else 2) and not kept
    kv, kept, inputs = make_past(), None, make_inputs()
    plain = grads(layer(*inputs))
    for a, b in zip(ours[0], plain[0]):
        assert torch.equal(a, b)
    slots = [s for sequence in kv.pool.table.sequences for s in kv.pool.table.slots(sequence)[:2]]
    assert all(torch.equal(a[slots], b[slots]) for a, b in zip(ours[1], plain[1]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_numbers_are_the_same(mode):
    kv, inputs = make_past(), make_inputs()
    with mode():
        out = paged_attention(*inputs, kv, 0, scale=0.4)
    assert not out.requires_grad and kv.pool.grads(0) is None
    assert torch.equal(out, run(make_past(), inputs)[0])


def test_inputs_without_grad_make_no_graph():
    out = paged_attention(*make_inputs(grad=(False,) * 3), make_past(), 0, scale=0.4)
    assert not out.requires_grad


@pytest.mark.parametrize("grad", [(True, True, False), (True, False, True), (False, True, True), (False, True, False)])
def test_when_some_inputs_require_grad_the_others_are_as_before(grad):
    full, part = run(make_past(), make_inputs()), run(make_past(), make_inputs(grad=grad))
    for wanted, a, b in zip(grad, full[1], part[1]):
        assert torch.equal(a, b) if wanted else b is None
    assert all(torch.equal(a, b) for a, b in zip(full[2], part[2])) and part[2]


def test_frozen_keys_and_values_need_no_gradient_pages():
    full = run(make_past(), make_inputs())
    kv = make_past()
    phases = []
    true = kv.segments
    with mock.patch.object(kv, "segments", lambda *a: phases.append(a[1]) or true(*a)):
        part = run(kv, make_inputs(grad=(True, False, False)))
    assert torch.equal(full[1][0], part[1][0]) and part[1][1:] == [None, None]
    assert phases == ["forward", "forward"] and kv.pool.grads(0) is None


def test_only_sinks_require_grad():
    sinks = [torch.zeros(H, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    run(make_past(), make_inputs(), sinks=sinks[0])
    kv = make_past()
    run(kv, make_inputs(grad=(False,) * 3), sinks=sinks[1])
    assert torch.equal(sinks[0].grad, sinks[1].grad) and kv.pool.grads(0) is None


def test_sinks_of_another_dtype():
    sinks = torch.randn(H).requires_grad_()
    run(make_past(), make_inputs(), sinks=sinks)
    exact = sinks.detach().double().requires_grad_()
    run(make_past(), make_inputs(), sinks=exact)
    assert sinks.grad.dtype == torch.float32 and torch.allclose(sinks.grad, exact.grad.float(), rtol=1e-6)


def test_finite_differences_agree():
    kv = make_past(past=(0, 0), open_block=False)
    inputs = [x.detach()[:, :3].requires_grad_() for x in make_inputs()]
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, sinks):
        return paged_attention(q, k, v, kv, 0, scale=0.4, sinks=sinks)

    assert torch.autograd.gradcheck(function, (*inputs, sinks))


def test_an_own_gradient_is_added_once_in_float32_and_then_rounded():
    """1 + 2^-8 + 2^-8 is 1 + 2^-7 in bfloat16; rounded after each addition it would be 1."""
    kv, inputs = make_past(torch.bfloat16), make_inputs(torch.bfloat16)
    left = tuple(torch.full((B, C, G, D), 1.0 + 2.0**-8) for _ in "kv")

    def backward(dout, q, k, v, *args, **options):
        return q, torch.full(k.shape, 2.0**-8), torch.full(v.shape, 2.0**-8)

    with mock.patch.object(reference, "backward", backward), mock.patch.object(kv, "own_grad", return_value=left):
        _, grads, _ = run(kv, inputs)
    for grad in grads[1:]:
        assert torch.equal(grad, torch.full((B, C, G, D), 1.0 + 2.0**-7, dtype=torch.bfloat16))


def test_an_own_gradient_of_another_block_is_noticed():
    kv = make_past()
    out = paged_attention(*make_inputs(), kv, 0, scale=0.4)
    with (
        mock.patch.object(kv, "own_grad", return_value=(torch.zeros(B, C + 1, G, D), torch.zeros(B, C + 1, G, D))),
        pytest.raises(RuntimeError, match="open block"),
    ):
        out.sum().backward()


def test_a_past_that_changed_since_the_forward_is_noticed():
    kv = make_past()
    out = paged_attention(*make_inputs(), kv, 0, scale=0.4)
    kv.rewind(0)
    with pytest.raises(RuntimeError, match=r"\(10, 7\) tokens long .* is \(0, 0\)"):
        out.sum().backward()
    assert kv.pool.grads(0) is None


def test_a_past_that_changed_and_came_back_is_fine():
    plain = run(make_past(), make_inputs())
    kv, inputs = make_past(), make_inputs()
    out = paged_attention(*inputs, kv, 0, scale=0.4)
    kv.append(0, *(x.detach() for x in inputs[1:]))
    kv.append(1, *(x.detach() for x in inputs[1:]))
    kv.extend(3)
    kv.rewind(PAST)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, plain[1]))


def test_a_second_backward_is_refused_when_it_would_count_twice():
    kv, inputs = make_past(), make_inputs()
    out = paged_attention(*inputs, kv, 0, scale=0.4).sum()
    out.backward(retain_graph=True)
    before = [x.clone() for x in kv.pool.grads(0)]
    with pytest.raises(RuntimeError, match="add twice"):
        out.backward()
    slots = list(kv.pool.table.slots(kv.pool.table.sequences[0])[:2])
    assert all(torch.equal(a[slots], b[slots]) for a, b in zip(before, kv.pool.grads(0)))


def test_a_second_backward_of_the_first_block_would_hand_out_its_gradient_twice():
    kv, inputs = make_past(), make_inputs()
    run(kv, inputs)
    kv.rewind(0)
    first = [torch.randn(B, 10, n, D, dtype=torch.float64, requires_grad=True) for n in (H, G, G)]
    out = paged_attention(*first, kv, 0, scale=0.4).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="add twice"):
        out.backward()


def test_a_second_backward_that_touches_no_page_is_allowed():
    kv, inputs = make_past(), make_inputs(grad=(True, False, False))
    out = paged_attention(*inputs, kv, 0, scale=0.4).sum()
    out.backward(retain_graph=True)
    once = inputs[0].grad.clone()
    out.backward()
    assert torch.equal(inputs[0].grad, 2 * once)


def test_two_losses_of_two_forwards_add_up():
    """Gradient pages hold the sum of all contributions."""
    kv = make_past()
    once = run(make_past(), make_inputs())
    run(kv, make_inputs())
    twice = run(kv, make_inputs())
    assert all(torch.equal(2 * a, b) for a, b in zip(once[2], twice[2]))


def test_a_second_derivative_is_refused():
    inputs = make_inputs()
    out = paged_attention(*inputs, make_past(), 0, scale=0.4)
    (grad,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()


def test_autocast_changes_nothing():
    kv, inputs = make_past(torch.float32), make_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(kv, inputs)
    assert ours[0].dtype == torch.float32
    same(ours, run(make_past(torch.float32), make_inputs(torch.float32)))


def test_strided_inputs_and_expanded_gradients():
    plain, kv = run(make_past(), make_inputs()), make_past()
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in make_inputs()]
    assert not inputs[0].is_contiguous()
    out = paged_attention(*inputs, kv, 0, scale=0.4)
    assert torch.equal(out, plain[0])
    out.sum().backward()  # the incoming gradient is one number, expanded
    again = make_inputs()
    paged_attention(*again, make_past(), 0, scale=0.4).backward(torch.ones_like(out))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, again))


def test_backends_run_on_the_device_of_the_tensors(monkeypatch):
    """Triton launches on the current device, which need not be theirs."""
    current, seen = [0], []

    def exchange(index):
        before, current[0] = current[0], index
        return before

    class Backend:
        @staticmethod
        def forward(q, k, v, segments, geometry):
            seen.append(current[0])
            return torch.empty_like(q), lse

        @staticmethod
        def backward(dout, q, k, v, out, lse, segments, geometry, **options):
            seen.append(current[0])
            return q, k, v

    class Past:
        page_tokens, lengths = 64, (0,)
        segments, own_grad = staticmethod(lambda *_: iter(())), staticmethod(lambda *_: None)

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    with FakeTensorMode():
        q, lse = torch.empty(1, 4, 2, 8, device="cuda:1"), torch.empty(1, 2, 4, device="cuda:1")
        call = attention.Call(Past(), 0, Geometry(0.1, (0,), 64), 0, Backend, "owner", None)
        ctx = mock.Mock(needs_input_grad=(True, True, True, False, False))
        function.PagedAttention.forward(ctx, q, q, q, None, call)
        ctx.saved_tensors = (q, q, q, None, q, lse, None, None)
        function.PagedAttention.backward(ctx, q)
    assert seen == [1, 1] and current == [0]


def test_in_the_middle_of_a_compiled_function():
    kv = make_past()

    def layer(q, k, v):
        return paged_attention(q.sin(), k.cos(), v, kv, 0, scale=0.4).exp()

    compiled = torch.compile(layer, backend="eager")
    inputs = make_inputs()
    compiled(*inputs).sum().backward()
    kv, plain = make_past(), make_inputs()
    layer(*plain).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, plain))


def test_an_interrupted_backward_releases_the_past():
    kv, closed = make_past(), []

    class Watched(SplitPast):
        def segments(self, *args):
            try:
                yield from super().segments(*args)
            finally:
                closed.append(args[1])

    def fail(dout, q, k, v, out, lse, segments, geometry, **_):
        next(iter(segments))
        raise KeyboardInterrupt

    out = paged_attention(*make_inputs(), Watched(kv, 1), 0, scale=0.4)
    with mock.patch.object(reference, "backward", fail), pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    assert closed == ["forward", "backward"]
