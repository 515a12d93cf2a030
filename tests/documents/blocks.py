"""The code blocks of a Markdown document, and what the document says about running them.

A comment right before a block speaks to the tests, and to whoever edits the document:

    <!-- not run: it takes eight GPUs -->     the block cannot be run by a test, and why
    <!-- file: mine.yaml -->                  the block is a file that the commands after it read
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SHELL = ("", "bash", "console", "sh", "shell")
PYTHON = ("python", "py")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^`\n]*)$")
_COMMENT = re.compile(r"^ *<!-- *(?P<word>not run|file): *(?P<said>.*?) *-->$")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: of its fence in the document, from 1.
        language: behind the fence; a block that says none is of the shell.
        text: without the fences.
        not_run: why a test cannot run it.
        file: the name of the file that it is.
    """

    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None

    @property
    def runs(self) -> bool:
        """Whether it is code that a test is to run."""
        return self.not_run is None and self.file is None and self.language in (*SHELL, *PYTHON)


def blocks(document: str) -> list[Block]:
    """All blocks of a document, in order."""
    found: list[Block] = []
    said: dict[str, str] = {}
    lines = iter(enumerate(document.splitlines(), start=1))
    for number, line in lines:
        if comment := _COMMENT.match(line):
            said[comment["word"]] = comment["said"]
        elif fence := _FENCE.match(line):
            inside = []
            for _, each in lines:
                if each.strip() == fence["fence"]:
                    break
                inside.append(each.removeprefix(fence["indent"]))
            language = fence["language"].strip()
            text = "\n".join(inside) + "\n"
            found.append(Block(number, language, text, said.get("not run"), said.get("file")))
            said = {}
        elif line.strip():
            said = {}
    return found
