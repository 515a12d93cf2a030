"""Every scheme on the same model, data, order and seeds: validation loss, seconds per step, memory.

    python benchmarks/schemes.py --steps 200 --seeds 2 --jobs 2 --out runs/schemes

Trains lm-tiny with each scheme's defaults, `--jobs` runs at a time with a thread each, going through all schemes once
per seed; what is there already is not trained again. Seconds per step are those of training alone. Memory is what the
tensors of a step take at most, by the same count as `siamesenorm inspect`. The table goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track

import siamesenorm
from siamesenorm.training.build import check
from siamesenorm.training.memory import training_memory
from siamesenorm.training.recipe_files import load

RECIPE = "lm-tiny"


def variants() -> dict[str, list[str]]:
    """Overrides by what the table calls them; Pre-Norm first."""
    made = {"pre": ["model.scheme=pre"]}
    for name in siamesenorm.schemes():
        if name == "siamese":
            made |= {f"siamese, x={x}": ["model.scheme=siamese", f"model.options.x={x}"] for x in ("post", "hybrid")}
        else:
            made.setdefault(name, [f"model.scheme={name}"])
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--out", type=Path, required=True)
    asked = arguments.parse_args()
    warmup = max(asked.steps // 10, 1)
    schedule = [f"train.steps={asked.steps}", f"schedule.warmup_steps={warmup}", "sample.tokens=0"]

    def run(task: tuple[int, str]) -> tuple[str, dict]:
        seed, name = task
        overrides = [*variants()[name], *schedule, f"seed={seed}"]
        out = asked.out / f"{name.replace(', x=', '-')}-{seed}"
        command = [sys.executable, "-m", "siamesenorm", "train", RECIPE, *overrides, "--out", str(out), "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if not done.stdout:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return name, json.loads(done.stdout)

    tasks = [(seed, name) for seed in range(asked.seeds) for name in variants()]
    found: dict[str, list[dict]] = {name: [] for name in variants()}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for name, summary in track(pool.map(run, tasks), "training", len(tasks), console=Console(stderr=True)):
            found[name].append(summary)

    print("| scheme | validation loss, nats per byte | parameters | seconds per step | memory |")
    print("|---|---|---|---|---|")
    baseline = None
    for name, runs in found.items():
        recipe = load(RECIPE, [*variants()[name], *schedule])
        memory = training_memory(check(recipe), recipe).total
        seconds = statistics.mean(each["seconds"] / each["steps"] for each in runs)
        baseline = baseline or (seconds, memory)
        losses = ["diverged" if each["diverged"] else f"{each['val_loss']:.3f}" for each in runs]
        print(
            f"| {name} | {' / '.join(losses)} | {runs[0]['params']:,} | {seconds:.3f} ({seconds / baseline[0]:.2f}×) "
            f"| {memory / 2**20:.0f} MiB ({memory / baseline[1]:.2f}×) |"
        )


if __name__ == "__main__":
    main()
