"""Which checkpoints are whole.

A checkpoint is a folder ``step<N>`` that the engine writes. When it is complete, a manifest is put beside its files,
with the size of each, the step and the run that it belongs to. A folder without a manifest, of another run or step, or
with a file that is missing or of another size, is not resumed from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from siamesenorm.data.files import write_whole

_MANIFEST = "manifest.json"


def seal(checkpoint: Path, run: str) -> None:
    """Mark a checkpoint as complete, and as one of ``run``."""
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }
    manifest = {"run": run, "step": _step(checkpoint), "files": sizes}
    write_whole(checkpoint / _MANIFEST, json.dumps(manifest, indent=1) + "\n")


def fault(checkpoint: Path, run: str) -> str | None:
    """What is wrong with a checkpoint, in words; None where nothing is, and it is one of ``run``."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError):
        return f"its {_MANIFEST} cannot be read"
    sizes = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(sizes, dict) or not sizes:
        return f"its {_MANIFEST} lists no files"
    if manifest.get("run") != run:
        return "it belongs to another run"
    if manifest.get("step") != _step(checkpoint):
        return f"it was taken after step {manifest.get('step')}"
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
    steps = ((_step(path), path) for path in folder.iterdir() if path.is_dir())
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


def _step(checkpoint: Path) -> int | None:
    match = re.fullmatch(r"step(\d+)", checkpoint.name)
    return int(match[1]) if match else None
