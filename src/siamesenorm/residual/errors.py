"""The one exception that means "what was asked for cannot be done": its message is written for the person who asked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "nearest", "one_line"]


class ConfigError(ValueError):
    """A request that is wrong in itself: an unknown name, a value of the wrong kind, options that contradict."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A phrase that helps someone who wrote ``name``: the closest valid name, or all of them where none is close."""
    choices = {choice.lower(): choice for choice in sorted(valid, reverse=True)}
    close = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{choices[close[0]]}'?"
    return f"valid: {', '.join(sorted(choices.values())) or 'none'}"


def one_line(error: BaseException) -> str:
    """What an error of another library says, on one line, for a message of our own; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
