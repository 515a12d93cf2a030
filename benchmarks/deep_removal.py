"""What is lost with the deepest blocks of a study's models: the paper's claim that it is more under SiameseNorm.

python benchmarks/deep_removal.py runs/study-depth --out docs/results/depth/removal

Every run of the study that finished is measured on its own held-out text (`siamesenorm.probes.depth_tables`, the lens),
and means are taken over the seeds.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.progress import track

from siamesenorm.probes import depth_tables
from siamesenorm.report import figure_of, save_figure
from siamesenorm.study.figures import means_over
from siamesenorm.study.folder import FINISHED, StudyFolder
from siamesenorm.study.statistics import estimate, paired
from siamesenorm.training.run_folder import model_folder
from siamesenorm.training.subjects import find

SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Removed:
    """A model without its deepest blocks."""

    scheme: str
    blocks: int
    seed: int
    removed: int
    loss: float
    loss_increase: float


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("study", type=Path, help="a study's folder, over schemes, depths and seeds")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--batches", type=int, default=8, help="of eight sequences each")
    asked = arguments.parse_args()
    found = measured(asked.study, asked.batches)
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "removal.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Removed)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, found))
    save_figure(drawn(found), asked.out, "removal")
    text = "\n".join(table(found))
    (asked.out / "removal.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(path: Path, batches: int) -> list[Removed]:
    """Each run that finished, with 0 to all of its blocks removed."""
    folder = StudyFolder(path)
    out: list[Removed] = []
    runs = [run for run in folder.recorded().runs if folder.state(run).status == FINISHED]
    if not runs:
        raise SystemExit(f"no run of {path} has finished")
    for run in track(runs, description="models"):
        subject = find(model_folder(folder.run(run).path), folder.run(run).recipe())
        depths = depth_tables(subject.model, subject.batches(8, batches), only=["lens"]).depths
        for each in reversed(depths):
            losses = (each["removed"], each["loss"], each["loss_increase"])
            out.append(Removed(run.values["scheme"], len(depths) - 1, run.recipe.seed, *losses))
    return out


def table(found: Sequence[Removed]) -> list[str]:
    """Means over the seeds, and the differences to the first scheme, seed by seed."""
    schemes, depths = list(dict.fromkeys(each.scheme for each in found)), dict.fromkeys(each.blocks for each in found)
    lines = [f"| blocks | removed | scheme | loss increase | less that of {schemes[0]} |", "| --- " * 5 + "|"]
    for blocks in depths:
        for removed in dict.fromkeys((1, *(round(share * blocks) for share in SHARES))):
            base = by_seed(found, schemes[0], blocks, removed)
            for scheme in schemes:
                own = by_seed(found, scheme, blocks, removed)
                gap = None if scheme == schemes[0] else paired(own, base)
                less = "–" if gap is None else gap.starred
                lines.append(f"| {blocks} | {removed} | {scheme} | {estimate(list(own.values()))} | {less} |")
    return lines


def by_seed(found: Sequence[Removed], scheme: str, blocks: int, removed: int) -> dict[int, float]:
    """The loss increases of one place, by seed."""
    place = (scheme, blocks, removed)
    return {each.seed: each.loss_increase for each in found if (each.scheme, each.blocks, each.removed) == place}


def drawn(found: Sequence[Removed]) -> Any:
    """A panel for each depth: the mean loss increase over the blocks removed, with its interval."""
    schemes, depths = dict.fromkeys(each.scheme for each in found), list(dict.fromkeys(each.blocks for each in found))
    rows = -(-len(depths) // 2)
    figure, grid = figure_of(10, 3.2 * rows, rows, 2, squeeze=False)
    for axes, blocks in zip(grid.flat, depths, strict=False):
        for index, scheme in enumerate(schemes):
            means = [estimate(list(by_seed(found, scheme, blocks, count).values())) for count in range(blocks + 1)]
            means_over(axes, list(enumerate(means)), scheme, index)
        axes.set(title=f"{blocks} blocks", xlabel="deepest blocks removed", ylabel="loss increase (nats)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in grid.flat[len(depths) :]:
        axes.set_visible(False)
    return figure


if __name__ == "__main__":
    main()
