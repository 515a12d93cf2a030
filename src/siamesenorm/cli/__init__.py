"""The command line. Modules here import nothing heavy until a command runs, so that help answers at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import typer

_SECONDS_TO_SPEAK = 10


def _app() -> typer.Typer:
    from siamesenorm.cli import (
        bench,
        data,
        export,
        generate,
        import_official,
        inspect,
        probe,
        sample,
        study,
        train,
        upcycle,
    )
    from siamesenorm.cli import eval as evaluate

    app = typer.Typer(
        name="siamesenorm",
        help="Train, evaluate and look into models of text and images with SiameseNorm or another residual scheme.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("train")(train.train)
    app.command("eval")(evaluate.evaluate)
    app.command("generate")(generate.generate)
    app.command("sample")(sample.sample)
    app.command("inspect")(inspect.inspect)
    app.command("study")(study.study)
    app.command("probe")(probe.probe)
    app.command("bench")(bench.bench)
    app.command("upcycle")(upcycle.upcycle)
    app.command("import-official")(import_official.import_official)
    app.command("export")(export.export)
    app.add_typer(data.app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0: done. 1: the training diverged, or could not save. 2: the request is wrong, one message on stderr says how. 130:
    interrupted.
    """
    try:
        typer.main.get_command(_app()).main(args=list(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as error:
        leave(error)
    except Exception as error:
        from siamesenorm.residual import ConfigError

        if isinstance(error, ConfigError):
            _fail(str(error), 2)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            _fail(f"{error.strerror or error}{where}", 2)
        raise


def leave(error: SystemExit) -> NoReturn:
    """End this process with the exit code of `error`, also under torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(error.code, int | None):
        # Process groups leave threads behind, and now and then an interpreter that ends under them is aborted.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code or 0)
    raise error


def _fail(message: str, code: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    else:
        # Each process finds the same. The first one says it, before torchrun sees another end and ends them all.
        time.sleep(_SECONDS_TO_SPEAK)
    leave(SystemExit(code))
