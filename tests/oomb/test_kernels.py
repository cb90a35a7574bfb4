"""What a GPU's kernels serve, as planning knows it: as they do themselves, and with their own words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.models import configs
from tests.oomb.test_planner import H200, SEVEN
from transformers import Qwen2Config

from oomb import ChunkConfig, kernels, plan
from oomb.cli.main import main
from oomb.rates import STATED
from oomb.tiny import byte_tokenizer
from paged_kv import auto, cudnn, triton_attention


def test_they_are_those_of_the_backends():
    assert kernels.PAGE_TOKENS == triton_attention.PAGE_TOKENS
    assert kernels.HEAD_DIMS == triton_attention.HEAD_DIMS == auto._TRITON_DIMS
    assert kernels.DTYPES["triton"] == triton_attention.DTYPES
    assert kernels.OTHERS["cudnn"] in str(cudnn._refusal("something"))


def test_pages_that_no_kernel_has_are_planned_in_plain_torch():
    """auto: a run is slow there and takes more; a rate of the kernels says nothing of it."""
    seven = Qwen2Config(**SEVEN)
    served = plan(seven, 65536, speeds=STATED["H200"], **H200)
    other = plan(seven, 65536, config=ChunkConfig(page_tokens=96), speeds=STATED["H200"], **H200)
    assert served.seconds is not None and served.plain is None
    assert other.seconds is None and "pages of 64 or 128 tokens, got 96" in other.plain
    assert any("in plain torch" in line and "got 96" in line for line in other.lines())
    assert other.gpu["attention"] >= served.gpu["attention"] + 3 * 4 * 2**25
    asked = ChunkConfig(backend="reference")
    assert plan(seven, 65536, config=asked, speeds=STATED["H200"], **H200).plain == "it was asked for"
    assert plan(configs()["qwen2"], 100, device="cpu", config=ChunkConfig(page_tokens=96)).plain is None


@pytest.mark.parametrize(("dim", "page"), [(64, 16), (32, 64)])
def test_a_backend_that_does_not_serve_is_refused_in_its_own_words(dim, page):
    model = Qwen2Config(**(SEVEN | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                                    "hidden_size": 2 * dim, "intermediate_size": 64}))  # fmt: skip
    with pytest.raises(ValueError, match="expected") as at_work:
        triton_attention._check_call(torch.zeros(1, 4, 2, dim), SimpleNamespace(page_tokens=page))
    with pytest.raises(ValueError, match="expected") as planned:
        plan(model, 100, config=ChunkConfig(page_tokens=page, backend="triton"), **H200)
    assert str(planned.value) == str(at_work.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "triton", "--page-tokens", "96"], "expected pages of 64 or 128 tokens, got 96"),
        (["--backend", "cudnn", "--dtype", "float32"], "expected dtype bfloat16 or float16, got torch.float32"),
        (["--backend", "cudnn", "--attention", "sparse"], "selected is not supported"),
    ],
)
def test_the_command_line_says_it_before_work_starts(words, said, tmp_path, capsys):
    Qwen2Config(**(SEVEN | {"num_hidden_layers": 1})).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    there = ["--model", str(tmp_path), "--context", "4096", "--gpu-memory", "24GiB", "--rates", "none"]
    assert main(["plan", *there, *words]) == 2
    assert said in capsys.readouterr().err
