"""``siamesenorm study``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from siamesenorm.study.plan import Planned
    from siamesenorm.study.session import Outcome

# More models than these make a figure that nobody can read.
_COMPARED = 4


def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A study of the package (lr, depth, warmup, ablation or schemes), or the path of a YAML file.",
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD=VALUE...",
            help="Axes with their values, such as schemes=\\[pre,siamese] seeds=[0,1,2]; recipe=, "
            "steps=, baseline=; and keys of the recipe.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder. Default: runs/study-<name>.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs to train at a time; the threads are divided.")
    ] = 1,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Be process I (from 0) of N that share --out. In a SLURM job array that is so without being said.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Give each run as many steps as take so long at its own pace, in place of equal steps."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, their parameters and about how long they take.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Make table and report again from the runs in --out; train nothing.")
    ] = False,
    print_yaml: Annotated[
        bool, typer.Option("--print", help="Print the study's file, to be copied and changed.")
    ] = False,
) -> None:
    """Train a grid of runs and compare them: results.csv, results.parquet, summary.md and report.html in --out.

    The same command goes on where it was stopped.
    """
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.recipe_files import find

    if print_yaml:
        print(find(name, "study").read_text(encoding="utf-8"), end="")
        return
    if dry_run and report_only:
        raise ConfigError("--dry-run and --report-only cannot be had at once")
    from siamesenorm.study.display import for_terminal
    from siamesenorm.study.folder import StudyFolder
    from siamesenorm.study.grid import changed, load_study
    from siamesenorm.study.plan import plan
    from siamesenorm.study.session import Share, report, run_study

    given = [*(words or []), *([] if seconds is None else [f"seconds={seconds}"])]
    asked = load_study(name, given)
    folder = out or Path("runs") / f"study-{asked.name}"
    if report_only:
        _tell(report(changed(StudyFolder(folder).recorded(), given), folder))
        return
    if dry_run:
        _list(plan(asked, folder if folder.exists() else None), jobs)
        return
    share = Share.of_slurm() if task is None else Share.read(task)
    outcome = run_study(asked, folder, jobs=jobs, share=share, display=for_terminal())
    _tell(outcome)
    if outcome.status == "interrupted":
        print("interrupted; the same command goes on from there", file=sys.stderr)
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)


def _tell(outcome: Outcome) -> None:
    folder = outcome.folder
    counts: dict[str, int] = {}
    for row in outcome.rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    print(f"{len(outcome.rows)} runs: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    for row in outcome.rows:
        if row["status"] == "failed":
            print(f"  {row['run']}: {row['why']}")
    print(f"\n{outcome.comparison.advice}\n\nin {folder.path}/")
    for path, what in (
        (folder.report, "figures and tables, for a browser"),
        (folder.summary, "the same as text"),
        (folder.csv, "one row a run, with its whole configuration"),
        (folder.parquet, "the same for programs"),
        (folder.figures, "the figures as PNG and SVG"),
        (folder.runs, "the runs"),
    ):
        print(f"  {path.name + ('/' if path.is_dir() else ''):16} {what}")
    if models := _to_look_into(outcome):
        command = ["siamesenorm", "probe", *map(str, models), "--only", "sites", "--out", str(folder.path / "inside")]
        print(f"\nto look inside: {shlex.join(command)}")


def _to_look_into(outcome: Outcome) -> list[Path]:
    """A run of each scheme at its best, in one setting; none where models were not kept, or only one was."""
    best = outcome.comparison.best
    alike = [each for each in best if outcome.comparison.setting(each) == outcome.comparison.setting(best[0])]
    runs = [outcome.folder.runs / each.rows[0]["run"] for each in alike if each.is_sound][:_COMPARED]
    kept = [run for run in runs if (run / "model").is_dir()]
    return kept if len(kept) > 1 else []


def _list(planned: Sequence[Planned], jobs: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from siamesenorm.training.display import clock

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in (*planned[0].run.values, "status", "parameters", "over baseline", "about"):
        table.add_column(column, overflow="fold")
    for each in planned:
        params = each.fault or "" if each.params is None else f"{each.params:,}"
        over = "" if each.over_baseline is None else f"{each.over_baseline:+.3%}"
        about = "unknown" if each.seconds is None else clock(each.seconds)
        table.add_row(*map(str, each.run.values.values()), each.status, params, over, about)
    Console().print(table)
    left = [each for each in planned if each.status in ("pending", "failed") and each.fault is None]
    known = [each.seconds for each in left if each.seconds is not None]
    total = (
        f"about {clock(sum(known) / jobs)} of training, {jobs} at a time"
        if len(known) == len(left)
        else "how long is not known"
    )
    print(f"\n{len(planned)} runs, {len(left)} of them to be trained: {total}")
