"""Reports: figures, and the one page that shows them and says in words what they show.

    report = Report("A study", "What was compared, and how.")
    report.section("Loss")
    report.figure(figure, title="Loss over steps", words="Both fall.", data={"step": [1, 2], "loss": [3.0, 2.5]})
    report.table(("scheme", "loss"), [("pre", 2.5)], "The last losses")
    report.write(folder / "report.html")

Nothing here needs torch.
"""

from .figures import COLOURS, figure_of, line_style, save_figure
from .page import Report
from .svg import AS_DRAWN

__all__ = ["AS_DRAWN", "COLOURS", "Report", "figure_of", "line_style", "save_figure"]
