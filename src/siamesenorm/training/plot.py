"""The picture of a run: training and validation loss over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.report import figure_of


def loss_curve(lines: list[dict[str, Any]], title: str, label: str, path: Path) -> None:
    """Draw ``metrics.jsonl``'s lines; the training loss thin, with its moving mean, the validation loss as points."""
    figure, axes = figure_of(7, 4.2)
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    if train:
        steps, losses = (np.array(column) for column in zip(*train, strict=True))
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
        width = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(
            steps[width - 1 :], smooth, color="tab:blue", label="training" + (f", mean of {width}" if width > 1 else "")
        )
        # The first steps start near ln(vocabulary) and would squeeze everything else into the bottom of the picture.
        top = np.quantile(losses, 0.95) + 0.2
        if len(losses) >= 100 and losses.min() < top:
            axes.set_ylim(losses.min() - 0.1, top)
    held_out = [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), "o-", color="tab:orange", label=f"validation, last {held_out[-1][1]:.4f}"
        )
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend()
    figure.savefig(path, dpi=120)
