"""Measurements on a model as it runs."""

from .capture import capture_streams

__all__ = ["capture_streams"]
