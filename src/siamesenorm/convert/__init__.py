"""Checkpoints from elsewhere, and from one scheme to another."""

from .official import load_official, official_names
from .upcycle import upcycle

__all__ = ["load_official", "official_names", "upcycle"]
