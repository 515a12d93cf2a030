"""Folders that are written whole."""

import pytest

from siamesenorm.data.folders import made_whole
from siamesenorm.residual import ConfigError


def fill(out, **options):
    with made_whole(out, **options) as unfinished:
        (unfinished / "new").touch()


def test_a_folder_may_be_here_empty_or_a_link(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for out in (tmp_path / "a" / "b", tmp_path / "here", tmp_path / "link", tmp_path / "dangling"):
        fill(out)
        assert [path.name for path in out.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "here", "target", "link", "nothing", "dangling"}


def test_nothing_is_left_of_a_folder_that_was_not_filled(tmp_path):
    # A process that was killed leaves one.
    (tmp_path / ".out-unfinished").mkdir()
    (tmp_path / ".out-unfinished" / "old").touch()
    with pytest.raises(KeyboardInterrupt), made_whole(tmp_path / "out"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_when_asked_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(ConfigError, match="is there already, and is not an empty folder"):
        fill(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), made_whole(tmp_path / "out", replace=True):
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]
    fill(tmp_path / "out", replace=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(ConfigError):
            fill(out)
