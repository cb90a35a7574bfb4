"""A save that fails or is killed at any step leaves a whole checkpoint: the one before, or the new one."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb import checkpoint
from oomb.tiny import byte_tokenizer, tiny_model

FILES = ("config.json", "model.safetensors", "sub/vocab.txt")


def write_version(version: str):
    def write(into: Path) -> None:
        for name in FILES:
            (into / name).parent.mkdir(exist_ok=True)
            (into / name).write_text(version)

    return write


def version_in(folder: Path) -> str:
    """The one version that all files of a checkpoint carry."""
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == sorted(FILES)
    versions = {(folder / name).read_text() for name in FILES}
    assert len(versions) == 1, f"a mixture: {versions}"
    return versions.pop()


class Faults:
    """Raise at the n-th call into the system; a killed process makes no call after that either."""

    def __init__(self, monkeypatch, at: int, error: BaseException, killed: bool, exchange: bool) -> None:
        self.calls, self.at, self.error, self.killed = 0, at, error, killed
        real_exchange = checkpoint._exchange if exchange else lambda one, other: False
        for owner, name, real in (
            (os, "rename", os.rename),
            (os, "fsync", os.fsync),
            (shutil, "rmtree", shutil.rmtree),
            (Path, "mkdir", Path.mkdir),
            (Path, "write_text", Path.write_text),
            (checkpoint, "_exchange", real_exchange),
        ):
            monkeypatch.setattr(owner, name, self.guarded(real))

    def guarded(self, real):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at or (self.killed and self.calls > self.at):
                raise self.error
            return real(*args, **kwargs)

        return call


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if path != folder]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("killed", [False, True], ids=["fails", "killed"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_fault_at_any_step_leaves_a_whole_checkpoint(tmp_path, error, killed, exchange):
    outcomes = []
    for at in range(1, 100):
        folder = tmp_path / str(at) / "checkpoint"
        checkpoint.replace_folder(folder, write_version("old"))
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, error, killed, exchange)
            try:
                checkpoint.replace_folder(folder, write_version("new"))
            except type(error):
                outcomes.append("raised")
            else:
                outcomes.append("saved")
        if faults.calls < at:
            break  # there is no step `at`: every step has had its fault
        if not killed or exchange:
            version_in(folder)  # whole without any repair
        checkpoint.recover(folder)
        version = version_in(folder)
        assert version == "new" or outcomes[-1] == "raised"
        assert not leftovers(folder)
        checkpoint.replace_folder(folder, write_version("next"))
        assert version_in(folder) == "next" and not leftovers(folder)
    assert outcomes[-1] == "saved" and outcomes.count("raised") >= len(FILES) + 3


def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    folder = tmp_path / "checkpoint"
    checkpoint.replace_folder(folder, write_version("old"))

    def half(into: Path) -> None:
        (into / "config.json").write_text("new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.replace_folder(folder, half)
    assert version_in(folder) == "old" and not leftovers(folder)


def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.replace_folder(folder, write_version("new"))
    assert (folder / "thesis.tex").read_text() == "years of work"

    (tmp_path / "file").write_text("a file")
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.replace_folder(tmp_path / "file", write_version("new"))


def test_a_link_is_followed(tmp_path):
    real = tmp_path / "disk" / "checkpoint"
    checkpoint.replace_folder(real, write_version("old"))
    link = tmp_path / "link"
    link.symlink_to(real)
    checkpoint.replace_folder(link, write_version("new"))
    assert link.is_symlink() and version_in(real) == "new"


def test_model_and_tokenizer_come_back(tmp_path):
    model, tokenizer = tiny_model(128, seed=3), byte_tokenizer()
    checkpoint.save_checkpoint(tmp_path / "checkpoint", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()
    text = "def f(x):\n\treturn 'ü' * x  # 日本 🙂\r\n\x00"
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint")(text)["input_ids"] == list(text.encode())
