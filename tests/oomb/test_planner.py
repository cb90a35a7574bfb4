"""The memory that is foretold from a config is what a step takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.models import VOCAB, build, configs
from transformers import Qwen2Config

from oomb import ChunkConfig, Unsupported, chunked_backward, plan
from oomb.hf import take_apart
from oomb.probe import outline, probe

GIB = 2**30
RESULTS = [
    Path(__file__).parents[2] / f"benchmarks/results/step_h200_2026-11-{day}.json" for day in ("29_layers", "30")
]
H200 = {"gpu_bytes": 143_771 * 2**20, "host_bytes": 112 * GIB}
SYSTEMS = {  # as benchmarks/step.py has them
    "resident": {"gpu_kv_budget_bytes": 60 * GIB, "gpu_keep_budget_bytes": 80 * GIB},
    "resident, nothing kept": {"gpu_kv_budget_bytes": 60 * GIB, "gpu_keep_budget_bytes": 0, "host_budget_bytes": 1},
    "all on the host": {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0},
}
MEASURED = [row for path in RESULTS for row in json.loads(path.read_text())["rows"] if row["system"] in SYSTEMS]
SEVEN = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 1 << 23, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['system']}-{row['tokens']}")
def test_the_peak_measured_on_an_h200(row):
    config = ChunkConfig(chunk_tokens=8192, **SYSTEMS[row["system"]])
    found = plan(Qwen2Config(**SEVEN), row["tokens"], config=config, **H200)
    assert found.obstacle is None
    assert sum(found.gpu.values()) / GIB == pytest.approx(row["peak_gib"], rel=0.05)


def test_host_bytes_are_those_of_keys_values_and_gradients():
    config = ChunkConfig(chunk_tokens=8192, gpu_kv_budget_bytes=1, gpu_keep_budget_bytes=0)
    found = plan(Qwen2Config(**SEVEN), 131072, config=config, **H200)
    exact = (131072 - 8192) * 28 * 2 * 4 * 128 * (2 + 4)  # the last chunk's are nobody's past
    assert exact <= found.host["pages"] <= 1.01 * exact


@pytest.mark.parametrize("name", sorted(configs()))
def test_a_config_tells_what_the_model_itself_tells(name):
    model = build(configs()[name], dtype=torch.float32)
    known = probe(take_apart(model), 100)
    with torch.device("meta"):
        bare = type(model)(model.config)
    told = outline(take_apart(bare), 100)
    assert (told.layers, told.stack) == (known.layers, known.stack)
    assert (told.router is None) == (known.router is None)


def test_what_does_not_fit_is_said_with_what_would():
    seven = Qwen2Config(**SEVEN)
    small = plan(seven, 131072, optim="paged_adamw_32bit", **H200)
    assert small.obstacle is None  # 14 + 14 + 57 GiB of weights, gradients and states
    past = plan(seven, 4_000_000, gpu_bytes=80 * GIB, host_bytes=64 * GIB)
    assert past.obstacle is not None and "host_budget_bytes" in past.obstacle and "does not fit" in past.lines()[2]
    weights = plan(seven, 4096, config=ChunkConfig(gpu_kv_budget_bytes=1), gpu_bytes=24 * GIB, host_bytes=64 * GIB)
    assert weights.obstacle is not None and "adapter: lora" in weights.remedies
    lora = plan(seven, 65536, adapters=True, gpu_bytes=24 * GIB, host_bytes=112 * GIB)
    assert lora.obstacle is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"context_tokens": 0}, "context_tokens"), ({"batch": 0}, "batch"), ({"gpu_bytes": 0}, "gpu_bytes")],
)
def test_bad_questions(given, reason):
    with pytest.raises(ValueError, match=reason):
        plan(configs()["qwen2"], **({"context_tokens": 100, "gpu_bytes": GIB} | given))


def test_a_config_that_makes_no_model_is_refused_in_one_line():
    config = configs()["qwen2"]
    config.num_attention_heads = 0
    with pytest.raises(ValueError, match="no model can be made from this config: ZeroDivisionError"):
        plan(config, 100, gpu_bytes=GIB)


def test_a_model_without_weights_cannot_be_run():
    kind = type(build(configs()["qwen2"]))
    with torch.device("meta"):
        model = kind(configs()["qwen2"])
    with pytest.raises(ValueError, match="no weights"):
        chunked_backward(model, torch.randint(VOCAB, (1, 20)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("JetMoe", "does not run without its weights"),  # it counts where tokens go
        ("Doge", "does not run without its weights"),  # it computes with the mask
        ("xLSTM", "none of its layers calls an attention"),
        ("Lfm2", "weights|a convolution"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(name, reason):
    with pytest.raises(Unsupported, match=reason):
        plan(getattr(transformers, f"{name}Config")(num_hidden_layers=2), 100, gpu_bytes=GIB)


def test_layer_outputs_are_counted_as_wide_as_they_are():
    """Gemma 3n hands four hidden states a token from layer to layer."""
    config = transformers.Gemma3nTextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=61, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8, laurel_rank=8,
        num_kv_shared_layers=0,
    )  # fmt: skip
    found = plan(config, 1000, config=ChunkConfig(chunk_tokens=100), gpu_bytes=GIB, host_bytes=GIB, dtype=torch.float32)
    assert found.kept_layers == found.chunks == 10
    outputs, attention = 4 * 32 * 4 * 1000 * 2, 4 * (8 + 1) * 4 * 1000 * 2  # of two layers: the last keeps none
    assert outputs < found.gpu["kept"] < 2 * (outputs + attention)


def test_frequencies_that_depend_on_positions_change_no_plan():
    config = configs()["qwen3"]
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert plan(config, 100, gpu_bytes=GIB).gpu == plan(configs()["qwen3"], 100, gpu_bytes=GIB).gpu


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_moe"])
def test_the_config_is_left_as_it_was(name):
    config, untouched = configs()[name], configs()[name]
    plan(config, 100, adapters=True, gpu_bytes=GIB)
    assert vars(config) == vars(untouched)
