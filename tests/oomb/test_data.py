"""From files to sequences: what is found and read, in which order, and every complaint."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset

from oomb.data import find_source
from oomb.packing import collate
from oomb.sequences import Stream, read_sequences
from oomb.tiny import byte_tokenizer
from oomb.train_config import TrainConfig

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
VOCAB = 257


def config(data, context=64, **settings):
    return TrainConfig.from_settings({"model": "tiny", "data": str(data), "context": context} | settings)


def read(data, context=64, *, wanted=None, tokenizer=TOKENIZER, **settings):
    c = config(data, context, **settings)
    return read_sequences(find_source(c), tokenizer, c, VOCAB, wanted=wanted)


def rows(sequences):
    return [row["input_ids"].tolist() for row in sequences.rows]


def table(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def test_a_long_file_is_split_and_its_end_kept(tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    sequences = read(tmp_path / "a.txt", 300)
    assert [len(row) for row in rows(sequences)] == [300, 300, 300, 101]
    assert [i for row in rows(sequences) for i in row] == [*text.encode(), EOS]
    assert "1 documents split" in " ".join(sequences.report.lines())


def test_short_files_are_packed_and_do_not_see_each_other(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 9)
    sequences = read(tmp_path, 30)
    (row,) = sequences.rows
    assert sorted(row["input_ids"].tolist()) == sorted([*b"a" * 9, *b"b" * 9, *b"c" * 9, EOS, EOS, EOS])
    assert row["starts"].tolist() == [0, 10, 20]
    assert collate([row])["document_ids"].tolist() == [[0] * 10 + [1] * 10 + [2] * 10]


def test_a_repository_is_one_document(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / ".git").mkdir(parents=True)
        (tmp_path / name / "src").mkdir()
        (tmp_path / name / "readme").write_text("r" * 9)
        (tmp_path / name / "src" / "code").write_text("c" * 9)
    assert find_source(config(tmp_path)).files == 4
    assert len(find_source(config(tmp_path)).documents) == 4
    source = find_source(config(tmp_path, documents="repository"))
    assert sorted(len(files) for files in source.documents) == [2, 2]
    assert all(len({path.relative_to(tmp_path).parts[0] for path in files}) == 1 for files in source.documents)
    (row,) = read(tmp_path, 40, documents="repository").rows
    assert row["starts"].tolist() == [0, 20]


def test_a_folder_without_repositories_is_one_document(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 9)
    ids = rows(read(tmp_path, 30, documents="repository"))
    assert len(ids) == 1 and ids[0][9::10] == [EOS] * 3


def test_no_more_is_read_than_the_steps_need(tmp_path):
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("x" * 99)
    sequences = read(tmp_path, 50, wanted=3)
    assert len(sequences) == 3 and sequences.report.reader.files == 2
    assert "the rest of the data is not reached by this run" in sequences.report.lines()
    assert len(read(tmp_path, 50)) == 20


def test_the_order_depends_on_names_and_seed_alone(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, names in ((one, range(20)), (other, reversed(range(20)))):
        (folder / "sub").mkdir(parents=True)
        for name in names:
            (folder / "sub" / str(name)).write_text("text")

    def names(folder, seed):
        return [files[0].name for files in find_source(config(folder, seed=seed)).documents]

    assert names(one, 5) == names(other, 5) != names(one, 6)


def test_hidden_files_and_folders_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_text("hidden")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / "seen").write_text("seen")
    assert [files[0].name for files in find_source(config(tmp_path)).documents] == ["seen"]


def test_what_is_not_text_is_skipped_and_named(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "nul.bin").write_bytes(b"abc\0def")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "good.txt").write_text("naïve" * 10)
    report = read(tmp_path, 20).report
    assert report.reader.files == 2 and len(report.reader.skipped) == 3
    assert "3 files skipped, not UTF-8 text" in " ".join(report.lines())
    assert "4 documents without a token" in report.lines()


def test_the_standard_library_is_found():
    source = find_source(config("stdlib", documents="repository"))
    names = {path.name for path in source.documents[0]}
    assert len(source.documents) == 1 and {"argparse.py", "dataclasses.py"} <= names
    assert not any("test" in path.parts for path in source.documents[0])
    sequences = read("stdlib", 4096, wanted=2, documents="repository")
    assert [len(row) for row in rows(sequences)] == [4096, 4096]


def test_a_column_of_text(tmp_path):
    content = [{"text": "first", "other": 1}, {"text": "", "other": 2}, {"text": "second", "other": 3}]
    for kind in ("jsonl", "parquet"):
        path = tmp_path / f"data.{kind}"
        table(path, content) if kind == "jsonl" else Dataset.from_list(content).to_parquet(str(path))
        (row,) = read(path, 13).rows
        second = int(row["starts"][1])
        pieces = (row["input_ids"][:second], row["input_ids"][second:])
        assert {bytes(piece[:-1].tolist()) for piece in pieces} == {b"first", b"second"}
    named = table(tmp_path / "named.jsonl", [{"body": "x" * 20}])
    assert read(named, 10, text_column="body").report.counts.tokens == 21


def test_ids_and_labels_are_taken_as_they_are(tmp_path):
    data = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 9]}, {"input_ids": [7, 8], "labels": [7, 8]}]
    (row,) = read(table(tmp_path / "a.jsonl", data), 6).rows
    assert sorted(zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)) == [
        (1, -100), (2, -100), (3, 3), (4, 9), (7, -100), (8, 8),
    ]  # fmt: skip


CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
)


def chatting(template=CHAT):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_conversations_go_through_the_chat_template(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = table(tmp_path / "a.jsonl", [{"messages": talk}])
    (row,) = read(path, 11, tokenizer=chatting()).rows
    assert bytes(row["input_ids"].tolist()) == b"u:hi;a:yes;" and (row["labels"][1:] == row["input_ids"][1:]).all()
    (row,) = read(path, 11, tokenizer=chatting(), assistant_only=True).rows
    assert bytes(row["labels"][row["labels"] != -100].tolist()) == b"yes"
    with pytest.raises(ValueError, match="no chat template"):
        read(path, 11)
    with pytest.raises(ValueError, match="marks no token as the assistant's"):
        plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        read(path, 5, tokenizer=chatting(plain), assistant_only=True)


def test_sequences_without_a_label_are_dropped_and_counted(tmp_path):
    data = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}, {"input_ids": [5] * 4, "labels": [5] * 4}]
    sequences = read(table(tmp_path / "a.jsonl", data), 4)
    assert rows(sequences) == [[5] * 4] and sequences.report.counts.unlabelled == 1
    assert "1 sequences dropped: no token of theirs has a label" in sequences.report.lines()


def test_a_stream_gives_the_same_sequences_again_and_again(tmp_path):
    for index in range(9):
        (tmp_path / f"{index}.txt").write_text(str(index) * (20 + 7 * index))
    c = config(tmp_path, 50, streaming=True, steps=1)
    stream = Stream(find_source(c), TOKENIZER, c, VOCAB)
    once, again = ([row["input_ids"].tolist() for row in stream] for _ in range(2))
    assert once == again == rows(read(tmp_path, 50)) and stream.report.everything


def test_workers_share_a_stream(tmp_path):
    for index in range(9):
        (tmp_path / f"{index}.txt").write_text(str(index) * (20 + 7 * index))
    c = config(tmp_path, 50, streaming=True, steps=1)
    stream = Stream(find_source(c), TOKENIZER, c, VOCAB)
    loader = torch.utils.data.DataLoader(stream, batch_size=1, collate_fn=collate, num_workers=2)
    shared = [batch["input_ids"][0].tolist() for batch in loader]
    assert shared == [row["input_ids"].tolist() for row in stream]


def test_a_streamed_table_is_read_without_a_copy(tmp_path):
    path = table(tmp_path / "a.jsonl", [{"text": f"row {i} " * 3} for i in range(30)])
    c = config(path, 50, streaming=True, steps=1)
    streamed = [row["input_ids"].tolist() for row in Stream(find_source(c), TOKENIZER, c, VOCAB)]
    assert sum(map(len, streamed)) == sum(map(len, rows(read(path, 50))))


def test_a_text_begins_as_the_tokenizer_begins_texts(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    (tmp_path / "a.txt").write_text("abc")
    assert rows(read(tmp_path / "a.txt", 5, tokenizer=tokenizer)) == [[bos, *b"abc", EOS]]


def test_too_little_text_says_how_much_there_is_and_how_much_is_needed(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 1233)
    with pytest.raises(ValueError, match=r"found 1,234 tokens in 1 files, need 16,384"):
        read(tmp_path / "short.txt", 16384, wanted=2)


def file(folder, content, name="data.txt"):
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder: folder / "absent", "no file or folder"),
        (lambda folder: folder, "no files in"),
        (lambda folder: file(folder, b"\xff\xfe"), "not UTF-8"),
        (lambda folder: file(folder, b"a\0b"), "NUL byte"),
        (lambda folder: file(folder, b""), "found 0 tokens"),
        (
            lambda folder: table(folder / "a.jsonl", [{"words": "a", "n": 1}]),
            "has none of the columns 'text', 'messages'",
        ),
        (lambda folder: table(folder / "a.jsonl", [{"text": 5}]), "must hold text, got int"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 300]}]), "run from 1 to 300"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 2], "labels": [1]}]), "as many as input_ids"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1.5, 2.5]}]), "must be whole numbers"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 2], "labels": [1, 2.7]}]), "labels must be whole"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 2], "labels": [1, 300]}]), "-100 or .*, got 300"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 2], "labels": [-1, 2]}]), "-100 or .*, got -1"),
        (lambda folder: table(folder / "a.jsonl", [{"input_ids": [1, 2], "attention_mask": [1, 0]}]), "hides tokens"),
        (lambda folder: file(folder, b'{"text": "a"', "a.jsonl"), "cannot read"),
        (lambda folder: file(folder, b"", "a.jsonl"), "cannot read|none of the columns"),
        (lambda folder: file(folder, b"not parquet", "a.parquet"), "cannot read"),
    ],
)
def test_unusable_data_is_refused(tmp_path, make, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        read(make(tmp_path), 10)
    assert "\n" not in str(caught.value)


def rotten(folder, kind, spoiled):
    """A table whose end is not what its beginning promised."""
    path = folder / f"a.{kind}"
    content = [{"text": f"row {i} " * 30} for i in range(2000)]
    if kind == "parquet":
        Dataset.from_list(content).to_parquet(path)
    else:
        table(path, content)
    whole = path.read_bytes()
    where = {"footer": len(whole) - 40, "rows": 60}.get(spoiled, 9 * len(whole) // 10)
    path.write_bytes(whole[:where] if spoiled == "footer" else whole[:where] + b"\0" * 90 + whole[where + 90 :])
    return path


@pytest.mark.parametrize(("kind", "spoiled"), [("jsonl", "middle"), ("parquet", "footer"), ("parquet", "rows")])
@pytest.mark.parametrize("settings", [{}, {"streaming": True, "steps": 1}], ids=["at once", "streamed"])
def test_a_table_that_is_broken_further_on_is_named(kind, spoiled, settings, tmp_path, monkeypatch):
    """In one line: `datasets` would log another. Of a stream the end is only read while training."""
    said = []
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", said.append)
    c = config(rotten(tmp_path, kind, spoiled), 64, **settings)
    with pytest.raises(ValueError, match=rf"^data: cannot read .*a.{kind}'") as caught:
        list(Stream(find_source(c), TOKENIZER, c, VOCAB))
    assert "\n" not in str(caught.value) and not said


def test_files_of_several_kinds_are_not_guessed_at(tmp_path):
    table(tmp_path / "a.jsonl", [{"text": "table " * 9}])
    (tmp_path / "readme.md").write_text("text " * 9)
    with pytest.raises(ValueError, match=r"several kinds \(a.jsonl, readme.md\): say with data_format"):
        find_source(config(tmp_path))
    assert find_source(config(tmp_path, data_format="json")).files == 1
    assert find_source(config(tmp_path, data_format="text")).files == 2
    with pytest.raises(ValueError, match="no parquet files"):
        find_source(config(tmp_path, data_format="parquet"))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = file(tmp_path, b"text")

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", denied)
    with pytest.raises(ValueError, match=r"cannot read .*data.txt.*Permission denied"):
        read(path, 2)


def test_what_is_collated_is_what_a_step_reads(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    batch = collate([read(tmp_path / "a.txt", 7).rows[0]])
    assert batch["input_ids"].tolist() == [[*b"abcdef", EOS]] and batch["input_ids"].dtype == torch.int64
