"""The seconds that are foretold: what the passes cost, what the link costs, and how speeds are found."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import COMMON, VOCAB, build, configs
from tests.oomb.test_planner import H200, MEASURED, SEVEN, SYSTEMS
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config

from oomb import ChunkConfig, chunked_backward, job, plan, probe
from oomb.calibration import _solve, calibrate, pair
from oomb.cli.main import main
from oomb.eta import Kept, ModelWork, Pass, chunk_passes
from oomb.hf import take_apart
from oomb.masks import window_of
from oomb.memory import Machine
from oomb.placement import keep_costs, place
from oomb.probe import outline
from oomb.rates import STATED, Speeds, read_rates
from oomb.storage import Stored
from oomb.tiny import byte_tokenizer
from oomb.traffic import chunk_moves, kept_of, step_seconds
from oomb.train_config import TrainConfig

GIB = 2**30
UNIT = Speeds(Pass(1.0, 1.0, 1.0, 1.0, 1.0), 0.0, 0.0)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['system']}-{row['tokens']}")
def test_the_seconds_measured_on_an_h200(row):
    config = ChunkConfig(chunk_tokens=8192, **SYSTEMS[row["system"]])
    found = plan(Qwen2Config(**SEVEN), row["tokens"], config=config, speeds=STATED["H200"], **H200)
    assert found.seconds == pytest.approx(row["seconds"], rel=0.2)


def test_what_is_kept_saves_what_it_should():
    """In forward passes over all chunks: linear and attention of both phases, for a model of many layers."""
    work = ModelWork(1e6, 1.0, (None,) * 1000)
    bounds = [(i * 100, (i + 1) * 100) for i in range(50)]
    forward, pairs = 1e6 * 5000, work.attention * work.pairs(0, 5000)
    everything, nothing = range(50), range(0)
    for kept, linear, attention in (
        (Kept(everything, None), 4, 3.5),  # once, again for the graph, and backward
        (Kept(nothing, None), 4, 4.5),
        (Kept(everything, nothing), 5, 3.5),
        (Kept(nothing, nothing), 5, 5.5),
        (Kept(everything, None, layer_by_layer=False), 4, 3.5),
    ):
        fill, walk = chunk_passes(work, bounds, kept)
        assert len(fill) == 49 and len(walk) == 50
        total = Pass(*map(sum, zip(*fill, *walk)))
        assert total.linear + total.linear_back == pytest.approx(linear * forward, rel=0.01)
        assert total.attention + total.attention_back == pytest.approx(attention * pairs, rel=0.05)
    frozen = dataclasses.replace(work, learned=0.0)
    _, walk = chunk_passes(frozen, bounds, Kept(everything, None))
    assert sum(p.linear_back for p in walk) == pytest.approx(forward)  # gradients pass, weights get none


def test_chunk_passes_count_what_a_step_really_runs():
    """Products of every layer, forward, counted by hooks in a real step: fill and walk, kept and not."""
    for more in ({}, {"gpu_keep_budget_bytes": 0, "host_budget_bytes": 1}):
        model = build(configs()["qwen2"], dtype=torch.float32).train()
        calls: list[int] = []

        def count(_module, args, _output, calls=calls):
            calls.append(args[0].shape[1])

        hooks = [layer.mlp.gate_proj.register_forward_hook(count) for layer in model.model.layers]
        config = ChunkConfig(chunk_tokens=16, page_tokens=4, **more)
        chunked_backward(model, torch.randint(VOCAB, (1, 16)), config=config)  # the probe
        calls.clear()
        chunked_backward(model, torch.randint(VOCAB, (1, 64)), config=config)
        for hook in hooks:
            hook.remove()
        bounds = [(i, i + 16) for i in range(0, 64, 16)]
        layers = len(model.model.layers)
        kept = Kept(range(4), None) if not more else Kept(range(0), range(0))
        fill, walk = chunk_passes(ModelWork(float(layers), 0.0, (None,) * layers), bounds, kept)
        assert sum(p.linear for p in fill + walk) == sum(calls)


@functools.cache
def _outlined(name):
    with torch.device("meta"):
        parts = take_apart(AutoModelForCausalLM.from_config(configs()[name]).train())
    return parts, outline(parts, 1000)


@settings(deadline=None)
@given(st.sampled_from(["qwen2", "qwen2_window"]), st.integers(1, 8), st.integers(0, 40), st.booleans())
def test_bytes_over_the_link_are_those_of_the_pages(name, chunks, near, keeping):
    """Against a loop over layers, chunks and tokens."""
    parts, profile = _outlined(name)
    page, length = 4, 16
    width = sum(2 * f.kv_heads * f.head_dim * 4 for f in profile.layers.values())
    config = ChunkConfig(
        chunk_tokens=length, page_tokens=page, gpu_kv_budget_bytes=max(near * page * 2 * width, 1),
        gpu_keep_budget_bytes=GIB if keeping else 0, host_budget_bytes=GIB,
    )  # fmt: skip
    bounds = [(i * length, (i + 1) * length) for i in range(chunks)]
    machine = Machine(GIB, GIB, GIB)
    placed = place(config, parts, profile, bounds, batch=1, chunk_tokens=length, train=True, machine=machine)
    costs = keep_costs(parts, profile, 1, layered=placed.layered)
    fill, walk = chunk_moves(config, profile, placed, costs, bounds)
    for i, (start, stop) in enumerate(bounds):
        past = own = 0
        for f in profile.layers.values():
            runs = Stored.of(f.window, bounds, page).runs
            pages = [number for first, last in runs for number in range(first, last)][placed.budget.device_pages :]
            there = {token for number in pages for token in range(number * page, (number + 1) * page)}
            each = 2 * f.kv_heads * f.head_dim * 4
            reached = (start - (f.window or start + 1) + 1) // page * page  # whole pages come
            past += each * len(there & set(range(reached, start)))
            own += each * len(there & set(range(start, stop))) * (i < chunks - 1)
        kept = 0 if keeping else sum(sum(costs.items(kind, length)) for kind in ("attention", "layers"))
        if i < chunks - 1:
            assert (fill[i].to_device, fill[i].from_device) == (past, own + kept)
        assert walk[i].from_device == past
        assert walk[i].to_device == 2 * past + own + kept
    slow = dataclasses.replace(UNIT, each=Pass(), link=1.0)
    seconds = step_seconds(ModelWork(1.0, 1.0, (None,)), bounds, placed, (fill, walk), slow, batch=1, learning=0)
    assert seconds == pytest.approx(sum(max(m.to_device, m.from_device) for m in fill + walk))
    assert kept_of(placed, chunks).layers is None


@given(st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6), st.integers(0, 1000))
def test_speeds_are_found_again(seconds, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(20):
        work = torch.rand(6, generator=generator, dtype=torch.float64)
        work *= torch.tensor([1e9, 1e6, 1e12, 1.0, 1e3, 1e2])
        rows.append((Pass(*work.tolist()), float((work * torch.tensor(seconds, dtype=torch.float64)).sum())))
    for found, true in zip(_solve(rows), seconds, strict=True):
        assert found == pytest.approx(true, rel=2e-2)


@pytest.mark.parametrize("width, parameters", [(3584, 2.3e8), (1024, 1.5e7)])
def test_attention_is_found_beside_what_a_step_and_a_chunk_take_besides(width, parameters):
    """On a device that waits for launches a few layers' attention is the lesser part of every time."""
    each, rows = Pass(1 / 6e14, 1 / 6e14, 1 / 5.6e14, 1 / 5e14, 1 / 5e14), []
    for layers in (2, 4):
        work = ModelWork(2 * parameters * layers + 6e7 * width, 4.0 * width, (None,) * layers, 6e7 * width)
        bounds = [(8192 * i, 8192 * (i + 1)) for i in range(6)]
        fill, walk = chunk_passes(work, bounds, Kept(range(6), range(6)))
        ticks = [0.005 + UNIT.seconds(Pass(*map(operator.mul, p, each))) for p in [*fill, *reversed(walk)]]
        ticks.insert(5, 0.02)  # the last chunk's forward
        for i, more in ((0, 0.3), (1, 0.01), (6, 0.02), (11, 0.1)):
            ticks[i] += more
        rows += pair(ticks, fill, walk)
    found = Pass(*_solve(rows))
    for kind in ("linear", "linear_back", "attention", "attention_back"):
        assert getattr(found, kind) == pytest.approx(getattr(each, kind), rel=0.01)


