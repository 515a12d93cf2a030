"""The code in README.md and docs/ runs: every block of shell or Python, in order, as someone would copy it.

All blocks of a document share a folder, and its Python blocks their names. What is run is run at a small size
(small.py); what cannot be run says so, right before the block, and why (blocks.py).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.documents import small
from tests.documents.blocks import PYTHON, SHELL, Block, blocks

ROOT = small.ROOT
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {str(path.relative_to(ROOT)): blocks(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
RUN = [name for name, found in BLOCKS.items() if any(block.runs or block.file for block in found)]
NOT_RUN = [
    pytest.param(block.not_run, id=f"{name}:{block.line}")
    for name, found in BLOCKS.items()
    for block in found
    if block.not_run is not None
]
_SECONDS = 300


def in_order(found: list[Block], folder: Path) -> None:
    """Run blocks in an empty folder, in this process, which is left for good afterwards."""
    here, tools = folder / "here", folder / "tools"
    here.mkdir()
    tools.mkdir()
    small.install(folder / "small")
    small.own_files(here)
    os.chdir(here)
    # Installing is left aside.
    (tools / "pip").write_text("#!/bin/sh\n")
    (tools / "pip").chmod(0o755)
    names: dict[str, object] = {"__name__": "__main__"}
    with warm.commands(tools) as environment:
        for block in found:
            if block.file is not None:
                (here / block.file).write_text(block.text)
            elif block.runs:
                print(f"\n-- line {block.line}\n{block.text}", flush=True)
                if block.language in PYTHON:
                    exec(compile(block.text, f"line {block.line}", "exec"), names)
                else:
                    command = ["bash", "-euo", "pipefail", "-c", block.text]
                    subprocess.run(command, env=environment, check=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def libraries():
    """What commands import: once here, and not in each fork."""

    import siamesenorm.probes.pictures
    import siamesenorm.study.session
    import siamesenorm.study.summary
    import siamesenorm.training.engine
    import siamesenorm.training.run
    import siamesenorm.training.subjects
    import siamesenorm.training.tasks.classification
    import siamesenorm.training.tasks.diffusion
    import siamesenorm.training.tasks.text  # noqa: F401


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_document_runs(name, tmp_path):
    done = warm.forked(lambda: in_order(BLOCKS[name], tmp_path), tmp_path)
    assert done.code == 0, f"{done.out[-3000:]}\n{done.err[-3000:]}"


@pytest.mark.parametrize("reason", NOT_RUN)
def test_what_is_not_run_says_why(reason):
    assert len(reason.split()) > 2
    pytest.skip(reason)


def test_a_newcomer_gets_from_the_install_to_the_evaluation_by_the_readme_alone():
    run = "\n".join(block.text for block in BLOCKS["README.md"] if block.runs)
    places = [run.find(f"siamesenorm {command} ") for command in ("train", "probe", "export", "generate", "eval")]
    assert all(place >= 0 for place in places)
    assert run.find("pip install") < min(places)
    assert "--tasks" in run


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_says_what_it_is(name):
    for block in BLOCKS[name]:
        where = f"{name}:{block.line}"
        if block.language in PYTHON:
            ast.parse(block.text, where)
        elif name != "README.md":
            assert block.language, f"{where}: a block without a language is a block of the shell in the README alone"


@pytest.fixture(scope="module")
def known():
    """The commands of the command line by name."""
    from typer.main import get_command

    from siamesenorm.cli import _app

    return get_command(_app()).commands


def commands_in(text: str) -> list[list[str]]:
    """The words behind `siamesenorm` on each line that has it."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("siamesenorm") + 1 :] for words in found if "siamesenorm" in words and words[0] != "pip"]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_command_that_is_shown_exists(name, known):
    for block in BLOCKS[name]:
        for words in commands_in(block.text) if block.language in SHELL else ():
            where, command = f"{name}:{block.line}", words.pop(0)
            assert command in known, f"{where}: there is no command {command}"
            made = known[command]
            if hasattr(made, "commands"):
                made = made.commands[words.pop(0)]
            options = {option for each in made.params for option in each.opts} | {"--help"}
            unknown = {word.split("=")[0] for word in words if word.startswith("--")} - options
            assert not unknown, f"{where}: {command} has no {', '.join(unknown)}"


def test_blocks_are_found_with_what_is_said_of_them():
    document = "\n".join([
        "Text.", "", "<!-- not run: eight GPUs are needed -->", "```sh", "one \\", "  two", "```", "",
        "<!-- file: a.yaml -->", "", "```yaml", "a: 1", "```", "", "<!-- not run: forgotten -->", "Between.",
        "- item", "  ```python", "  if x:", "      y()", "  ```", "", "````", "```", "````",
    ])  # fmt: skip
    assert blocks(document) == [
        Block(4, "sh", "one \\\n  two\n", not_run="eight GPUs are needed"),
        Block(11, "yaml", "a: 1\n", file="a.yaml"),
        Block(18, "python", "if x:\n    y()\n"),
        Block(23, "", "```\n"),
    ]
    assert [block.runs for block in blocks(document)] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_a_command_that_fails_fails_its_document(tmp_path):
    found = [Block(1, "sh", "siamesenorm train no-such-recipe\n"), Block(2, "python", "print('not reached')\n")]
    done = warm.forked(lambda: in_order(found, tmp_path), tmp_path)
    assert done.code == 1
    assert "unknown recipe 'no-such-recipe'" in done.err
    assert "not reached" not in done.out
