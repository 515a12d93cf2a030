"""The pictures of a finished run on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.images import ImageSplit
from siamesenorm.report import figure_of

# A picture of more is too high to be drawn, let alone looked at.
MOST_ROWS = 100
_MOST_NAMED = 25
_MOST_MISTAKES = 40


def confusion(labels: np.ndarray, guesses: np.ndarray, classes: Sequence[str], path: Path) -> None:
    """Which class was taken for which: a row for each class, its shares by what it was taken for.

    Args:
        labels: (images,), the classes by number.
        guesses: (images,), what the images were taken for.
        classes: their names.
        path: of the PNG.
    """
    count = len(classes)
    counts = np.zeros((count, count), dtype=np.int64)
    np.add.at(counts, (labels, guesses), 1)
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    figure, axes = figure_of(6.4, 5.6)
    shown = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(shown, label="share of the class")
    right = f"{(labels == guesses).mean():.2%} of {len(labels):,} images right"
    axes.set(xlabel="taken for", ylabel="class", title=right)
    if count <= _MOST_NAMED:
        axes.set_xticks(range(count), classes, rotation=0 if max(map(len, classes)) < 3 else 90)
        axes.set_yticks(range(count), classes)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, counts[row, column], ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path, dpi=120)


def mistakes(
    split: ImageSplit,
    wrong: np.ndarray,
    guesses: np.ndarray,
    probabilities: np.ndarray,
    classes: Sequence[str],
    path: Path,
) -> None:
    """The images that were told wrongly, the first of them if there are many.

    Args:
        split: the images.
        wrong: the numbers of those told wrongly, in the order in which they are shown.
        guesses: (images,), what each was taken for.
        probabilities: (images, classes).
        classes: their names.
        path: of the PNG.
    """
    shown = wrong[:_MOST_MISTAKES]
    columns = min(max(len(shown), 1), 8)
    rows = -(-max(len(shown), 1) // columns)
    figure, grid = figure_of(1.5 * columns + 0.2, 1.9 * rows + 0.5, rows, columns)
    for axes in np.atleast_1d(grid).flat:
        axes.axis("off")
    what = f"all {len(wrong)}" if len(shown) == len(wrong) else f"the surest {len(shown)} of {len(wrong):,}"
    figure.suptitle(f"Told wrongly: {what} (class → taken for, and how surely)" if len(wrong) else "None told wrongly")
    for axes, index in zip(np.atleast_1d(grid).flat, shown, strict=False):
        image = split.batch([int(index)])[0][0].transpose(1, 2, 0)
        axes.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
        label, guess = classes[split.labels[index]], classes[guesses[index]]
        axes.set_title(f"{label} → {guess}, {probabilities[index, guesses[index]]:.0%}", fontsize=8)
    figure.savefig(path, dpi=120)


def sheet(images: np.ndarray, columns: int) -> Any:
    """Images side by side as one PIL image, each at least 64 pixels high, with a line between them.

    Args:
        images: (count, height, width, channels), numbers between 0 and 1, row after row.
        columns: in a row.
    """
    from PIL import Image

    count, height, width, channels = images.shape
    scale = max(1, -(-64 // height))
    rows = -(-count // columns)
    line = max(2, height * scale // 16)
    canvas = np.full((rows * (height * scale + line) + line, columns * (width * scale + line) + line, channels), 1.0)
    for index, image in enumerate(images):
        top = (index // columns) * (height * scale + line) + line
        left = (index % columns) * (width * scale + line) + line
        large = image.repeat(scale, 0).repeat(scale, 1)
        canvas[top : top + height * scale, left : left + width * scale] = large
    pixels = (canvas.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def samples(sheets: Sequence[tuple[str, Any]], classes: Sequence[str], path: Path) -> None:
    """Sheets of samples side by side, one class a row, each under its title.

    Args:
        sheets: title and PIL image of each, all with the same rows.
        classes: the names of the rows.
        path: of the PNG.
    """
    ratio = sheets[0][1].width / sheets[0][1].height
    height = max(0.55 * len(classes), 2.0)
    figure, grid = figure_of(height * ratio * len(sheets) + 0.8, height + 0.5, 1, len(sheets))
    for axes, (title, image) in zip(np.atleast_1d(grid).flat, sheets, strict=True):
        axes.imshow(image, cmap="gray" if image.mode == "L" else None, vmin=0, vmax=255)
        axes.set_title(title)
        axes.set_xticks([])
        axes.set_yticks([])
    first = np.atleast_1d(grid).flat[0]
    step = image.height / len(classes)
    first.set_yticks([(row + 0.5) * step for row in range(len(classes))], classes)
    figure.savefig(path, dpi=120)
