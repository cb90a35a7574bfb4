"""What is said to make a step fit does, when it is planned again with nothing else changed."""

from __future__ import annotations

import re
import time
from unittest import mock

import pytest
import torch
from tests.oomb.test_planner import SEVEN
from transformers import GptOssConfig, Qwen2Config

from oomb import ChunkConfig, plan, planner

GIB = 2**30
CHUNKS = ("chunk_tokens", "gpu_kv_budget_bytes", "gpu_keep_budget_bytes", "host_budget_bytes", "grad_page_dtype")
SMALL = {"gpu_bytes": 24 * GIB, "host_bytes": 64 * GIB}


@pytest.fixture(scope="module", autouse=True)
def built_once():
    """One model without weights, and its adapters, for all plans that ask for the same: half of a plan's time."""
    names = ("bare", "adapter_parameters")
    with mock.patch.multiple(planner, **{name: _once(getattr(planner, name)) for name in names}):
        yield


def _once(build):
    made = {}

    def built(config, *args, **more):
        key = (config.to_json_string(), args, *more.items())
        if key not in made:
            made[key] = build(config, *args, **more)
        return made[key]

    return built


def planned_again(line: str, model, tokens: int, chunks: dict, question: dict):
    """The plan after one line of remedies, read as a person reads it."""
    chunks, question = dict(chunks), dict(question)
    for words in re.split(r", (?=[a-z]\w*:|a context|[\d,]+ GiB)", line):
        name, _, value = words.partition(": ")
        if name in CHUNKS:
            chunks[name] = getattr(torch, value) if name == "grad_page_dtype" else value
        elif words == "adapter: lora":
            question["adapters"] = True
        elif name == "optim":
            question["optim"] = value
        elif more := re.fullmatch(r"([\d,]+) GiB more of host memory", words):
            question["host_bytes"] += int(more[1].replace(",", "")) * GIB
        else:
            tokens = int(re.fullmatch(r"a context of ([\d,]+) tokens", words)[1].replace(",", ""))
    return plan(model, tokens, config=ChunkConfig(**chunks), **question)


QUESTIONS = {
    "weights": (65536, {}, {"optim": "adamw_torch", **SMALL}),
    "weights and past": (3_000_000, {}, {"optim": "adamw_torch", **SMALL}),
    "past": (3_000_000, {"chunk_tokens": 8192}, {"adapters": True, "optim": "adamw_torch", **SMALL}),
    "states": (65536, {}, {"optim": "adamw_torch", "gpu_bytes": 60 * GIB, "host_bytes": 64 * GIB}),
    "budgets": (
        300_000, {"gpu_kv_budget_bytes": 40 * GIB, "gpu_keep_budget_bytes": 40 * GIB, "chunk_tokens": 100_000},
        {"adapters": True, **SMALL},
    ),
    "a host budget": (250_000, {"host_budget_bytes": GIB, "chunk_tokens": 30_000}, {"adapters": True, **SMALL}),
    "pages": (900_000, {}, {"adapters": True, "gpu_bytes": 24 * GIB, "host_bytes": 130 * GIB}),
    "on a CPU": (
        300_000, {}, {"dtype": torch.bfloat16, "optim": "adamw_torch", "device": "cpu", "host_bytes": 64 * GIB},
    ),
}  # fmt: skip


MODELS = {"7B": Qwen2Config(**SEVEN), "windows": GptOssConfig(num_hidden_layers=6, num_local_experts=16)}
CASES = [("7B", name) for name in QUESTIONS] + [("windows", "weights and past"), ("windows", "on a CPU")]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_each_line_makes_it_fit(model, name):
    tokens, chunks, question = QUESTIONS[name]
    tokens *= 1 if model == "7B" else 20
    model = MODELS[model]
    found = plan(model, tokens, config=ChunkConfig(**chunks), **question)
    assert found.obstacle is not None
    assert found.remedies
    for line in found.remedies:
        assert planned_again(line, model, tokens, chunks, question).obstacle is None, line


def test_settings_are_combined_where_none_suffices():
    """A budget and a chunk that are too large, each by itself: no single change helps."""
    tokens, chunks, question = QUESTIONS["budgets"]
    found = plan(Qwen2Config(**SEVEN), tokens, config=ChunkConfig(**chunks), **question)
    assert found.remedies[0] == "chunk_tokens: auto, gpu_kv_budget_bytes: auto, gpu_keep_budget_bytes: auto"
    for missing in found.remedies[0].split(", "):  # the fewest: with one of them left out it does not fit
        fewer = ", ".join(name for name in found.remedies[0].split(", ") if name != missing)
        assert planned_again(fewer, Qwen2Config(**SEVEN), tokens, chunks, question).obstacle is not None
    past = plan(Qwen2Config(**SEVEN), 3_000_000, **QUESTIONS["weights and past"][2])
    assert len(past.remedies) == 2  # nothing that is set helps alone: more memory, or a shorter context, beside it
    assert re.fullmatch(r"adapter: lora, [\d,]+ GiB more of host memory", past.remedies[0])
    assert re.fullmatch(r"adapter: lora, a context of [\d,]+ tokens", past.remedies[1])


def test_what_costs_least_comes_first():
    tokens, _, question = QUESTIONS["states"]
    found = plan(Qwen2Config(**SEVEN), tokens, **question)
    assert found.remedies == ("optim: adamw_8bit", "adapter: lora")
    tokens, chunks, question = QUESTIONS["a host budget"]
    found = plan(Qwen2Config(**SEVEN), tokens, config=ChunkConfig(**chunks), **question)
    assert found.remedies[0] == "chunk_tokens: auto, host_budget_bytes: auto"


def test_no_remedy_that_is_none():
    bare = plan(Qwen2Config(**SEVEN), 4096, gpu_bytes=4 * GIB, host_bytes=GIB)
    assert bare.remedies == ("nothing that is known here",)


@pytest.mark.parametrize("chunk", ["auto", 1024])
@pytest.mark.parametrize("window", [False, True])
def test_a_billion_tokens_are_planned_in_seconds(chunk, window):
    """Whatever is proposed is planned again, so a plan must not take as long as its chunks are many."""
    config = {"chunk_tokens": chunk, "gpu_kv_budget_bytes": 8 * GIB, "host_budget_bytes": 32 * GIB}
    model = MODELS["windows" if window else "7B"]
    plan(model, 100, **SMALL)  # imports
    began = time.process_time()
    found = plan(model, 10**9, config=ChunkConfig(**config), optim="adamw_torch", **SMALL)
    assert found.obstacle is not None and "a context of" in found.remedies[-1]
    assert time.process_time() - began < 20
    for line in found.remedies:
        assert planned_again(line, model, 10**9, config, {"optim": "adamw_torch", **SMALL}).obstacle is None, line
