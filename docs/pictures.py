"""The pictures of these pages: `python docs/pictures.py` draws them into docs/pictures/.

Those of measurements are drawn from the files in benchmarks/results/, by the benchmarks that measured them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from oomb.eta import ModelWork, passes

ROOT = Path(__file__).parents[1]
# benchmark -> the result that is drawn
MEASURED = {"recall": "recall_cpu_2026-11-29", "sparse_quality": "sparse_quality_h200_2026-11-30"}
FILL, WALK, PAGES = "#4c78a8", "#e45756", "#c9d6e8"


def draw_passes(path: Path, chunks: int = 6) -> None:
    """Which chunk runs when (time to the right), and from when to when its pages exist."""
    figure = Figure(figsize=(8, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    walk_begins = chunks - 1
    for chunk in range(chunks):
        walk = walk_begins + 3 * (chunks - 1 - chunk)  # a chunk's walk takes three times its fill
        begin = min(chunk, walk)
        axes.barh(
            chunk, walk + 3 - begin, left=begin, height=0.25, color=PAGES, label="its pages" if not chunk else None
        )
        if chunk < chunks - 1:
            axes.barh(chunk, 1, left=chunk, height=0.6, color=FILL, label="fill: forward" if not chunk else None)
        label = "walk: forward and backward" if not chunk else None
        axes.barh(chunk, 3, left=walk, height=0.6, color=WALK, label=label)
    axes.set(xlabel="time", ylabel="chunk", yticks=range(chunks), xticks=[])
    axes.invert_yaxis()
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def draw_cost(path: Path, tokens: int = 131072, total: int = 63) -> None:
    """Operations of each pass of a step of a 7B-shaped model, linear and attention."""
    layers, heads, head_dim = 28, 28, 128
    work = ModelWork(2 * 7.1e9, 4.0 * heads * head_dim, (None,) * layers)
    done = passes(work, tokens, total)
    figure = Figure(figsize=(8, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    linear, attention = ([part[i] / 1e12 for part in done] for i in (0, 1))
    axes.bar(range(total), linear, color=FILL, label="matrix products")
    axes.bar(range(total), attention, bottom=linear, color=WALK, label="attention")
    axes.set(xlabel=f"pass of a step ({tokens:,} tokens, {(total + 1) // 2} chunks)", ylabel="TFLOP")
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_measured(name: str, path: Path) -> None:
    """What a benchmark found, drawn by its own `draw`."""
    import importlib

    sys.path.insert(0, str(ROOT))  # the benchmarks are scripts of the repository, not of a package
    result = json.loads((ROOT / "benchmarks" / "results" / f"{MEASURED[name]}.json").read_text(encoding="utf-8"))
    importlib.import_module(f"benchmarks.{name}").draw(result, path)


if __name__ == "__main__":
    folder = Path(__file__).with_name("pictures")
    folder.mkdir(exist_ok=True)
    draw_passes(folder / "passes.png")
    draw_cost(folder / "cost.png")
    for name in MEASURED:
        draw_measured(name, folder / f"{name}.png")
