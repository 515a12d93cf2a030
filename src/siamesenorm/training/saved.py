"""Loading what is in a saved model's folder, and transformers without its own progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from siamesenorm import hub
from siamesenorm.hub import checks
from siamesenorm.residual import ConfigError, one_line


def load_model(path: Path) -> PreTrainedModel:
    """A saved model of transformers.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    logging.disable_progress_bar()
    model: PreTrainedModel = hub.load(path)
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokeniser saved with a model.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    checks.check_tokenizer(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the readers raise whatever a broken file leads them to
        raise ConfigError(f"no tokeniser can be loaded from {path}: {one_line(error)}") from error
    return tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without transformers' own bars, which would break up the output of a run."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
