"""``siamesenorm probe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.cli.options import Json, bar, print_json


def probe(
    models_or_runs: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL_OR_RUN...", help="Folders of saved models or of runs; several are compared."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where the results go. Default: probe/ in the folder, or here where several are compared."),
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, help="Of held-out data, at most; spread evenly over all there is.")
    ] = 8,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences or images in each. Default: the run's, else 8.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="What to measure on, as for siamesenorm eval. Default: the run's, else python-stdlib or digits."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Measure these alone, with commas between or given again: sites, lens, removal, skips, angles, rank, "
            "overflow, stability.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look inside models: streams and gradients in each sublayer, what depth does, how stable training was.

    Leaves a report.html that says in words what its figures show, and every number as Parquet and JSON.
    """
    from siamesenorm.probes.showing import check_folder, write
    from siamesenorm.training.probing import PROBES, Probed, Wanted, check_comparable, labels_of

    names = [name.strip() for names in only or () for name in names.split(",")]
    wanted = Wanted(names or PROBES, batches, batch_size, source)
    folder = out or (models_or_runs[0] / "probe" if len(models_or_runs) == 1 else Path("probe"))
    check_folder(folder)
    probed = [Probed(path, wanted, explicit=bool(only)) for path in models_or_runs]
    check_comparable(probed)
    with bar("forward passes", sum(each.work for each in probed)) as advance:
        results = [each.result(label, advance) for each, label in zip(probed, labels_of(probed), strict=True)]
    summary = write(results, folder)
    if json:
        print_json(summary)
        return
    for result in results:
        _show(result)
    print(f"\nin {folder}/\n  report.html     what was found, with figures\n  probe.json      all of it as JSON")
    print("  *.parquet       the same as tables\n  *.png, *.svg    the figures")


def _show(result: dict[str, Any]) -> None:
    """What a person wants to know before opening the report."""
    print(f"{result['label']}  ({result['path']})")
    lines: list[tuple[str, str]] = []
    if result["loss"] is not None:
        lines.append(("loss", f"{result['loss']:.4f} over {result['counted']:,} {result['counts']}"))
    by_removed = {row["removed"]: row.get("loss_increase") for row in result["depth"]}
    for count in (1, (result["blocks_of_model"] or 0) // 2):
        if by_removed.get(count) is not None and count:
            what = "deepest block" if count == 1 else f"deepest {count} blocks"
            lines.append((f"without the {what}", f"{by_removed[count]:+.4f}"))
    if result["overflow"] is not None:
        lines.append(("overflow", result["overflow"]["first"] or "nowhere"))
    if result["stability"] is not None:
        for name, label in (("loss", "spikes in loss"), ("grad_norm", "spikes in gradient norm")):
            found = result["stability"][name]
            score = "too few steps to say" if found["score"] is None else f"{found['score']:.3%}"
            lines.append((label, f"{score} of {found['judged']:,} steps" if found["judged"] else score))
        if result["stability"]["diverged"]:
            lines.append(("diverged", f"at step {result['stability']['diverged']['step']}"))
    for label, text in lines:
        print(f"  {label:28} {text}")
