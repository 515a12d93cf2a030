"""Studies: many runs that differ in a few things, and what follows from them.

    study = load_study("lr", ["schemes=[pre,siamese:x=hybrid]", "seeds=[0,1,2]"])
    outcome = run_study(study, Path("studies/lr"), jobs=2)
    print(outcome.comparison.advice)

Start with ``grid.py`` (what a study is) and ``session.py`` (what a session of one does). The runs are made by
`siamesenorm.training.run.train`, each in a folder of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grid import Study, load_study
    from .plan import plan
    from .session import Share, report, run_study

__all__ = ["Share", "Study", "load_study", "plan", "report", "run_study"]

_HOME = {
    "Share": "session",
    "Study": "grid",
    "load_study": "grid",
    "plan": "plan",
    "report": "session",
    "run_study": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
