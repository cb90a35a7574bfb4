"""Every command and every piece of Python in the docs runs, in the order in which a reader meets them.

The commands are those of the page; what would take long is made small by settings that are put after them.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb.checkpoint import save_checkpoint
from oomb.cli.main import main
from oomb.cli.options import options, trainer_options
from oomb.tiny import byte_tokenizer

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PAGES = tuple(f"docs/{n}" for n in ("quickstart", "choosing", "how-it-works", "custom-pipelines", "troubleshooting"))
SHOWING = (*PAGES, "README", "CONTRIBUTING", "packages/oomb/README", "packages/paged_kv/README")  # commands
SMALL = {"--context": "384", "--device": "cpu", "--page-tokens": "32"}
OF_TRAINING = {"--steps": "2", "--generate-tokens": "4"}
OF_MODULES = {
    "benchmarks.smollm2": "--model model --data books --context 384 --short 96 --chunk-tokens 128 --steps 2 "
    "--device cpu"
}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = (line for block in blocks(page, "sh") for line in block.splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The files that the pages speak of: a model, books, notes."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128,
        )
    )  # fmt: skip
    for folder in ("model", "path/to/model"):
        save_checkpoint(tmp_path / folder, model, byte_tokenizer())
    for folder in ("books", "held-out", "path/to/texts"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("one", "two"):
            (tmp_path / folder / f"{name}.txt").write_text("".join(f"{i} {name} {i * i}\n" for i in range(150)))
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"body": f"note {i} " * 9}) + "\n" for i in range(20)))
    for number, block in enumerate(blocks("docs/quickstart", "yaml")):
        (tmp_path / ("run.yaml" if not number else f"{number}.yaml")).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", SHOWING)
def test_the_commands_of_a_page_run(page, desk, capsys):
    if page == "packages/oomb/README":  # its `run.yaml` was run before
        run_oomb(["train", "run.yaml"], capsys)
    for words in commands(page):
        words[0] = words[0].removeprefix(".venv/bin/")
        if words[:2] == ["pip", "install"]:
            about_installing(words)
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), words
        elif words[:3] == ["python", "-m", "pytest"]:
            about_testing(words[3:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.import_module(words[2]).main([*words[3:], *OF_MODULES[words[2]].split()]) == 0
        else:
            assert words[0] == "oomb", words
            run_oomb(words[1:], capsys)
    capsys.readouterr()


def run_oomb(words: list[str], capsys) -> None:
    small = SMALL | (OF_TRAINING if words[0] == "train" else {"--steps": "1"})
    small |= {} if "bench" in words else {"--chunk-tokens": "96"}
    if "--gpu-memory" in words:  # for a machine that is elsewhere
        del small["--device"]
    assert main([*words, *(word for pair in small.items() for word in pair)]) == 0, capsys.readouterr().err


def about_testing(words: list[str]) -> None:
    """Folders and marks of the suite itself, which cannot run within itself."""
    assert all((ROOT / word).is_dir() for word in words if word.startswith("tests/"))
    if "-m" in words:
        mark = words[words.index("-m") + 1].split()[-1]
        assert f'"{mark}: ' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def about_installing(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "packages" / "oomb" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if words[2:] == ["gguf"]:  # transformers' own requirement for such files, which no test needs
        return
    if folders := [word for word in words if word.startswith("packages/")]:  # tests/packaging installs them
        every = {f"packages/{path.name}" for path in (ROOT / "packages").iterdir()}
        assert set(folders) == every if "-e" in words else set(folders) < every
        return
    (extra,) = re.findall(r"oomb\[(\w+)\]", words[2])
    assert extra in project["optional-dependencies"]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, desk, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    program = {"__name__": "page"}
    for block in blocks(page, "python"):
        if "trl" in block:
            pytest.importorskip("trl")
        exec(compile(block, f"{page}.md", "exec"), program)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    """Settings written as `--key`, files and links."""
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    known = set(options()) | set(trainer_options()) | {"dry_run", "config", "help"}
    known |= {name.removesuffix("_bytes") for name in known}
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text):
        assert flag.replace("-", "_") in known, f"--{flag} is no setting"
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`((?:examples|tests|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    """And those that are committed are of today's files and code."""
    import runpy

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timeline = json.loads((ROOT / "benchmarks/results/timeline_h200_2026-11-30.json").read_text())
    module = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    drawn = {name: module[f"draw_{name}"] for name in ("passes", "cost")}
    drawn |= {name: functools.partial(module["draw_measured"], name) for name in module["MEASURED"]}
    drawn["timeline"] = functools.partial(importlib.import_module("timeline").draw, timeline)
    committed = {path.stem: path for path in (ROOT / "docs" / "pictures").iterdir()}
    assert set(committed) == set(drawn)
    for name, draw in drawn.items():
        draw(tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as new, Image.open(committed[name]) as old:
            assert new.format == "PNG"
            if new.text == old.text:  # the same version of matplotlib drew both
                assert new.size == old.size and new.convert("RGB").tobytes() == old.convert("RGB").tobytes(), name
