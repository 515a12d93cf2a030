"""Checkpoints from elsewhere."""

from .official import load_official, official_names

__all__ = ["load_official", "official_names"]
