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
    _draw(path, records, title, {"loss": [r.loss for r in records]}, "loss (nats a token)")


def draw_memory(path: str | Path, records: Sequence[StepRecord], title: str) -> None:
    """Draw the peaks of memory over steps into a PNG file: flat where a run holds what it held."""
    lines = {"host": [r.host_peak_bytes / 2**30 for r in records]}
    if any(r.peak_bytes != r.host_peak_bytes for r in records):
        lines["device"] = [r.peak_bytes / 2**30 for r in records]
    _draw(path, records, title, lines, "peak memory so far (GiB)", from_zero=True)


def _draw(
    path: str | Path,
    records: Sequence[StepRecord],
    title: str,
    lines: dict[str, list[float]],
    label: str,
    *,
    from_zero: bool = False,
) -> None:
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")  # not pyplot: no global state, no window
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in lines.items():
        axes.plot([r.step for r in records], values, marker="o", markersize=3, linewidth=1.5, label=name)
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
