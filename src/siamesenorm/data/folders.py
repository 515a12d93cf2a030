"""Output folders that are filled over several sessions: who may write to one, and with which arguments."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from siamesenorm.residual import ConfigError


def check(out: Path, marks: Sequence[str], what: str) -> None:
    """Refuse a folder that holds something else; what is in it is left alone.

    Args:
        out: the folder, which need not be there.
        marks: names of files of which a folder that is ours holds at least one.
        what: what such a folder holds.

    Raises:
        ConfigError: where it is a file, or is not empty and not ours.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; --out needs a folder")
    ours = any((out / name).exists() for name in marks)
    if out.is_dir() and not ours and set(out.iterdir()) - set(half_written(out, marks)):
        raise ConfigError(f"{out} is not empty and holds no {what}; choose another --out")


def half_written(out: Path, names: Sequence[str]) -> list[Path]:
    """What a process that was killed in `files.write_whole` has left of files of these names."""
    return [path for name in names for path in out.glob(f".{name}.*")]


def differences(there: Mapping[str, Any], asked: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """One line for each argument of a folder that is not what is asked for now."""
    return [
        f"  --{key.replace('_', '-')}: {_show(there.get(key))} there, {_show(asked.get(key))} asked for"
        for key in dict.fromkeys([*there, *asked])
        if key not in ignored and there.get(key) != asked.get(key)
    ]


def _show(value: Any) -> str:
    return "not given" if value is None else repr(value)


@contextmanager
def claimed(out: Path, doing: str) -> Iterator[None]:
    """Make the folder and keep other processes out of it meanwhile; one that is still empty in the end is taken away.

    Args:
        out: the folder.
        doing: what is done to it, for the one who is kept out: "preparing".

    Raises:
        ConfigError: where it cannot be made, or another process has it.
    """
    try:
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out}: {error.strerror or error}") from error
    try:
        with _locked(out, doing):
            yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _locked(folder: Path, doing: str) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another process is {doing} {folder}") from None
    finally:
        os.close(descriptor)
