"""Output folders that are filled over several sessions: who may write to one, and with which arguments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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
    # Looked at once: another process may be filling it.
    there = set(out.iterdir()) if out.is_dir() else set()
    ours = any(out / name in there for name in marks)
    if not ours and there - set(half_written(out, marks)):
        raise ConfigError(f"{out} is not empty and holds no {what}; choose another --out")


def check_new(out: Path) -> None:
    """Refuse a folder that is neither new nor empty.

    Raises:
        ConfigError: it is not.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' is there already, and is not an empty folder; choose another")


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
    with _making(out):
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(out, doing):
            yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def made_whole(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, that takes its name once it is full and goes if it never is.

    Args:
        out: a folder that is new or empty.
        replace: it may be another, which goes when the new one is full.

    Yields:
        A new folder beside it. What a process that was killed left of one goes first.

    Raises:
        ConfigError: the folder is there and may not be replaced, or it cannot be made.
    """
    if not replace:
        check_new(out)
    out = out.resolve()
    unfinished = out.with_name(f".{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with _making(out):
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        shutil.rmtree(out, ignore_errors=True)
        with _making(out):
            unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror or error}") from error


@contextmanager
def _locked(folder: Path, doing: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor, wait=False):
            raise ConfigError(f"another process is {doing} {folder}")
        yield
    finally:
        os.close(descriptor)


def lock(file: IO[Any] | int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed; whether this process has it now.

    The operating system takes the lock back from a process that dies, however it dies. On a system without such locks
    every process has it.

    Args:
        file: a file, or the descriptor of one.
        wait: for another process to close it.

    Raises:
        ConfigError: on a file system without such locks.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"this file system has no locks, by which a process knows what others do in a folder ({error.strerror})"
        ) from error
    return True
