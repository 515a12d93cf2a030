"""Which checkpoints are whole.

A checkpoint is a folder ``step<N>`` that the engine writes. When it is complete, a manifest with the size of each file
is put beside them; a folder without a manifest, or with a file that is missing or of another size, is not resumed from.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_MANIFEST = "manifest.json"


def seal(checkpoint: Path) -> None:
    """Mark a checkpoint as complete."""
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }
    unfinished = checkpoint / f".{_MANIFEST}.{os.getpid()}"
    unfinished.write_text(json.dumps(sizes, indent=1) + "\n")
    unfinished.replace(checkpoint / _MANIFEST)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None where nothing is."""
    try:
        sizes = json.loads((checkpoint / _MANIFEST).read_text())
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError):
        return f"its {_MANIFEST} cannot be read"
    if not isinstance(sizes, dict) or not sizes:
        return f"its {_MANIFEST} lists no files"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size:,} bytes instead of {size:,}"
    return None


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoints in a folder as (step, path), whole or not, the newest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = re.fullmatch(r"step(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)
