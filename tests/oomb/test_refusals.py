"""What cannot be honoured exactly is refused, with the reason, before any work starts."""

from __future__ import annotations

import pytest
import torch
from tests.dense import dense_loss
from tests.models import COMMON, VOCAB, build, configs
from tests.numerics import gradient_errors, gradients, relative
from tests.oomb.test_exact import tokens
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Cohere2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    Qwen2ForSequenceClassification,
    Qwen3NextConfig,
)
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

from oomb import ChunkConfig, Unsupported, chunked_backward, chunked_loss

CONFIG = ChunkConfig(chunk_tokens=6, page_tokens=4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**COMMON), "capped"),
        (DiffLlamaConfig(**COMMON), "2 times"),
        (
            MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
            "not kept in pages|AttentionInterface",
        ),
        (
            FalconH1Config(**COMMON, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
            "state|convolution",
        ),
        (Qwen3NextConfig(**COMMON, num_experts=4), "other kinds|convolution"),
        (Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "conv"]), "other kinds|convolution"),
        (
            DeepseekV3Config(
                **{k: v for k, v in COMMON.items() if k not in ("head_dim", "num_key_value_heads")},
                num_key_value_heads=4,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=8,
                v_head_dim=8,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
            ),
            "one head dim",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_architectures(config, reason):
    model = build(config)
    with pytest.raises(Unsupported, match=reason):
        chunked_backward(model, tokens(1, 12), config=CONFIG)
    assert all(p.grad is None for p in model.parameters())


def test_a_decoder_that_is_compiled_as_a_whole():
    """Its masks are made while it is traced, for any packing of documents: they answer for no single position."""
    model = build(configs()["qwen2"])
    model.model.compile(backend="eager")
    with pytest.raises(Unsupported, match="compile its layers instead"):
        chunked_backward(model, tokens(1, 12), config=CONFIG)


def test_chunked_local_attention_beyond_the_cut(monkeypatch):
    """The mask looks causal on a short sequence and is not on a long one."""
    config = Llama4TextConfig(
        **{**COMMON, "num_key_value_heads": 2},
        intermediate_size_mlp=48,
        num_local_experts=1,
        attention_chunk_size=64,
        attn_temperature_tuning=False,
        layer_types=["chunked_attention"] * 3,
        moe_layers=[],
    )
    model = Llama4ForCausalLM(config).double()
    monkeypatch.setattr(
        model, "get_decoder", lambda: model.model, raising=False
    )  # or it is refused for lack of a decoder
    with pytest.raises(Unsupported, match="mask"):
        chunked_loss(model, tokens(1, 200), config=CONFIG)


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(
            **COMMON, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=2.0
        ),
        Cohere2Config(**{**COMMON, "sliding_window": 9}, logit_scale=0.25),
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        ),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_heads_and_embeddings_are_exact(config):
    """Logit scales, parallel blocks, learned positions: against the library's own loss, in float64 but for its
    softmax.
    """
    model, ids = build(config), tokens(2, 23)
    model.eval()
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    dense = gradients(model)
    model.train()
    loss = chunked_loss(model, ids, config=CONFIG)
    loss.backward()
    assert relative(loss, expected) <= 1e-5
    assert gradient_errors(gradients(model), dense)[0] <= 1e-5


def test_attention_dropout():
    config = configs()["qwen2"]
    config.attention_dropout = 0.1
    model = build(config)
    with pytest.raises(Unsupported, match="dropout"):
        chunked_loss(model, tokens(1, 12), config=CONFIG)
    with torch.no_grad():
        model.eval()
        assert torch.isfinite(chunked_loss(model, tokens(1, 12), config=CONFIG))
    gpt2 = build(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.2))
    with pytest.raises(Unsupported, match="dropout"):
        chunked_backward(gpt2, tokens(1, 12), config=CONFIG)
    assert all(p.grad is None for p in gpt2.parameters())


def test_not_a_causal_language_model():
    with pytest.raises(Unsupported, match="causal language model"):
        chunked_loss(torch.nn.Linear(2, 2), tokens(1, 12))
    with pytest.raises(Unsupported, match="head"):
        chunked_loss(Qwen2ForSequenceClassification(configs()["qwen2"]), tokens(1, 12))
    with pytest.raises(Unsupported, match="head"):
        chunked_loss(build(configs()["qwen2"]).model, tokens(1, 12))
    bart = BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    with pytest.raises(Unsupported, match="encoder-decoder"):
        chunked_loss(BartForConditionalGeneration(bart), tokens(1, 12))
    with pytest.raises(Unsupported, match="DataParallel"):
        chunked_loss(torch.nn.DataParallel(build(configs()["qwen2"])), tokens(1, 12))


def arguments(**given):
    ids = tokens(2, 12)
    return {"input_ids": ids} | given


