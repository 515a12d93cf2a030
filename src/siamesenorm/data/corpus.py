"""The embedded corpus: the Python standard library's own source, which every interpreter brings along."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = "python-stdlib"

# Third-party packages and test suites differ between installations of one Python version, bytecode is not text, and
# the three tools are often packaged apart from the rest: without them, equal versions give equal hashes more often.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo", "ensurepip"}
)

# One file in this many goes to the validation set.
_VALIDATION_SHARE = 20


@dataclass(frozen=True)
class Document:
    """One source file: ``name`` is its path below the corpus root with forward slashes, ``content`` its raw bytes."""

    name: str
    content: bytes

    @property
    def held_out(self) -> bool:
        """Whether the file belongs to the validation set.

        The name alone decides, so a file stays on its side whatever else the corpus holds, and no file is on both.
        """
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % _VALIDATION_SHARE == 0


def documents(root: Path | None = None) -> Iterator[Document]:
    """The corpus in the order of the files' names.

    Files are taken as bytes, so nothing has to decode; unreadable and empty files are left out.

    Args:
        root: the folder to walk, by default the running interpreter's standard library.
    """
    base = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = []
    for folder, subfolders, files in os.walk(base):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        relative = Path(folder).relative_to(base)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        try:
            content = (base / name).read_bytes()
        except OSError:
            continue
        if content:
            yield Document(name, content)


def fingerprint(docs: Iterable[Document]) -> str:
    """SHA-256 (hexadecimal) over all names and contents, with their lengths so that borders count too."""
    digest = hashlib.sha256()
    for doc in docs:
        name = doc.name.encode("utf-8", "surrogateescape")
        digest.update(f"{len(name)},{len(doc.content)};".encode())
        digest.update(name)
        digest.update(doc.content)
    return digest.hexdigest()