def test_no_speed_is_negative():
    rows = [(Pass(linear=1.0), 1.0), (Pass(linear=1.0, head=1.0), 0.9), (Pass(linear=2.0, head=1.0), 2.0)]
    found = _solve(rows)
    assert min(found) == 0.0 and found[0] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("more", [{}, {"adapters": True}, {"autocast": torch.bfloat16}])
def test_calibration_measures_and_touches_nothing(more):
    config = ChunkConfig(page_tokens=16)
    state = torch.get_rng_state()
    found = calibrate(
        configs()["qwen3"],
        chunk_tokens=32,
        context_tokens=256,
        config=config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        **more,
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(found.each) > 0 and min(found.each) >= 0 and found.link > 0 and found.update > 0


def test_adapters_are_timed_where_the_run_has_them():
    """peft cannot adapt every linear map of every model, so those that nobody asked for must not be tried."""
    pytest.importorskip("peft")
    question = {
        "chunk_tokens": 32,
        "context_tokens": 96,
        "config": ChunkConfig(page_tokens=16),
        "device": torch.device("cpu"),
    }
    mixture = MixtralConfig(**COMMON, num_local_experts=4)
    found = calibrate(mixture, dtype=torch.float32, adapters=True, targets=["q_proj", "v_proj"], **question)
    assert sum(found.each) > 0


def test_a_run_begins_whether_or_not_its_speed_can_be_measured(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no time for this")

    monkeypatch.setattr(job, "calibrate", fails)
    config = TrainConfig.from_settings({"model": "tiny", "context": 256, "data": "stdlib", "output": "out"})
    with pytest.warns(UserWarning, match="no time for this"):
        found = job.plan_step(config, configs()["qwen3"], torch.device("cpu"))
    assert found.seconds is None and found.obstacle is None


def test_a_plan_is_followed():
    """Its decisions as settings give the same decisions again, on a machine with more memory too."""
    seven = Qwen2Config(**SEVEN)
    first = plan(seven, 262144, adapters=True, gpu_bytes=24 * GIB, host_bytes=112 * GIB)
    config = first.follow(ChunkConfig())
    again = plan(seven, 262144, config=config, adapters=True, gpu_bytes=80 * GIB, host_bytes=1024 * GIB)
    assert (again.gpu, again.host, again.kept) == (first.gpu, first.host, first.kept)
    mine = ChunkConfig(chunk_tokens=4096, gpu_kv_budget_bytes=GIB)
    assert dataclasses.replace(first.follow(mine), host_budget_bytes="auto", gpu_keep_budget_bytes="auto") == mine


def test_the_longest_context_fits_and_a_longer_one_does_not():
    seven = Qwen2Config(**SEVEN)
    for config in (ChunkConfig(), ChunkConfig(gpu_kv_budget_bytes=1, gpu_keep_budget_bytes=0)):
        longest = plan(seven, 65536, config=config, **H200).longest
        assert plan(seven, longest, config=config, **H200).obstacle is None
        assert plan(seven, longest + 1, config=config, **H200).obstacle is not None


def test_the_longest_context_is_the_same_whatever_was_asked():
    """Chunks are then those of the longest context, not of a short one that is a single chunk."""
    seven = Qwen2Config(**SEVEN)
    question = {"adapters": True, "gpu_bytes": 24 * GIB, "host_bytes": 112 * GIB}
    assert len({plan(seven, tokens, **question).longest for tokens in (2, 1000, 65536)}) == 1
    wide = ChunkConfig(chunk_tokens=1_000_000)  # more than the GPU holds at once
    found = plan(seven, 300_000, config=wide, **question)
    assert found.obstacle is not None and f"a context of {found.longest:,} tokens" in found.remedies
    assert plan(seven, found.longest, config=wide, **question).obstacle is None
    assert plan(seven, 2 * found.longest, config=wide, **question).obstacle is not None


@pytest.mark.parametrize("budget", ["host_budget_bytes", "gpu_kv_budget_bytes"])
def test_budgets_set_by_hand_make_no_memory(budget):
    seven, wide = Qwen2Config(**SEVEN), ChunkConfig(**{budget: 1024 * GIB})
    question = {"adapters": True, "gpu_bytes": 80 * GIB, "host_bytes": 64 * GIB}
    found = plan(seven, 3_000_000, config=wide, **question)
    assert found.obstacle is not None and "are needed" in found.obstacle
    assert found.longest <= plan(seven, 3_000_000, **question).longest * 1.2  # a tenth of the host is nobody's
    small = plan(configs()["qwen2"], 4096, config=wide, host_bytes=GIB, device="cpu")
    assert small.longest <= plan(configs()["qwen2"], 4096, host_bytes=GIB, device="cpu").longest


def test_huge_contexts_are_planned_at_once(monkeypatch):
    asked = []

    def ask(mask_function, length, device):
        asked.append(length)
        return window_of(mask_function, length, device)

    monkeypatch.setattr(probe, "window_of", ask)
    assert plan(Qwen2Config(**SEVEN), 30_000_000, gpu_bytes=80 * GIB, host_bytes=64 * GIB).obstacle is not None
    assert len(asked) == 1 and asked[0] <= 2**20  # one mask for all layers, and no row of ten million places
    with pytest.raises(ValueError, match="chunks of 8,192, at most"):
        plan(Qwen2Config(**SEVEN), 10**12, gpu_bytes=80 * GIB, host_bytes=64 * GIB)


def test_what_would_make_it_fit_does():
    seven = Qwen2Config(**SEVEN)
    question = {"gpu_bytes": 80 * GIB, "host_bytes": 64 * GIB, "optim": "adamw_torch"}
    found = plan(seven, 1_000_000, **question)
    assert found.obstacle is not None and found.longest < 1_000_000
    more = next(int(r.split()[0].replace(",", "")) for r in found.remedies if "GiB more" in r)
    assert plan(seven, 1_000_000, **(question | {"host_bytes": (64 + more) * GIB})).obstacle is None
    bare = plan(seven, 4096, gpu_bytes=4 * GIB, host_bytes=GIB)
    assert bare.remedies == ("nothing that is known here",)


def test_a_step_of_several_batches_takes_as_many_times_as_long():
    seven, question = Qwen2Config(**SEVEN), {"adapters": True, "speeds": STATED["H200"], **H200}
    one, four = (plan(seven, 65536, accumulation=count, **question) for count in (1, 4))
    update = 48 / STATED["H200"].memory * 16 * 28 * (3584 * 9 + 512 * 2 + 18944 * 3)
    assert four.tokens == 4 * one.tokens and (four.gpu, four.host) == (one.gpu, one.host)
    assert four.seconds == pytest.approx(4 * one.seconds - 3 * update)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_learn_in_float32_whatever_the_base_is(dtype):
    settings = {"model": "tiny", "context": 256, "data": "stdlib", "adapter": "lora", "dtype": dtype, "rates": "none"}
    found = job.plan_step(TrainConfig.from_settings(settings), configs()["qwen3"], torch.device("cpu"))
    bare = AutoModelForCausalLM.from_config(configs()["qwen3"]).model
    linear = [m for m in bare.modules() if isinstance(m, torch.nn.Linear)]
    learning = 16 * sum(m.in_features + m.out_features for m in linear)
    assert found.host["adapters"] == 16 * learning  # weight, gradient and two states, of four bytes each


def test_rates_that_are_stated():
    assert read_rates("H200") == STATED["H200"]
    half = read_rates("matmul=345e12, link=20e9")
    assert half.link == 20e9 and half.attention == STATED["H200"].attention / 2
    twice = "matmul=1,matmul=2"
    for text in ("H900", "matmul=fast", "memory=1e12", "matmul=1e12,speed=3", "matmul=-1", "matmul=inf", twice):
        with pytest.raises(ValueError, match="rates must be auto, none, H200"):
            read_rates(text)


def test_the_command_line_says_seconds(tmp_path, capsys):
    small = ["plan", "--device", "cpu", "--context", "256", "--chunk-tokens", "64", "--page-tokens", "32"]
    assert main(small) == 0
    assert "tokens a second" in capsys.readouterr().out
    assert main([*small, "--rates", "none"]) == 0
    shown = capsys.readouterr().out
    assert "tokens a second" not in shown and "with --rates" in shown and "longest context here" in shown
    there = ["plan", "--context", "65536", "--gpu-memory", "24GiB", "--host-memory", "64GiB"]
    assert main([*there, "--rates", "H200"]) == 0  # a model of 32 numbers a head
    shown = capsys.readouterr().out
    assert "in plain torch" in shown and "tokens a second" not in shown and "--rates" not in shown
    Qwen2Config(**(SEVEN | {"num_hidden_layers": 1, "vocab_size": 1024})).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    there += ["--model", str(tmp_path)]
    assert main([*there, "--rates", "H200"]) == 0
    assert "on cuda" in (shown := capsys.readouterr().out) and "tokens a second" in shown
    for wrong, said in (
        (["--rates", "fast"], "matmul=300e12"),
        (["--optim", "adamw_8bits"], "closest: adamw_8bit"),
        (["--device", "cpu"], "give one of the two"),
    ):
        assert main([*there, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main([*there, "--context", "20000000", "--host-memory", "1GiB", "--gpu-memory", "2GiB"]) == 1
    assert "does not fit" in (shown := capsys.readouterr().out) and "would fit" in shown


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("plan_*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_predictions_were_right(path):
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) >= (3 if "cpu" in path.name else 6)
    for row in rows:
        assert row["seconds_ratio"] == pytest.approx(1.0, abs=0.2), row["case"]
        assert row["peak_ratio"] == pytest.approx(1.0, abs=0.05), row["case"]
