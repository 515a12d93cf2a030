"""The time of one generated token beside Pre-Norm's, with a cache, all models in turn in one process.

python benchmarks/decode.py [LAYERSxWIDTH ...] [--tokens 200]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from rich.progress import track

from siamesenorm.bench import UNTOUCHED, of_shape
from siamesenorm.bench.measure import model_of
from siamesenorm.training.recipe_files import load

SCHEMES = ("pre", UNTOUCHED, "siamese", "siamese:x=hybrid")
PROMPT = 128


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("shapes", nargs="*", default=["8x512", "16x1024"])
    arguments.add_argument("--tokens", type=int, default=200)
    asked = arguments.parse_args()
    for shape in asked.shapes:
        recipe = load("lm-tiny", of_shape(shape, PROMPT + 1))
        models = {name: model_of(recipe, name, torch.device("cpu")).eval() for name in SCHEMES}
        prompt, token = torch.randint(0, 256, (1, PROMPT)), torch.zeros(1, 1, dtype=torch.long)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        with torch.no_grad():
            caches = {name: model(prompt, use_cache=True).past_key_values for name, model in models.items()}
            for _ in track(range(asked.tokens), description=shape):
                for name in random.sample(SCHEMES, len(SCHEMES)):
                    started = time.perf_counter()
                    models[name](token, cache=caches[name], use_cache=True)
                    seconds[name].append(time.perf_counter() - started)
                    caches[name].crop(-1)
        print(f"{shape}, {torch.get_num_threads()} threads, median of {asked.tokens}")
        for name, taken in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(taken, seconds["pre"], strict=True))
            print(f"  {name:18} {1e3 * statistics.median(taken):8.2f} ms a token, {ratio:.3f} of Pre-Norm's")


if __name__ == "__main__":
    main()
