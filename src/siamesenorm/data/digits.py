"""The embedded images: 1,797 handwritten digits of 8 × 8 pixels that scikit-learn brings along.

They are the test part of the UCI data set "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
1998): scans of 32 × 32 black and white pixels, of which each 4 × 4 became its number of black ones.
"""

from __future__ import annotations

import numpy as np

from siamesenorm.data.image_sources import ImageSource, Pictures
from siamesenorm.data.sources import needed

NAME = "digits"
SIZE = 8

# The scans' values are 0 to 16.
_WHITE = 16
_HELD_OUT = 0.2


class Digits(Pictures):
    """The scans in the order of their classes, each as a file in the PGM format, which is a header and the pixels."""

    identity = None

    def __init__(self) -> None:
        found = needed("sklearn.datasets").load_digits()
        labels = np.asarray(found.target, dtype=np.int64)
        order = np.argsort(labels, kind="stable")
        self.labels = labels[order]
        self._pixels = np.round(found.images[order] * (255 / _WHITE)).astype(np.uint8)

    def content(self, index: int) -> bytes:
        """One scan's file."""
        return b"P5 %d %d 255\n" % (SIZE, SIZE) + self._pixels[index].tobytes()

    def where(self, index: int) -> str:
        """Its number."""
        return f"{NAME}, image {index}"


def source() -> ImageSource:
    """The digits, all of them to train on or to hold out."""
    from PIL.Image import Resampling

    return ImageSource(
        classes=tuple(str(digit) for digit in range(10)),
        train=Digits(),
        size=SIZE,
        channels=1,
        validation_fraction=_HELD_OUT,
        resampling=Resampling.BILINEAR,
    )
