"""Whether X is worth computing again: SiameseNorm compiled as it is, and with a partitioner that may recompute more.

    python benchmarks/lean.py [LAYERSxWIDTH] [--rounds 10]

torch's partitioner cuts a compiled training step where least has to be kept. By default it does not compute again what
is used far from where it was made, nor long chains of operations; X is both, being made of all branch outputs so far.
Here it may do both, for Pre-Norm and SiameseNorm alike, and keeps the branch outputs instead of X and Y. Both are
measured as ``siamesenorm bench`` does, each against Pre-Norm compiled in the same way.
"""

from __future__ import annotations

import argparse

import torch
from torch._functorch import config

from siamesenorm.bench import cases, measure, of_shape
from siamesenorm.training.recipe_files import load


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("shape", nargs="?", default="8x512")
    arguments.add_argument("--rounds", type=int, default=10)
    asked = arguments.parse_args()
    recipe = load("lm-tiny", of_shape(asked.shape, 1024))
    ways = {
        "compiled": {},
        "may recompute": {"ban_recompute_used_far_apart": False, "ban_recompute_long_fusible_chains": False},
        "recomputes all it can": {"aggressive_recomputation": True},
    }
    print(f"{'':22} {'scheme':10} {'ms a step':>10} {'to pre':>8} {'kept MiB':>9} {'to pre':>8} {'peak MiB':>9}")
    for name, settings in ways.items():
        with config.patch(settings):
            found = measure(recipe, cases(["siamese"], ["compiled"]), rounds=asked.rounds, device=torch.device("cpu"))
        for each in found:
            time, kept = each.time_to_baseline.median, each.kept_to_baseline
            print(
                f"{name:22} {each.case.scheme:10} {1e3 * each.seconds.median:10.1f} {time:8.3f} "
                f"{each.kept / 2**20:9.1f} {kept:8.3f} {each.peak / 2**20:9.1f}"
            )


if __name__ == "__main__":
    main()
