"""Ways to be silently wrong that an adversarial reading found, each now exact or loud."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from tests.dense import dense_loss
from tests.models import COMMON, VOCAB, build, configs
from tests.numerics import gradient_errors, gradients
from tests.oomb.test_exact import ROPES, tokens
from tests.oomb.test_training import lora
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, PhimoeConfig, Qwen2Config, Qwen2ForCausalLM

from oomb import ChunkConfig, Unsupported, calibration, chunked_backward, chunked_loss, verify
from oomb.api import PROFILE
from oomb.hf import Parts
from oomb.loss import cross_entropy, tiled_loss
from oomb.packing import collate
from oomb.token_losses import refuse_if_not_a_sum

CONFIG = ChunkConfig(chunk_tokens=6, page_tokens=4)


def rope_model(kind: str):
    config = configs()["llama"]
    config.rope_parameters = dict(ROPES[kind])
    config.max_position_embeddings = 16
    return build(config)


def exact(model, ids, loss=None) -> None:
    (chunked_loss(model, ids, config=CONFIG) if loss is None else loss).backward()
    ours = gradients(model)
    dense_loss(model, ids).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_longer_call_between_the_passes_does_not_move_the_frequencies(kind):
    model, ids = rope_model(kind), tokens(1, 37)
    fresh = copy.deepcopy(model)
    loss = chunked_loss(model, ids, config=CONFIG)
    with torch.no_grad():
        model(input_ids=tokens(1, 60), use_cache=False)
    loss.backward()
    dense_loss(fresh, ids).backward()
    assert max(gradient_errors(gradients(model), gradients(fresh))) <= 1e-10


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_modules_with_a_forward_of_their_own(kind):
    model, ids = rope_model(kind), tokens(1, 37)
    add_hook_to_module(model.model.rotary_emb, ModelHook())
    wrapped = model.model.rotary_emb.forward
    chunked_backward(model, ids, config=CONFIG)
    assert model.model.rotary_emb.forward is wrapped
    ours = gradients(model)
    dense_loss(model, ids).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


def test_a_rotary_module_that_reads_the_longest_position_itself_is_refused():
    config = PhimoeConfig(
        **{**COMMON, "max_position_embeddings": 64},
        num_local_experts=4,
        sliding_window=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "short_mscale": 1.1,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 16,
            "factor": 4.0,
        },
    )
    with pytest.raises(Unsupported, match="longest"):
        chunked_loss(build(config), tokens(1, 37), config=CONFIG)


def test_a_reused_input_buffer():
    model, ids = build(configs()["qwen2"]), tokens(1, 23)
    buffer = ids.clone()
    loss = chunked_loss(model, buffer, config=CONFIG)
    buffer.fill_(1)
    exact(model, ids, loss)


def frozen_head_scaled(model):
    model.base_model.model.lm_head.weight.mul_(2)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: model.eval(), "train or eval mode"),
        (frozen_head_scaled, "the parameter lm_head.weight"),
        (lambda model: model.base_model.disable_adapter_layers(), "adapters|requires_grad|disabled"),
        (lambda model: model.base_model.model.lm_head.requires_grad_(True), "requires_grad of lm_head"),
    ],
)
def test_what_changes_between_the_passes_is_named(change, what):
    model = lora("qwen2", dropout=0.3)
    loss = chunked_loss(model, tokens(1, 23), config=CONFIG)
    with torch.no_grad():
        change(model)
    with pytest.raises(RuntimeError, match=what):
        loss.backward()


def test_values_that_differ_in_the_walk_are_noticed():
    model = build(configs()["qwen2"])
    value = model.model.layers[2].self_attn.v_proj
    value.register_forward_hook(lambda _module, _args, out: out * 1.1 if torch.is_grad_enabled() else None)
    with pytest.raises(RuntimeError, match="layer 2: keys or values"):
        chunked_backward(model, tokens(1, 23), config=CONFIG)


def test_a_hook_on_the_decoder_runs_once():
    model, ids = build(configs()["qwen2"]), tokens(1, 23)
    chunked_loss(model, ids, config=CONFIG)

    def scaled(_module, _args, output):
        output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    model.model.register_forward_hook(scaled)
    exact(model, ids)


class Shifted(nn.Module):
    """Mixes each token with the one before: state besides keys and values."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def test_a_module_replaced_after_the_first_step_is_probed_again():
    model, ids = build(configs()["qwen2"]), tokens(1, 23)
    exact(model, ids)
    attention = model.model.layers[1].self_attn
    attention.k_proj = Shifted(attention.k_proj)
    with pytest.raises(Unsupported, match="state"):
        chunked_loss(model, ids, config=CONFIG)


