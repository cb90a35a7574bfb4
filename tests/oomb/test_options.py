"""YAML and `--key value`: every setting has its type, its help and its complaint."""

import dataclasses

import pytest
import torch

from oomb.cli.options import Parser, add_options, options, parse_yaml, read_settings
from oomb.cli.train import demo_settings
from oomb.config import ChunkConfig
from oomb.train_config import TrainConfig

NAMED = {"model": "m", "data": "d", "context": 64}


def settings(*argv):
    parser = Parser()
    add_options(parser)
    return read_settings(parser, [str(word) for word in argv])


def test_every_setting_has_help_and_no_name_is_used_twice():
    own = {f.name for f in dataclasses.fields(TrainConfig)} - {"chunks", "trainer"}
    inner = {f.name for f in dataclasses.fields(ChunkConfig)}
    assert not own & inner and set(options()) == own | inner
    for option in options().values():
        assert option.help, f"{option.name} has no help"


def test_the_demo_is_a_valid_run_of_long_context():
    config = TrainConfig.from_settings(demo_settings())
    assert config.context >= 16384 and config.chunks.chunk_tokens == 1024


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("context: 4096\nlr: 3e-4\nsteps: 10\nchunk-tokens: auto\ngrad_page_dtype: bfloat16\n")
    expected = {"context": 4096, "lr": 0.5, "steps": None, "chunk_tokens": "auto", "grad_page_dtype": torch.bfloat16}
    overrides = ("--lr=0.5", "--steps", "none")
    assert settings(file, *overrides) == expected
    assert settings("--config", file, *overrides) == expected
    assert settings(*overrides, file) == expected


def test_every_setting_of_the_trainer_has_its_own_name_and_type(tmp_path):
    given = {
        "--gradient-accumulation-steps": ("8", 8), "--neftune-noise-alpha": ("5", 5.0), "--optim": ("lomo", "lomo"),
        "--activation-checkpointing": ("true", True), "--save-steps": ("0.25", 0.25), "--report-to": ("a", "a"),
        "--lr-scheduler-kwargs": ("{min_lr: 0.1}", {"min_lr": 0.1}), "--save-total-limit": ("none", None),
    }  # fmt: skip
    read = settings(*(word for flag, (text, _) in given.items() for word in (flag, text)))
    assert read == {flag[2:].replace("-", "_"): value for flag, (_, value) in given.items()}
    text = "gradient_accumulation_steps: 8\nlr_scheduler_kwargs: {min_lr: 0.1}\nreport_to: [a, b]\n"
    read = parse_yaml(text, "x")
    assert read == {"gradient_accumulation_steps": 8, "lr_scheduler_kwargs": {"min_lr": 0.1}, "report_to": ["a", "b"]}
    assert TrainConfig.from_settings(NAMED | read).trainer == read


