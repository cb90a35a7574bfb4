"""Pictures of a run, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from oomb.progress import StepRecord


def draw_loss(path: str | Path, records: Sequence[StepRecord], title: str) -> None:
    """Draw loss over steps into a PNG file."""
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")  # not pyplot: no global state, no window
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r.step for r in records], [r.loss for r in records], marker="o", markersize=3, linewidth=1.5)
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
