"""Files that are whole: writing them so that a crash leaves nothing else, and checking big ones once."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    Raises:
        OSError: it cannot be written; with its name.
    """
    # Two machines that share a folder may have processes of one number.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        # Flushing does not say which file it was, and the others name the unfinished one.
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write_parquet(path: Path, table: pyarrow.Table) -> None:
    """Write a table so that a crash leaves the old file or the new one."""
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    write_whole(path, buffer.getvalue())


def finite(value: Any) -> Any:
    """`value` with each float that JSON cannot hold turned into None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def check_once(expected: Mapping[Path, Sequence[Any]], check: Callable[[Path], None], memory: Path | None) -> None:
    """Check the files of one folder, but for those that have not changed since they passed.

    Args:
        expected: what each file is checked against, in values that JSON can hold.
        check: raises for a file that is not right.
        memory: a file that remembers what passed and when it was last changed, so that big files are not read at each
            start.
    """
    known = _remembered(memory)
    passed: dict[str, list[Any]] = {}
    for path, facts in expected.items():
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, *facts]
        if known.get(path.name) != stamp:
            check(path)
        passed[path.name] = stamp
    if memory is not None and passed != known:
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_whole(memory, json.dumps(passed))
        except OSError:
            # Without a memory the next start only takes longer.
            return


def _remembered(memory: Path | None) -> dict[str, Any]:
    try:
        known = {} if memory is None else json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