def test_state_that_the_output_does_not_show_yet():
    model = build(configs()["qwen2"])
    attention = model.model.layers[1].self_attn
    attention.v_proj = Shifted(attention.v_proj)
    with torch.no_grad():
        attention.o_proj.weight.zero_()
    with pytest.raises(Unsupported, match="state"):
        chunked_loss(model, tokens(1, 23), config=CONFIG)


def test_what_a_wrapper_adds_to_the_loss_is_not_dropped():
    peft = AdaLoraConfig(r=2, init_r=3, target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    model = get_peft_model(build(configs()["qwen2"]), peft).double()
    with pytest.raises(Unsupported, match="adds something to its loss"):
        chunked_loss(model, tokens(1, 23), config=CONFIG)


@pytest.mark.parametrize(
    "name, targets",
    [("qwen3_moe", {"target_modules": "all-linear"}), ("gpt_oss", {"target_parameters": ["mlp.experts.down_proj"]})],
)
def test_adapters_on_experts_count_their_base_as_written_and_are_exact(name, targets):
    """peft puts a parametrization on the experts and takes it off at every call."""
    peft = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
    model = get_peft_model(build(configs()[name]), peft).double()
    versions = [p._version for p in model.parameters()]
    exact(model, tokens(1, 23))
    assert [p._version for p in model.parameters()] != versions
    experts = next(p for name, p in model.named_parameters() if "experts" in name and p.ndim == 3)
    for changed in (next(p for p in model.parameters() if p.requires_grad), experts):
        loss = chunked_loss(model, tokens(1, 23), config=CONFIG)
        with torch.no_grad():
            changed.mul_(2.0)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            loss.backward()


def test_a_layer_that_writes_its_own_parameters_is_refused():
    model = build(configs()["qwen2"])
    weight = model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)

    def write(*_):
        weight.mul_(1 + 1e-9)

    model.model.layers[1].register_forward_pre_hook(write)
    with pytest.raises(Unsupported, match="changes its own parameter model"):
        chunked_loss(model, tokens(1, 23), config=CONFIG)


