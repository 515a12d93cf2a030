"""Every kind of source: its documents, what is bad in it, and going on from any position."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siamesenorm.data import sources
from siamesenorm.data.sources import Bad, Document, Position, Reading, open_source
from siamesenorm.residual import ConfigError

TEXTS = ["one", "two\nlines", "", "drei äöü 漢字", "a" * 300]


def write_lines(path: Path, texts, opened=open) -> Path:
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": index, "text": text}) + "\n" for index, text in enumerate(texts))
    return path


def text_folder(base):
    base.mkdir()
    for index, text in enumerate(TEXTS):
        if text:
            (base / f"{index}.txt").write_bytes(text.encode())
    (base / "LICENSE").write_text("left out")
    (base / ".hidden.txt").write_text("left out")
    return base


def parquet(path):
    # Several row groups, so that going on has some to pass over.
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=2)
    return path


def saved(path):
    datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))}).save_to_disk(path)
    return path


def saved_splits(path):
    whole, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (TEXTS, ["other"]))
    datasets.DatasetDict({"test": other, "train": whole}).save_to_disk(path)
    return path


def csv(path):
    datasets.Dataset.from_dict({"text": [text or "-" for text in TEXTS]}).to_csv(path)
    return path


MAKERS = {
    "text folder": lambda base: text_folder(base / "folder"),
    "json lines": lambda base: write_lines(base / "a.jsonl", TEXTS),
    "json": lambda base: write_lines(base / "a.json", TEXTS),
    "gzipped json": lambda base: write_lines(base / "a.jsonl.gz", TEXTS, gzip.open),
    "parquet": lambda base: parquet(base / "a.parquet"),
    "saved dataset": lambda base: saved(base / "saved"),
    "saved splits": lambda base: saved_splits(base / "saved"),
    "csv": lambda base: csv(base / "a.csv"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_documents_in_order_and_from_any_position(tmp_path, kind):
    source = open_source(str(MAKERS[kind](tmp_path)), Reading())
    items = list(source.items(Position()))
    expected = {"text folder": [text for text in TEXTS if text], "csv": [text or "-" for text in TEXTS]}
    assert [item.content.decode() for item in items] == expected.get(kind, TEXTS)
    for index, item in enumerate(items):
        assert list(source.items(item.after)) == items[index + 1 :]
    done = [source.done(item.after) for item in items]
    assert done == sorted(done)
    assert done[-1] <= (source.total_bytes or 0)


def test_documents_in_one_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\nline\n\nsecond\r\n\r\n \n\nthird\n")

    def contents(end=None):
        return [item.content for item in open_source(str(path), Reading(document_end=end)).items(Position())]

    assert contents() == contents("blank-line") == [b"first\nline", b"second", b"third\n"]
    assert contents("file") == [path.read_bytes()]
    assert contents("line") == [b"first\n", b"\n\nsecond\r\n\r\n \n\nthird\n"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_where_blocks_end_changes_nothing(tmp_path, monkeypatch, block):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\n\n\ntwo\n \n\nthree<|x|>\n\nfour\n\n")
    whole = [list(open_source(str(path), Reading(document_end=end)).items(Position())) for end in (None, "<|x|>")]
    monkeypatch.setattr(sources, "_BLOCK", block)
    for end, items in zip((None, "<|x|>"), whole, strict=True):
        source = open_source(str(path), Reading(document_end=end))
        assert list(source.items(Position())) == items
        for index, item in enumerate(items):
            assert list(source.items(item.after)) == items[index + 1 :]
    assert [item.content for item in whole[0]] == [b"one", b"two", b"three<|x|>", b"four"]


def bad_ones(source, reading=None):
    found = list(open_source(str(source), reading or Reading()).items(Position()))
    return [item for item in found if isinstance(item, Bad)], [i.content for i in found if isinstance(i, Document)]


def test_what_is_wrong_in_json_lines_is_named_by_line(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "good"}', b'{"text": ', b"[1]", b'{"txet": "x"}', b'{"text": null}', b'{"text": 3}']
    lines += [b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"", b'\xef\xbb\xbf{"text": "also good"}']
    path.write_bytes(b"\n".join(lines))
    bad, good = bad_ones(path)
    assert good == [b"good", b"also good"]
    assert [each.message.split(": ")[0] for each in bad] == [f"{path}, line {number}" for number in range(2, 9)]
    reasons = ["broken JSON", "no object", "no text field", "no text", "no text", "invalid UTF-8", "invalid UTF-8"]
    assert [each.reason for each in bad] == reasons
    assert "did you mean 'txet'?" in bad[2].message
    at = path.read_bytes().index(b"\xff")
    assert f"at byte {at} of the file (0xff)" in bad[5].message


def test_what_is_wrong_in_text_is_named_by_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nb\xc3\x28d\n\nalso good")
    bad, good = bad_ones(path)
    assert good == [b"good", b"also good"]
    assert [each.message for each in bad] == [f"{path}: invalid UTF-8 at byte 7 of the file (0xc3)"]


def test_what_is_wrong_in_parquet_is_named_by_row_or_column(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"good", b"\xff", None])}), path)
    bad, good = bad_ones(path)
    assert good == [b"good"]
    assert [each.message for each in bad] == [
        f"{path}, row 2: invalid UTF-8 (0xff)",
        f"{path}, row 3: the field 'text' holds null, not text",
    ]
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), path)
    (missing,), _ = bad_ones(path)
    assert missing.message == f"{path}: there is no field 'text'; did you mean 'content'? (--text-field)"
    # Once for the file, however many rows it has.
    pq.write_table(pa.table({"n": range(1000)}), path)
    (numbers,), _ = bad_ones(path, Reading(text_field="n"))
    assert "holds int64, not text" in numbers.message


@pytest.mark.parametrize(
    ("name", "content", "reason", "words"),
    [
        ("a.txt", b"", "empty file", "is empty"),
        ("a.jsonl", b"", "empty file", "is empty"),
        ("a.parquet", b"", "empty file", "is empty"),
        ("a.parquet", b"no parquet at all", "unreadable file", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999, mtime=0)[:-20], "unreadable file", "cannot read"),
        ("a.jsonl.gz", b"no gzip", "unreadable file", "cannot read"),
    ],
)
def test_a_bad_file_is_passed_over_once(tmp_path, name, content, reason, words):
    (tmp_path / name).write_bytes(content)
    good = tmp_path / f"b{name[1:]}"
    if name.endswith("parquet"):
        parquet(good)
    elif name.endswith("txt"):
        good.write_bytes(b"good")
    else:
        write_lines(good, ["good"], gzip.open if name.endswith("gz") else open)
    source = open_source(str(tmp_path), Reading())
    items = list(source.items(Position()))
    (bad,) = (item for item in items if isinstance(item, Bad))
    assert bad.reason == reason
    assert words in bad.message
    assert str(tmp_path / name) in bad.message
    behind = items[items.index(bad) + 1 :]
    assert behind
    assert list(source.items(bad.after)) == behind


def test_texts_in_csv_are_taken_as_they_are(tmp_path):
    path = tmp_path / "a.csv"
    # A comma at each row's end, as some programs write it, and texts that could be taken for a missing value.
    path.write_text('text,title\nNA,A,\nnull,B,\n"a,\nb",C,\n"",D,\n')
    (missing,), good = bad_ones(path)
    assert good == [b"NA", b"null", b"a,\nb"]
    assert missing.message == f"{path}, row 4: the field 'text' holds null, not text"
    path.write_text("text,title\nhello, world,A\nmore,B\n")
    refused(path, "stopped after row 0", "loss of data")
    path.write_text("text,title\nmore,B\nhello, world,A\n")
    refused(path, "stopped after row 0", "Expected 2 fields in line 3, saw 3")


def test_the_mark_that_begins_a_file_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo")
    assert bad_ones(path)[1] == [b"one", b"\xef\xbb\xbftwo"]
    assert bad_ones(path, Reading(document_end="file"))[1] == [b"one\n\n\xef\xbb\xbftwo"]
    path.write_bytes(b"\xef\xbb\xbf\xff")
    assert "at byte 3 of the file" in bad_ones(path)[0][0].message


def test_links_in_a_folder(tmp_path):
    base, elsewhere = text_folder(tmp_path / "folder"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "z.txt").write_bytes(b"elsewhere")
    (base / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(base)
    (base / "5.txt").symlink_to(tmp_path / "gone.txt")
    bad, good = bad_ones(base)
    assert [each.message for each in bad] == [f"cannot read {base / '5.txt'}: No such file or directory"]
    assert good == [*(text.encode() for text in TEXTS if text), b"elsewhere"]


def test_a_subfolder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    base = text_folder(tmp_path / "folder")
    (base / "inner").mkdir()
    listed = os.scandir

    def scandir(path):
        if Path(path).name == "inner":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(base, f"cannot read the folder {base / 'inner'}: Permission denied")


def test_an_unreadable_file_is_named(tmp_path):
    base = text_folder(tmp_path / "folder")
    source = open_source(str(base), Reading())
    (base / "1.txt").unlink()
    items = list(source.items(Position()))
    assert [item.message for item in items if isinstance(item, Bad)] == [
        f"cannot read {base / '1.txt'}: No such file or directory"
    ]
    assert len(items) == 4


def test_documents_that_are_too_long_are_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_DOCUMENT", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"short\n\n" + b"l" * 11 + b"\n\nshort too")
    bad, good = bad_ones(path)
    assert ([each.reason for each in bad], good) == (["document too long"], [b"short", b"short too"])
    monkeypatch.setattr(sources, "_LONGEST_LINE", 40)
    lines = write_lines(tmp_path / "a.jsonl", ["short", "x" * 11, "x" * 60, "never read"])
    bad, good = bad_ones(lines)
    assert ([each.reason for each in bad], good) == (["document too long"] * 2, [b"short"])


def refused(source, *words, **reading):
    with pytest.raises(ConfigError) as caught:
        list(open_source(str(source), Reading(**reading)).items(Position()))
    for word in words:
        assert word in str(caught.value)


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "there is no file in")
    refused(tmp_path / "nothing", "there is no file or folder")
    (tmp_path / "a.docx").write_bytes(b"x")
    refused(tmp_path / "a.docx", "unknown file type '.docx'", ".jsonl.gz", "--format")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "a.docx").write_bytes(b"x")
    refused(tmp_path / "strange", "nothing readable", ".docx")
    refused(tmp_path / "strange", "no json file", format="json")
    refused(tmp_path / "strange", "did you mean 'json'?", format="jsn")
    write_lines(tmp_path / "strange" / "b.jsonl", ["x"])
    (tmp_path / "strange" / "c.txt").write_bytes(b"x")
    refused(tmp_path / "strange", "several kinds (1 json, 1 text)", "--format")
    refused(tmp_path / "strange" / "b.jsonl", "--document-end is for text", document_end="file")
    saved_splits(tmp_path / "saved")
    refused(tmp_path / "saved", "no split 'trian'", "did you mean 'train'?", split="trian")
    refused(tmp_path / "saved", "there is no field 'txt'", "'text'", text_field="txt")
    saved(tmp_path / "whole")
    refused(tmp_path / "whole", "the column 'id' holds int64, not text", text_field="id")
    refused(tmp_path / "strange" / "c.txt", "there is no table file", ".csv", format="table")


def test_a_format_can_be_forced(tmp_path):
    write_lines(tmp_path / "data.bin", ["x"])
    _, good = bad_ones(tmp_path / "data.bin", Reading(format="json"))
    assert good == [b"x"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "folder" / "b.rst").write_bytes(b"b\n")
    write_lines(tmp_path / "folder" / "c.jsonl", ["x"])
    _, good = bad_ones(tmp_path / "folder", Reading(format="text"))
    assert good == [b"a = 1\n", b"b\n"]


def test_files_of_other_splits_are_left_out(tmp_path):
    for name in ("train-0", "train-1", "test-0", "validation"):
        write_lines(tmp_path / f"{name}.jsonl", [name])
    assert bad_ones(tmp_path)[1] == [b"train-0", b"train-1"]
    assert bad_ones(tmp_path, Reading(split="test"))[1] == [b"test-0"]
    assert "2 files of other splits" in open_source(str(tmp_path), Reading()).notes[0]
    # One name that says nothing, and none of them is taken to say anything.
    write_lines(tmp_path / "more.jsonl", ["more"])
    assert len(bad_ones(tmp_path)[1]) == 5


def test_the_digest_changes_with_what_is_read(tmp_path):
    base = text_folder(tmp_path / "folder")
    first = open_source(str(base), Reading()).digest
    (base / "LICENSE").write_text("still left out")
    assert open_source(str(base), Reading()).digest == first
    (base / "0.txt").write_text("One")
    second = open_source(str(base), Reading()).digest
    (base / "0.txt").rename(base / "00.txt")
    assert len({first, second, open_source(str(base), Reading()).digest}) == 3


class _Streamed:
    """As much of a streamed dataset as is used."""

    def __init__(self, rows, column_names=None):
        self.rows, self.column_names = rows, column_names

    def __iter__(self):
        return iter(self.rows)

    def skip(self, count):
        return _Streamed(self.rows[count:])

    def select_columns(self, names):
        return _Streamed([{name: row[name] for name in names} for row in self.rows])


@pytest.mark.parametrize("names", [None, ["text", "id"]])
def test_a_dataset_on_the_hub_is_streamed_at_one_revision(monkeypatch, names):
    asked = []

    class Api:
        def dataset_info(self, name, revision):
            return SimpleNamespace(sha=f"{name}@{revision or 'newest'}")

    def load_dataset(*args, **kwargs):
        asked.append((*args, kwargs))
        return _Streamed([{"text": text, "id": 0} for text in TEXTS] + [{"text": None, "id": 0}], names)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source("org/name", Reading(subset="part"))
    items = list(source.items(Position()))
    assert [item.content.decode() for item in items[:-1]] == TEXTS
    assert items[-1].message == "org/name, row 6: the field 'text' holds null, not text"
    assert list(source.items(items[2].after)) == items[3:]
    assert source.revision == "org/name@newest"
    arguments = {"split": "train", "revision": "org/name@newest", "streaming": True}
    assert asked[0] == ("org/name", "part", arguments)


def test_a_stream_that_breaks_off_says_where(monkeypatch):
    class Api:
        def dataset_info(self, name, revision):
            return SimpleNamespace(sha="x")

    def rows():
        yield {"text": "one"}
        raise ConnectionError("the line is dead")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: _Streamed(rows()))
    refused("org/name", "reading org/name stopped after row 1: the line is dead")
