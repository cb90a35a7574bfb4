"""Plans of models whose layers launch kernels of their own, as Liger's do: the meta device has nothing to launch on."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2

from oomb import plan
from oomb.unlaunched import unlaunched

triton = pytest.importorskip("triton")
tl = triton.language

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(**SIZES, num_hidden_layers=2, vocab_size=99)


@triton.jit
def _ones(x_ptr):
    tl.store(x_ptr, 1.0)


def launching(q, k, cos, sin, *_, **__):
    _ones[(1,)](q)
    return q, k


def test_a_plan_launches_nothing(monkeypatch):
    asked = {"device": "cuda", "gpu_bytes": 1 << 34, "host_bytes": 1 << 34}
    expected = plan(CONFIG, 4096, **asked)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", launching)
    assert plan(CONFIG, 4096, **asked).gpu == expected.gpu


def test_other_threads_launch_as_ever():
    x, there = torch.zeros(2), []
    thread = threading.Thread(target=lambda: there.append(_ones[(1,)]))
    with unlaunched():
        _ones[(1,)](x[:1])
        thread.start()
        thread.join()
    assert x[0] == 0
    there[0](x[1:])
    _ones[(1,)](x[:1])
    assert x.tolist() == [1.0, 1.0]