def test_dashes_and_underscores_are_the_same():
    assert settings("--chunk-tokens", 8) == settings("--chunk_tokens", 8) == settings("--chunk_tokens=8")
    assert parse_yaml("chunk-tokens: 8", "x") == parse_yaml("chunk_tokens: 8", "x") == {"chunk_tokens": 8}


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1000", 1000), ("8GiB", 8 << 30), ("8gb", 8 * 10**9), ("1.5 MiB", 3 << 19), ("2KB", 2000), ("7B", 7)],
)
def test_bytes_may_carry_a_unit(text, count):
    assert settings("--gpu-kv-budget-bytes", text) == {"gpu_kv_budget_bytes": count}
    assert settings("--gpu-kv-budget", text) == settings("--gpu_kv_budget", text) == {"gpu_kv_budget_bytes": count}
    assert parse_yaml(f"gpu_kv_budget: {text}", "x") == {"gpu_kv_budget_bytes": count}
    assert parse_yaml(f"gpu_kv_budget_bytes: {text}", "x") == {"gpu_kv_budget_bytes": count}


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--chunk-token", "8"], "sets 'chunk_token', which is no setting: did you mean 'chunk_tokens'"),
        (["--learning-rate=1"], "sets 'learning_rate': it is called 'lr' here"),
        (["--disable-tqdm=true"], "sets 'disable_tqdm': `oomb train` sees to that itself"),
        (["--frobnicate=1"], "sets 'frobnicate', which is no setting: `oomb train --help`"),
        (["--neftune-noise-alfa=1"], "did you mean 'neftune_noise_alpha'"),
        (["--save-steps", "soon"], "--save-steps must be a number, got 'soon'"),
        (["--steps", "ten"], "--steps must be a whole number or none, got 'ten'"),
        (["--steps", "1.5"], "--steps must be a whole number or none, got '1.5'"),
        (["--chunk-tokens", "many"], "--chunk-tokens must be a whole number or auto, got 'many'"),
        (["--lr", "fast"], "--lr must be a number, got 'fast'"),
        (["--host-budget-bytes", "8G"], "--host-budget must be a number of bytes like 500MB or 8GiB or auto"),
        (["--gpu-kv-budget", "1.5"], "--gpu-kv-budget must be a number of bytes like 500MB or 8GiB or auto, got '1.5'"),
        (["--host-budget", "0.5b"], "--host-budget must be a number of bytes like 500MB or 8GiB or auto, got '0.5b'"),
        (["--check-recompute", "maybe"], "--check-recompute must be true or false, got 'maybe'"),
        (["--grad-page-dtype", "int8"], "--grad-page-dtype must be float32, bfloat16 or float64 or none, got 'int8'"),
        (["--attention", "linear"], "--attention must be dense, sparse, got 'linear'"),
        (["--context"], "expected one argument"),
        (["absent.yaml"], "cannot read the config file 'absent.yaml'"),
        (["one.yaml", "two.yaml"], "unrecognized arguments: two.yaml"),
        (["one.yaml", "--config", "two.yaml"], "two config files"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(argv, complaint):
    with pytest.raises(ValueError) as caught:
        settings(*argv)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("chunk_tokns: 8", "run.yaml sets 'chunk_tokns', which is no setting: did you mean 'chunk_tokens'"),
        ("steps: true", "run.yaml: steps must be a whole number or none, got True"),
        ("steps: 2.0", "run.yaml: steps must be a whole number or none, got 2.0"),
        ("model: [a, b]", "run.yaml: model must be text"),
        ("lr: {a: 1}", "run.yaml: lr must be a number"),
        ("- a\n- b", "must hold `key: value` lines, got a list"),
        ("a: b: c", "is not YAML"),
        ("chunk_tokens: 8\nchunk-tokens: 9", "chunk_tokens is set twice"),
    ],
)
def test_a_mistake_in_the_file_is_named(text, complaint):
    with pytest.raises(ValueError) as caught:
        parse_yaml(text, "run.yaml")
    assert complaint in str(caught.value)


def test_an_empty_file_sets_nothing():
    assert parse_yaml("", "x") == parse_yaml("# only a comment", "x") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", 1), ("context", 0), ("context", -5), ("context", True), ("context", 64.0), ("steps", 0),
        ("lr", 0.0), ("lr", -1.0), ("lr", float("nan")), ("lr", float("inf")), ("weight_decay", -0.1),
        ("max_grad_norm", 0.0), ("seed", -1), ("adapter", "dora"), ("rope_type", "ntk"), ("documents", "folder"),
        ("data_format", "csv"), ("lora_rank", 0), ("lora_dropout", 1.0), ("lora_dropout", -0.1), ("rope_theta", 0.0),
        ("streaming", 1), ("eval_data", ""),
        ("dtype", "float16"), ("device", "tpu"), ("device", "cuda:x"), ("model", " "), ("output", ""),
        ("chunk_tokens", 0), ("page_tokens", -1), ("gpu_kv_budget_bytes", -1), ("backend", "magic"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        TrainConfig.from_settings(NAMED | {name: value})


@pytest.mark.parametrize("name", NAMED)
def test_model_data_and_context_must_be_named(name):
    with pytest.raises(ValueError, match=f"^{name} is not set"):
        TrainConfig.from_settings({key: value for key, value in NAMED.items() if key != name})


def test_settings_survive_the_round_trip():
    config = TrainConfig.from_settings(NAMED | {"chunk_tokens": 32, "lr": 0.1, "grad_page_dtype": torch.bfloat16})
    assert TrainConfig.from_settings(config.to_settings()) == config
