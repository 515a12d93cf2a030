"""From an encoded image to an array of one size and one number of channels.

Every kind of image that Pillow reads is taken: turned upright as its EXIF data says, transparent parts on white, colour
to grey and grey to colour as asked for, 16-bit grey scaled to 8 bits, the first frame of several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from siamesenorm.residual import one_line

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

_WIDE_GREY = ("I", "I;16", "I;16L", "I;16B", "I;16N")

# Beyond this ratio of its sides an image is cut before it is resized, since it could grow without bounds; what goes is
# far outside the centre.
_LONGEST = 16


class UnreadableError(Exception):
    """Something that is no image, or not a whole one."""


def decode(content: bytes) -> Image:
    """An image as it is in its file, upright.

    Raises:
        UnreadableError: for anything but a whole image.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(BytesIO(content))
        image.load()
    except Exception as error:  # each file format has errors of its own
        raise UnreadableError(_reason(error)) from error
    _require_known_range(image)
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # The picture is whole, and only what is written about it is not.
        return image


def check(content: bytes) -> None:
    """Make sure that `decode` takes it, in a fraction of its time where the format allows.

    Raises:
        UnreadableError: as there.
    """
    from PIL import Image

    try:
        image = Image.open(BytesIO(content))
        # JPEG goes through all of a file's data for the smallest of its sizes too.
        image.draft("L", (1, 1))
        image.load()
    except Exception as error:
        raise UnreadableError(_reason(error)) from error
    _require_known_range(image)


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    # Pillow names the object in memory that it read from.
    return "no image that Pillow knows" if isinstance(error, UnidentifiedImageError) else one_line(error)


def _require_known_range(image: Image) -> None:
    if image.mode == "F":
        raise UnreadableError("its values are floating-point numbers, and nothing says which of them is white")


def convert(image: Image, channels: int) -> Image:
    """An image in mode L (1 channel) or RGB (3), of the size that it has."""
    from PIL import Image

    if image.mode in _WIDE_GREY:
        wide = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


@dataclass(frozen=True)
class Form:
    """What every image becomes: ``size`` × ``size`` pixels in ``channels`` (1 or 3).

    The short side is resized to ``size / crop_fraction``, with filters wide enough to prevent aliasing, and the centre
    is cut out (1.0 keeps all of the short side, 0.875 is what most results on ImageNet are given for).
    """

    size: int
    channels: int
    crop_fraction: float
    resampling: Resampling

    def array(self, image: Image) -> np.ndarray:
        """An image's array, uint8 of shape (channels, size, size)."""
        fitted = self._fit(convert(image, self.channels))
        pixels = np.asarray(fitted).reshape(self.size, self.size, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _fit(self, image: Image) -> Image:
        image = _centre(image, *(min(side, _LONGEST * min(image.size)) for side in image.size))
        short = math.floor(self.size / self.crop_fraction)
        width, height = (max(short, short * side // min(image.size)) for side in image.size)
        if image.size != (width, height):
            image = image.resize((width, height), self.resampling)
        return _centre(image, self.size, self.size)


def _centre(image: Image, width: int, height: int) -> Image:
    left, top = (round((there - wanted) / 2) for there, wanted in zip(image.size, (width, height), strict=True))
    return image if image.size == (width, height) else image.crop((left, top, left + width, top + height))
