"""A finder that acts once a module has been imported, and changes nothing else about importing it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest

from siamesenorm.hub.autoload import _AfterImport

NAME = "a_module_of_these_tests"


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A module's file, and how often the finder has acted."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    calls = []
    sys.meta_path.insert(0, _AfterImport(NAME, lambda: calls.append(sys.modules[NAME].VALUE)))
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 1\n")
    yield path, calls
    sys.modules.pop(NAME, None)


def waiting():
    return [finder for finder in sys.meta_path if isinstance(finder, _AfterImport) and finder.name == NAME]


def test_it_acts_once_behind_the_module(watched):
    _, calls = watched
    module = importlib.import_module(NAME)
    assert calls == [1]
    assert waiting() == []
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert inspect.getsource(module) == "VALUE = 1\n"
    importlib.reload(module)
    assert calls == [1]


def test_looking_for_the_module_is_no_import(watched):
    path, calls = watched
    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert spec.origin == str(path)
        assert spec.loader.get_source(NAME) == "VALUE = 1\n"
    assert calls == []
    importlib.import_module(NAME)
    assert calls == [1]


def test_an_import_that_fails_is_not_the_last(watched):
    path, calls = watched
    path.write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(NAME)
    path.write_text("VALUE = 'then'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert calls == ["then"]


def test_a_module_that_is_not_there_is_not_there(watched):
    path, calls = watched
    path.unlink()
    importlib.invalidate_caches()
    assert importlib.util.find_spec(NAME) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    assert calls == []
    assert len(waiting()) == 1


def test_other_finders_are_asked_for_it(watched):
    """Those of editable installs find modules that no folder of the path holds."""
    path, calls = watched

    class Elsewhere:
        @staticmethod
        def find_spec(fullname, where=None, target=None):
            return importlib.util.spec_from_file_location(fullname, other) if fullname == NAME else None

    other = path.parent / "other.py"
    path.rename(other)
    importlib.invalidate_caches()
    sys.meta_path.append(Elsewhere)
    importlib.import_module(NAME)
    assert calls == [1]
