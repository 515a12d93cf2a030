"""Commands without the seconds that importing torch and transformers takes: in forks of a process that has them.

`forked` runs a function in such a fork. `commands` lets a shell do it: it puts `siamesenorm` and `python` in front of
the PATH, each of them a script that hands its arguments, folder, environment and files to a fork. What that sees is
what a process of its own would see, but for what this one has imported or put in other places before.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_CLIENT = """\
#!{python} -SEI
import array, json, os, socket, sys
asked = [{program!r}, *sys.argv[1:]]
if asked[0] == "python" and (len(asked) == 1 or asked[1] in ("-", "-c")):
    os.execv({python!r}, [{python!r}, *asked[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
message = json.dumps({{"arguments": asked, "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]).tobytes())]
server.sendmsg([len(message).to_bytes(4, "big") + message], files)
sys.exit(int(server.recv(16) or 255))
"""
_PROGRAMS = ("siamesenorm", "python", "python3")
_THREE = 3 * array.array("i").itemsize


@dataclass(frozen=True)
class Done:
    """How a fork ended, and what it printed."""

    code: int
    out: str
    err: str


def forked(action: Callable[[], object], folder: Path) -> Done:
    """Run a function in a fork of this process.

    Args:
        action: the function; leaves by returning, `SystemExit` or an exception, which is an exit code of 1.
        folder: for what it prints.
    """
    files = [folder / "out", folder / "err"]
    # What is there before a fork need not be looked through for garbage in it.
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        _leave(action)
    gc.unfreeze()
    _, status = os.waitpid(child, 0)
    out, err = (file.read_text() for file in files)
    return Done(os.waitstatus_to_exitcode(status), out, err)


def python(arguments: list[str]) -> None:
    """What `python` would do with arguments: a file, or a module behind ``-m``."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def commands(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of shells whose `siamesenorm` and `python` are forks of this process as it is now.

    Args:
        folder: for the scripts.
    """
    # The path of a socket may be no longer than a hundred characters.
    short = tempfile.mkdtemp()
    address = f"{short}/socket"
    for program in _PROGRAMS:
        script = folder / program
        name = "python" if program.startswith("python") else program
        script.write_text(_CLIENT.format(python=sys.executable, program=name, address=address))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    child = os.fork()
    if child == 0:
        _leave(lambda: _serve(server))
    server.close()
    try:
        yield {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shutil.rmtree(short)


def _serve(server: socket.socket) -> NoReturn:
    # The system takes care of forks that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            _answer(client)
        client.close()


def _answer(client: socket.socket) -> NoReturn:
    data, ancillary, _, _ = client.recvmsg(1 << 20, socket.CMSG_LEN(_THREE))
    length = int.from_bytes(data[:4], "big")
    while len(data) < 4 + length:
        data += client.recv(1 << 20)
    for number, file in enumerate(array.array("i", ancillary[0][2][:_THREE])):
        os.dup2(file, number)
    asked = json.loads(data[4:])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])

    def run() -> None:
        program, *arguments = asked["arguments"]
        if program == "siamesenorm":
            from siamesenorm.cli import main

            sys.argv = asked["arguments"]
            main(arguments)
        else:
            python(arguments)

    def told(code: int) -> None:
        client.sendall(str(code).encode())

    _leave(run, told)


def _leave(action: Callable[[], object], told: Callable[[int], object] = lambda code: None) -> NoReturn:
    """Run a function and end this process, whatever happens; nothing of the process that it was forked from goes on."""
    code = 1
    try:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        action()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            told(code)
        os._exit(code)
