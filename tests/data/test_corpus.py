from pathlib import Path

import numpy as np
import pytest

from siamesenorm.data import arrays, byte_tokenizer, corpus
from siamesenorm.residual import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    base = tmp_path / "lib"
    (base / "package").mkdir(parents=True)
    for index in range(40):
        folder = base if index % 2 else base / "package"
        (folder / f"module{index}.py").write_bytes(f"value = {index}\n".encode())
    (base / "broken.py").write_bytes(b"# not UTF-8: \xff\xfe\x00\n")
    (base / "empty.py").write_bytes(b"")
    (base / "notes.txt").write_text("no source")
    for skipped in ("site-packages", "test", "__pycache__"):
        (base / skipped).mkdir()
        (base / skipped / "other.py").write_text("x = 1\n")
    return base


def test_documents_are_the_source_files_in_order(root):
    names = [doc.name for doc in corpus.documents(root)]
    assert names == sorted(names)
    assert "broken.py" in names
    assert "package/module0.py" in names
    assert not {"empty.py", "notes.txt"} & set(names)
    assert not any("other.py" in name for name in names)


def test_a_file_stays_on_its_side_when_the_corpus_grows(root):
    before = {doc.name: doc.held_out for doc in corpus.documents(root)}
    (root / "aaa_new.py").write_text("new = True\n")
    (root / "module1.py").write_text("changed = True\n")
    after = {doc.name: doc.held_out for doc in corpus.documents(root)}
    assert {name: after[name] for name in before} == before
    assert any(before.values())
    assert not all(before.values())


def test_fingerprint_sees_contents_names_and_borders():
    docs = [corpus.Document("a.py", b"one"), corpus.Document("b.py", b"two")]
    same = [corpus.Document("a.py", b"one"), corpus.Document("b.py", b"two")]
    others = [
        [corpus.Document("a.py", b"one"), corpus.Document("b.py", b"twO")],
        [corpus.Document("a.py", b"one"), corpus.Document("c.py", b"two")],
        [corpus.Document("a.py", b"onet"), corpus.Document("b.py", b"wo")],
        docs[:1],
    ]
    assert corpus.fingerprint(docs) == corpus.fingerprint(same)
    assert len({corpus.fingerprint(each) for each in [docs, *others]}) == 5


def test_arrays_hold_every_file_once_with_its_end(root, tmp_path):
    made = arrays.prepare(cache=tmp_path / "cache", root=root)
    docs = list(corpus.documents(root))
    (train,) = made.train_paths
    (held_out,) = made.held_out()
    for tokens, side in ((np.fromfile(train, dtype=np.uint16), False), (held_out, True)):
        contents = [doc.content for doc in docs if doc.held_out is side]
        assert byte_tokenizer.decode(tokens.tolist()) == b"".join(contents)
        assert int((tokens == byte_tokenizer.EOS_ID).sum()) == len(contents)
        assert tokens[-1] == byte_tokenizer.EOS_ID
    assert made.train.tokens == sum(len(doc.content) + 1 for doc in docs if not doc.held_out)
    assert made.validation.bytes == sum(len(doc.content) for doc in docs if doc.held_out)


def test_the_cache_is_found_again_and_changes_with_the_corpus(root, tmp_path):
    first = arrays.prepare(cache=tmp_path / "cache", root=root)
    stamp = first.train_paths[0].stat().st_mtime_ns
    assert arrays.prepare(cache=tmp_path / "cache", root=root) == first
    assert first.train_paths[0].stat().st_mtime_ns == stamp
    (root / "module1.py").write_text("changed = True\n")
    second = arrays.prepare(cache=tmp_path / "cache", root=root)
    assert second.sha256 != first.sha256
    assert second.folder != first.folder


@pytest.mark.parametrize("damage", ["truncate", "remove", "meta"])
def test_a_damaged_cache_is_made_anew(root, tmp_path, damage):
    made = arrays.prepare(cache=tmp_path / "cache", root=root)
    (path,) = made.train_paths
    whole = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(whole[:-2])
    elif damage == "remove":
        path.unlink()
    else:
        (made.folder / "meta.json").write_text('{"sha256": ')
    assert arrays.prepare(cache=tmp_path / "cache", root=root).train_paths[0].read_bytes() == whole


def test_an_interrupted_preparation_leaves_nothing_behind(root, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arrays.shards, "write_meta", stop)
        with pytest.raises(KeyboardInterrupt):
            arrays.prepare(cache=tmp_path / "cache", root=root)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_cannot_be_prepared_is_refused(root, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'python-stdlib'"):
        arrays.prepare("python-stdlb", cache=tmp_path, root=root)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="0 files to train on"):
        arrays.prepare(cache=tmp_path, root=tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SIAMESENORM_CACHE"):
        arrays.prepare(cache=tmp_path / "file", root=root)


def test_the_standard_library_is_there_with_both_sides():
    docs = list(corpus.documents())
    names = {doc.name for doc in docs}
    assert "argparse.py" in names
    share = sum(doc.held_out for doc in docs) / len(docs)
    assert 0.02 < share < 0.1
