"""From files to sequences of one context: order, cutting, and every complaint."""

import pytest
import torch

from oomb.data import find_files, read_windows
from oomb.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def read(data, context, *, steps=None, seed=0):
    return read_windows(str(data), TOKENIZER, context, seed=seed, steps=steps)


def test_a_file_is_cut_into_whole_windows_and_the_rest_is_told(tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    windows = read(tmp_path / "a.txt", 300)
    assert windows.ids.shape == (3, 300) and windows.unused_tokens == 1001 - 900
    assert windows.ids.flatten().tolist() == list(text.encode())[:900]
    assert windows.step(0).dtype == torch.int64 and windows.step(0).shape == (1, 300)
    assert torch.equal(windows.step(3), windows.step(0)) and torch.equal(windows.step(4), windows.step(1))


def test_documents_are_joined_by_the_end_of_text_token(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 9)
    ids = read(tmp_path, 30).ids[0].tolist()
    assert ids[9::10] == [EOS] * 3
    assert sorted(ids[::10]) == [ord(c) for c in "abc"]


def test_no_more_is_read_than_the_steps_need(tmp_path):
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("x" * 99)
    windows = read(tmp_path, 50, steps=3)
    assert len(windows) == 3 and windows.files == 2 and windows.unused_tokens == 0
    assert len(read(tmp_path, 50)) == 20


def test_the_order_depends_on_names_and_seed_alone(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, names in ((one, range(20)), (other, reversed(range(20)))):
        (folder / "sub").mkdir(parents=True)
        for name in names:
            (folder / "sub" / str(name)).write_text("text")
    assert [p.name for p in find_files(str(one), 5)] == [p.name for p in find_files(str(other), 5)]
    assert [p.name for p in find_files(str(one), 5)] != [p.name for p in find_files(str(one), 6)]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_text("hidden")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / "seen").write_text("seen")
    assert [p.name for p in find_files(str(tmp_path), 0)] == ["seen"]


def test_what_is_not_text_is_skipped_and_named(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "nul.bin").write_bytes(b"abc\0def")
    (tmp_path / "good.txt").write_text("naïve" * 10)
    windows = read(tmp_path, 20)
    assert windows.files == 1 and len(windows.skipped) == 3


def test_the_standard_library_is_found():
    files = find_files("stdlib", 0)
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names and not any("test" in path.parts for path in files)
    windows = read("stdlib", 4096, steps=2)
    assert len(windows) == 2 and int(windows.ids.min()) >= 0 and int(windows.ids.max()) <= EOS


def test_too_little_text_says_how_much_there_is_and_how_much_is_needed(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 1233)
    with pytest.raises(ValueError, match=r"found 1,234 tokens in 1 files, need 16,384"):
        read(tmp_path / "short.txt", 16384, steps=2)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder: folder / "absent", "no file or folder"),
        (lambda folder: folder, "no files in"),
        (lambda folder: _file(folder, b"\xff\xfe"), "not UTF-8"),
        (lambda folder: _file(folder, b"a\0b"), "NUL byte"),
        (lambda folder: _file(folder, b""), "found 0 tokens"),
    ],
)
def test_unusable_data_is_refused(tmp_path, make, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(make(tmp_path), 10)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = _file(tmp_path, b"text")

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", denied)
    with pytest.raises(ValueError, match=r"cannot read .*data.txt.*Permission denied"):
        read(path, 2)


def _file(folder, content):
    path = folder / "data.txt"
    path.write_bytes(content)
    return path
