"""Does SiameseNorm help a model that was trained with Pre-Norm? Further steps as either, from the same weights.

python benchmarks/upcycle.py --out runs/upcycle/results

For each seed a Pre-Norm model is trained by the recipe, and from its weights so many further steps are taken: with
Pre-Norm as it is, and upcycled (`siamesenorm.convert.upcycle`) in the forms that docs/checkpoints.md describes. All of
them have the same data, which the first training did not see in this order, the same schedule and a new optimiser.
Runs lie in --runs, and the same command goes on where it stopped. The default is three seeds of the recipe lm-study.
What docs/results has is of 800 first steps:

python benchmarks/upcycle.py train.steps=800 --out docs/results/upcycle

and takes about 20 minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.progress import track

from siamesenorm.convert.saved import RECORD, upcycle_saved
from siamesenorm.hub import checks
from siamesenorm.report import figure_of, line_style, save_figure
from siamesenorm.residual import ConfigError, make_scheme
from siamesenorm.study.figures import means_over
from siamesenorm.study.statistics import estimate, paired
from siamesenorm.training.display import Silent
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import RunFolder, read_metrics

BASELINE = "Pre-Norm"
# Of the further steps, the shares in which only what is new moves, and in which X is opened.
OWN, OPEN = 0.1, 0.5
ARMS: Mapping[str, Mapping[str, float]] = {
    BASELINE: {},
    "SiameseNorm": {},
    "SiameseNorm, new weights first": {"own_steps": OWN},
    "SiameseNorm, X opened by schedule": {"open_steps": OPEN},
}
# The further steps see the data in another order than the first ones.
OTHER_ORDER = 1_000


@dataclass(frozen=True)
class Further:
    """Validation loss after so many further steps; at step 0 it is that of the model all arms start from."""

    arm: str
    seed: int
    step: int
    val_loss: float


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("set", nargs="*", metavar="KEY.SUB=VALUE", help="of the recipe, for all runs")
    arguments.add_argument("--recipe", default="lm-study")
    arguments.add_argument("--steps", type=int, default=200, help="further ones (default: 200)")
    arguments.add_argument("--seeds", type=int, default=3, help="how many, from 0 (default: 3)")
    arguments.add_argument("--runs", type=Path, default=Path("runs/upcycle"))
    arguments.add_argument("--out", type=Path, required=True)
    asked = arguments.parse_args()
    found, gaps = measured(asked.recipe, asked.set, asked.steps, range(asked.seeds), asked.runs)
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "upcycle.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Further)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, found))
    save_figure(drawn(found), asked.out, "upcycle")
    gap = f"Upcycling itself changes the logits by {max(gaps):.1e} of their largest entry, at most."
    text = "\n".join([*table(found), "", gap])
    (asked.out / "upcycle.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(
    recipe: str, changes: Sequence[str], steps: int, seeds: Sequence[int], runs: Path
) -> tuple[list[Further], list[float]]:
    """Every arm with every seed, and how far each upcycled model is from the one that it was made of."""
    found: list[Further] = []
    gaps = []
    warmup = min(load(recipe, changes).schedule.warmup_steps, steps)
    length = {
        "train.steps": steps,
        "schedule.warmup_steps": warmup,
        "train.validate_every": max(steps // 10, 1),
    }
    todo = [(seed, arm) for seed in seeds for arm in ("first", *ARMS)]
    for seed, arm in track(todo, description="runs"):
        if arm == "first":
            first = trained(runs / f"{seed}-first", recipe, (*changes, "model.scheme=pre", f"seed={seed}"))
            upcycled = runs / f"{seed}-upcycled"
            if not upcycled.is_dir():
                upcycle_saved(first.model, upcycled, make_scheme("siamese"))
            record = checks.read_json(upcycled / RECORD)
            gaps.append(record["largest_relative_difference"])
            start = checks.read_json(first.summary)["val_loss"]
            continue
        options = {} if arm == BASELINE else record["scheme_options"]
        further = trained(
            runs / f"{seed}-{list(ARMS).index(arm)}",
            recipe,
            (
                # A saved model has its own configuration, and the further steps their own length.
                *(each for each in changes if not each.startswith(("model.config.", *(key + "=" for key in length)))),
                *(f"{key}={value}" for key, value in length.items()),
                *(f"schedule.{name}={round(share * steps)}" for name, share in ARMS[arm].items()),
                f"seed={seed + OTHER_ORDER}",
                f"model.scheme={'pre' if arm == BASELINE else record['scheme']}",
                *(f"model.options.{name}={json.dumps(value)}" for name, value in options.items()),
                "model.config={}",
                f"model.pretrained={(first.model if arm == BASELINE else upcycled).resolve()}",
            ),
        )
        found.append(Further(arm, seed, 0, start))
        lines = read_metrics(further.metrics)
        found += [Further(arm, seed, line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    return found, gaps


def trained(folder: Path, recipe: str, changes: Sequence[str]) -> RunFolder:
    """The run in a folder, which is trained to its end where it is not yet."""
    result = train(load(recipe, changes), folder, Silent())
    if result.status not in ("finished", "already finished"):
        raise ConfigError(f"the run in {folder} has {result.status}: {result.message}")
    return result.folder


def table(found: Sequence[Further]) -> list[str]:
    """The losses at the end, over the seeds, and the differences to Pre-Norm seed by seed; * where apart from 0."""
    steps = max(each.step for each in found)
    start = estimate(list(at(found, BASELINE, 0).values()))
    lines = [
        f"Validation loss (nats per byte) after {steps} further steps from a Pre-Norm model at {start}; means over "
        f"{len(at(found, BASELINE, 0))} seeds and 95% intervals.",
        "",
        f"| arm | validation loss | less that of {BASELINE}, seed by seed |",
        "| --- | --- | --- |",
    ]
    base = at(found, BASELINE, steps)
    for arm in ARMS:
        own = at(found, arm, steps)
        gap = None if arm == BASELINE else paired(own, base)
        less = "–" if gap is None else gap.starred
        lines.append(f"| {arm} | {estimate(list(own.values()))} | {less} |")
    return lines


def at(found: Sequence[Further], arm: str, step: int) -> dict[int, float]:
    """The losses of an arm after a step, by seed."""
    return {each.seed: each.val_loss for each in found if (each.arm, each.step) == (arm, step)}


def drawn(found: Sequence[Further]) -> Any:
    """The mean loss over the further steps, and beside it what each arm is above Pre-Norm, seed by seed."""
    figure, (losses, gaps) = figure_of(10, 4, columns=2)
    for index, arm in enumerate(ARMS):
        steps = sorted({each.step for each in found if each.arm == arm})
        at_steps = [at(found, arm, step) for step in steps]
        losses.plot(steps, [sum(each.values()) / len(each) for each in at_steps], label=arm, **line_style(index))
        if arm == BASELINE:
            continue
        differences = [paired(each, at(found, BASELINE, step)) for step, each in zip(steps, at_steps, strict=True)]
        means_over(gaps, list(zip(steps, differences, strict=True)), arm, index)
    gaps.axhline(0, color="black", linewidth=0.8)
    losses.set(ylabel="validation loss (nats per byte)")
    gaps.set(ylabel=f"difference to {BASELINE}, 95% intervals")
    for axes in (losses, gaps):
        axes.set(xlabel="further steps")
        axes.grid(alpha=0.3)
    losses.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
