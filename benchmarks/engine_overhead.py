"""Tokens per second of a recipe under the engine, against a bare PyTorch loop over the same model in the same process.

    python benchmarks/engine_overhead.py [RECIPE] [key.sub=value ...]

The engine's trainer runs as `siamesenorm train` sets it up: data loader, metrics, progress lines, gradient clipping and
checks, with validation and checkpoints left out of both. The bare loop feeds the same batch shapes from memory, clips
and steps the same AdamW. Both alternate in rounds of a few steps, so that whatever else slows the machine down slows
both; the ratio is that of the medians over all steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from siamesenorm.cli.options import split_arguments
from siamesenorm.training.build import build_model
from siamesenorm.training.display import Lines
from siamesenorm.training.evaluate import Evaluation
from siamesenorm.training.events import Step
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import RunLog, quiet_engine
from siamesenorm.training.run_folder import RunFolder
from siamesenorm.training.settings import device_of, scheme_of
from siamesenorm.training.tasks import task_of

ROUNDS, STEPS = 8, 6


class Alternating:
    """The run's own listener, which lets the bare loop have its turn after every few steps of the engine."""

    def __init__(self, inner: RunLog, bare: Iterator[float]) -> None:
        self.inner, self.bare = inner, bare
        self.engine_times: list[float] = []
        self.bare_times: list[float] = []
        self._since = 0.0

    def resumed(self, step: int) -> None:
        self.inner.resumed(step)

    def step(self, step: Step) -> None:
        self.inner.step(step)
        now = time.perf_counter()
        # The first step of each round only takes the machine over from the other loop.
        if step.step % STEPS:
            self.engine_times.append(now - self._since)
        else:
            next(self.bare)
            self.bare_times += [next(self.bare) for _ in range(STEPS - 1)]
        self._since = time.perf_counter()

    def flush(self) -> None:
        self.inner.flush()

    def warn(self, message: str) -> None:
        self.inner.warn(message)


def main() -> None:
    name, overrides = split_arguments(sys.argv[1:])
    recipe = load(name, overrides)
    steps = (ROUNDS + 1) * STEPS
    # Longer than it runs, so that the learning rate stays away from its end.
    recipe = replace(recipe, train=replace(recipe.train, steps=steps, checkpoint_every=10**9, validate_every=10**9))
    recipe = replace(recipe, schedule=replace(recipe.schedule, warmup_steps=min(recipe.schedule.warmup_steps, steps)))
    device = device_of(recipe)
    task = task_of(recipe)
    arrays = task.load(ALONE)

    def bare_loop() -> Iterator[float]:
        model = build_model(recipe).to(device).train()
        decay = recipe.optim.weight_decay
        optim = torch.optim.AdamW(model.parameters(), lr=recipe.optim.lr, weight_decay=decay, fused=True)
        tokens = torch.randint(0, 256, (64, recipe.train.batch_size, recipe.data.sequence_length), device=device)
        for index in range(10**9):
            started = time.perf_counter()
            ids = tokens[index % 64]
            logits = model(input_ids=ids, use_cache=False).logits
            loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm or float("inf"))
            optim.step()
            optim.zero_grad()
            loss.item()
            yield time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder, quiet_engine(verbose=False):
        from siamesenorm.training import engine

        run = RunFolder(Path(folder))
        log = RunLog(run, recipe, Lines(recipe.train.log_every))
        listener = Alternating(log, bare_loop())
        model = build_model(recipe).to(device)
        engine.fit(
            model,
            scheme_of(recipe),
            task,
            arrays,
            folder=run.checkpoints,
            device=device,
            listener=listener,
            validate=lambda: Evaluation(0.0, 1),
        )
        log.close()
    # The first round is warm-up for both.
    engine_step = statistics.median(listener.engine_times[STEPS:])
    bare_step = statistics.median(listener.bare_times[STEPS:])
    per_step = recipe.train.batch_size * recipe.data.sequence_length
    print(
        f"recipe     {recipe.name}, {recipe.model.scheme}, {per_step} tokens a step, {torch.get_num_threads()} threads"
    )
    print(f"corpus     {arrays.source}, sha256 {arrays.sha256}")
    print(f"engine     {per_step / engine_step:,.0f} tokens/s (median of {len(listener.engine_times) - STEPS} steps)")
    print(f"bare loop  {per_step / bare_step:,.0f} tokens/s (median of {len(listener.bare_times) - STEPS} steps)")
    print(f"ratio      {bare_step / engine_step:.3f}")


if __name__ == "__main__":
    main()