def test_the_balance_loss_under_reentrant_checkpointing_is_refused():
    model = build(configs()["qwen3_moe_balanced"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(Unsupported, match="reentrant"):
        chunked_loss(model, tokens(1, 23), config=CONFIG)


def test_what_is_kept_on_the_model_goes_nowhere_else(tmp_path):
    model, ids = build(configs()["qwen2"], dtype=torch.float32), tokens(1, 23)
    chunked_backward(model, ids, config=CONFIG)
    copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    assert "oomb" not in "".join(p.name for p in tmp_path.iterdir())
    assert "_oomb" not in (tmp_path / "config.json").read_text()


def test_more_bad_input_is_a_clear_error():
    gpt2 = build(
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=16, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    )
    with pytest.raises(ValueError, match="16 positions"):
        chunked_loss(gpt2, tokens(1, 23), config=CONFIG)
    assert torch.isfinite(chunked_loss(gpt2, tokens(1, 16), config=CONFIG))
    model = build(configs()["qwen2"])
    for arguments, reason in (
        ({"loss_fn": "mse"}, "function"),
        ({"loss_fn": lambda logits, labels: None}, "NoneType"),
        ({"loss_fn": lambda logits, labels: logits.argmax(-1) == labels}, "floating"),
        ({"loss_fn": lambda logits, labels: logits.detach().sum(-1)}, "cut off"),
        ({"num_items": True}, "num_items"),
    ):
        with pytest.raises(ValueError, match=reason):
            chunked_loss(model, tokens(1, 12), config=CONFIG, **arguments)
    small = build(configs()["qwen2"])
    small.lm_head = nn.Linear(32, 40, bias=False, dtype=torch.float64)
    with pytest.raises(ValueError, match="the model's head"):
        chunked_loss(small, torch.full((1, 12), 50), config=CONFIG)
    with pytest.raises(ValueError, match="meta"):
        chunked_loss(copy.deepcopy(model).to("meta"), tokens(1, 12), config=CONFIG)
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict"):
        chunked_loss(model, tokens(1, 12), config=CONFIG)


class ShorterFactors(TorchDispatchMode):
    """Matrix products of float32 as units for TF32 make them: ten binary digits of each factor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            args = [self.cut(x) if x.dtype == torch.float32 and x.ndim > 1 else x for x in args]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def cut(x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def test_float32_products_of_fewer_digits_are_no_state_between_tokens():
    """A deep model whose products lose digits differs from itself by more than float32 explains."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 8}
    torch.manual_seed(0)
    model, ids = Qwen2ForCausalLM(Qwen2Config(**COMMON | sizes)), tokens(1, 40)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ShorterFactors(), torch.no_grad():
            loss = chunked_loss(model, ids, config=CONFIG)
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(dense_loss(model, ids)), rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"attention": "sparse", "top_k_pages": 1, "recent_pages": 1}])
@pytest.mark.parametrize("budget", [{}, {"gpu_kv_budget_bytes": 1, "gpu_selection_budget_bytes": 0}])
def test_another_default_device_changes_nothing(more, budget):
    """What is made on the host is made there whatever `torch.set_default_device` says: nothing else can be pinned."""
    (model, fresh), ids = (build(configs()["qwen2"]) for _ in range(2)), tokens(2, 29)
    documents = torch.bucketize(torch.arange(29), torch.tensor([5, 14]), right=True).expand(2, -1)
    config = ChunkConfig(chunk_tokens=8, page_tokens=4, **more, **budget)
    for arguments in ({}, {"document_ids": documents}):
        expected = chunked_backward(model, ids, config=config, **arguments)
        wanted = gradients(model)
        with torch.device("meta"):
            loss = chunked_backward(fresh, ids, config=config, **arguments)  # which is asked what it is in there, too
        found = gradients(fresh)
        assert torch.equal(loss, expected) and all(torch.equal(found[name], grad) for name, grad in wanted.items())


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "qwen3_moe_balanced"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype_changes_nothing(dtype, name):
    model, ids, before = build(configs()[name]), tokens(2, 23), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        loss = chunked_loss(model, ids, config=ChunkConfig(chunk_tokens=6, page_tokens=4, gpu_kv_budget_bytes=1))
        loss.backward()
    finally:
        torch.set_default_dtype(before)
    ours = gradients(model)
    dense_loss(model, ids).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


def test_another_default_device_stops_no_tool(monkeypatch):
    model, told = build(configs()["qwen2"], dtype=torch.float32), []
    row = {"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "starts": [0]}
    monkeypatch.setattr(calibration, "SECONDS", 1e-3)
    with torch.device("meta"):
        assert verify(model, tokens=40, config=CONFIG).passed
        refuse_if_not_a_sum(lambda out, labels, num_items_in_batch: told.append(out) or out.logits[:, :-1].sum() * 0.0)
        assert collate([row, row])["labels"].tolist() == [row["labels"]] * 2
        asked = {"config": CONFIG, "device": torch.device("cpu"), "dtype": torch.float32}
        calibration.calibrate(model.config, chunk_tokens=8, context_tokens=40, **asked)
    assert told


def test_weights_on_several_devices_are_refused_before_work_starts():
    """As of a model that a device_map spread, or of which a part waits elsewhere."""
    model = build(configs()["qwen2"])
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ValueError, match="weights are on cpu, meta: expected all on one device"):
        chunked_loss(model, tokens(1, 12), config=CONFIG)
    assert not hasattr(model, PROFILE)


def test_a_step_within_the_capture_of_a_graph_is_refused(monkeypatch):
    model = build(configs()["qwen2"])
    monkeypatch.setattr(Parts, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for run in (chunked_loss, chunked_backward):
        with pytest.raises(ValueError, match="CUDA graph is being captured"):
            run(model, tokens(1, 12), config=CONFIG)


def test_labels_beyond_the_logits_are_refused_though_the_head_seems_larger():
    """As a head of packed weights does; a kernel would read another token's logits, or beyond all of them."""
    rows, targets = torch.randn(1, 6, 40), torch.tensor([[3, -100, 45, 1, 2, 0]])
    options = {"token_loss": cross_entropy, "tile_tokens": 4, "vocab_size": 61}
    with pytest.raises(ValueError, match="there is a label 45, and the model makes only 40 logits a token"):
        tiled_loss(rows, targets, lambda hidden: hidden, **options)
    assert tiled_loss(rows, targets.clamp_max(39), lambda hidden: hidden, **options).isfinite()