LEFT = torch.ones(2, 12, dtype=torch.long)
LEFT[1, :3] = 0
HOLE = torch.ones(2, 12, dtype=torch.long)
HOLE[0, 5] = 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.zeros(12, dtype=torch.long)}, r"\[batch, tokens\]"),
        ({"input_ids": torch.zeros(2, 12)}, "integer"),
        ({"input_ids": [[1, 2]]}, "tensor"),
        ({"input_ids": torch.full((1, 12), VOCAB)}, "vocabulary"),
        ({"input_ids": torch.full((1, 12), -1)}, "vocabulary"),
        ({"labels": torch.zeros(2, 11, dtype=torch.long)}, "labels must have the shape"),
        ({"labels": torch.zeros(2, 12)}, "labels must be an integer"),
        ({"labels": torch.full((2, 12), VOCAB)}, "labels must be -100 or lie"),
        ({"labels": torch.full((2, 12), -1)}, "labels must be -100 or lie"),
        (
            {
                "labels": torch.zeros(2, 12, dtype=torch.long),
                "attention_mask": (torch.arange(12) < 7).long().expand(2, -1),
            },
            "wherever",
        ),
        ({"attention_mask": LEFT}, "row 1 on the left"),
        ({"attention_mask": HOLE}, "row 0 on the left or in the middle"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, "shape"),
        ({"attention_mask": torch.full((2, 12), -1e9)}, "zeros and ones"),
        ({"position_ids": torch.zeros(3, 12, dtype=torch.long)}, "position_ids"),
        ({"position_ids": torch.arange(12)[None] - 3}, "negative"),
        ({"document_ids": torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2]] * 2)}, "returns after another"),
        ({"document_ids": torch.zeros(2, 3, dtype=torch.long)}, "document_ids"),
        ({"num_items": 0}, "num_items"),
        ({"num_items": float("nan")}, "num_items"),
        ({"config": {"chunk_tokens": 3}}, "ChunkConfig"),
        ({"loss_fn": lambda logits, labels: logits.mean()}, "loss per token"),
    ],
)
def test_bad_input(given, reason):
    model = build(configs()["qwen2"])
    for entry in (chunked_loss, chunked_backward):
        with pytest.raises(ValueError, match=reason):
            entry(model, **arguments(**given))
    assert all(p.grad is None for p in model.parameters())
    check_still_works(model)


def check_still_works(model):
    ids = tokens(1, 14)
    chunked_backward(model, ids, config=CONFIG)
    ours = gradients(model)
    dense_loss(model, ids).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 1.5}, "chunk_tokens"),
        ({"chunk_tokens": True}, "chunk_tokens"),
        ({"chunk_tokens": "all"}, "chunk_tokens"),
        ({"page_tokens": -1}, "page_tokens"),
        ({"attention": "flash"}, "attention"),
        ({"backend": "cuda"}, "backend"),
        ({"accumulate": "sum"}, "accumulate"),
        ({"gpu_kv_budget_bytes": -5}, "gpu_kv_budget_bytes"),
        ({"gpu_kv_budget_bytes": 0}, "gpu_kv_budget_bytes"),
        ({"host_budget_bytes": 0}, "host_budget_bytes"),
        ({"gpu_kv_budget_bytes": "8GiB"}, "gpu_kv_budget_bytes"),
        ({"host_budget_bytes": 1.0}, "host_budget_bytes"),
        ({"recent_pages": 0}, "recent_pages"),
        ({"top_k_pages": -1}, "top_k_pages"),
        ({"grad_page_dtype": torch.int8}, "grad_page_dtype"),
        ({"attention": "sparse", "chunk_tokens": 100, "page_tokens": 64}, "multiple"),
        ({"loss_tile_tokens": 0}, "loss_tile_tokens"),
    ],
)
def test_bad_configuration(given, reason):
    with pytest.raises(ValueError, match=reason):
        ChunkConfig(**given)


def test_a_past_that_does_not_fit_the_budgets():
    model = build(configs()["qwen2"])
    config = ChunkConfig(chunk_tokens=6, page_tokens=4, gpu_kv_budget_bytes=20_000, host_budget_bytes=1_000)
    with pytest.raises(MemoryError, match=r"20,000.*host_budget_bytes=1,000"):
        chunked_loss(model, tokens(1, 60), config=config)
    check_still_works(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN is there")
def test_a_backend_that_is_not_there():
    model = build(configs()["qwen2"], dtype=torch.float32)
    with pytest.raises(ValueError, match="cudnn"):
        chunked_backward(model, tokens(1, 14), config=ChunkConfig(chunk_tokens=6, page_tokens=4, backend="cudnn"))
    assert all(p.grad is None for p in model.parameters())


def test_keys_and_values_must_not_surprise():
    """A model loaded in the library's own way with our attention left on is an error, not wrong numbers."""
    model = AutoModelForCausalLM.from_config(configs()["qwen2"])
    model.set_attn_implementation("oomb")
    with pytest.raises(ValueError, match="outside a chunked step"):
        model(input_ids=tokens(1, 5))


def test_weights_that_are_not_finite_are_named():
    model = build(configs()["qwen2"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or inf"):
        chunked_loss(model, tokens(1, 12), config=CONFIG)
