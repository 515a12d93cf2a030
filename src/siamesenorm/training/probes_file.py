"""``probes.parquet``: what was measured in a model as it trained, a row for each step, sublayer and stream.

Parquet cannot be added to, so the file is written anew each time, in one piece; it is small beside a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.data.files import write_parquet
from siamesenorm.residual import ConfigError, one_line

if TYPE_CHECKING:
    import pyarrow


class ProbesFile:
    """The file of a run, of which ``step`` is the first column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: pyarrow.Table | None = None

    def open_after(self, step: int) -> None:
        """Open for what follows ``step``; rows of later steps are taken out.

        Raises:
            ConfigError: there is a file that cannot be read.
        """
        import pyarrow.compute
        import pyarrow.parquet

        self._table = None
        if not self.path.exists():
            return
        try:
            there = pyarrow.parquet.read_table(self.path)
            kept = there.filter(pyarrow.compute.field("step") <= step)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(
                f"cannot go on with {self.path}: {one_line(error)}. Move it away, and what it held is lost to the run"
            ) from error
        if len(kept) < len(there):
            write_parquet(self.path, kept)
        self._table = kept

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of a step; they are on disk when this returns."""
        import pyarrow

        table = pyarrow.Table.from_pylist([{"step": step, **row} for row in rows])
        if self._table is not None:
            # A column without a value, such as a scale that no sublayer declares, has no type of its own.
            table = pyarrow.concat_tables([self._table, table], promote_options="permissive")
        write_parquet(self.path, table)
        self._table = table
