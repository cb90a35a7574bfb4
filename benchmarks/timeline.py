"""Compute and copies over some chunks of a step with everything on the host: a picture, and how much of the copies'
time lies under compute.

    python3 benchmarks/timeline.py record events.json --layers 4 --tokens 131072      # on a GPU
    python3 benchmarks/timeline.py draw events.json docs/pictures/timeline.png        # anywhere
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gpu_trace import Event, is_compute, length, merged, overlap

LANES = ("compute", "copies in", "copies out")
COLOURS = {"attention": "#e45756", "products": "#4c78a8", "other": "#9db8d9", "copies": "#72b7b2"}
Bar = tuple[float, float, str]  # start, stop, colour


def passes(events: Sequence[Event]) -> tuple[list[float], int]:
    """When each chunk's pass begins (its tokens are embedded), and which of them is the first with a loss."""
    starts = [e.start for e in events if "gather_kernel" in e.name or "indexSelect" in e.name]
    loss = min(e.start for e in events if e.kind == "softmax and loss")
    return starts, max(i for i, start in enumerate(starts) if start < loss)


def summary(events: Sequence[Event], at: float, chunks: int) -> dict:
    """What to draw of some chunks of both passes, and the shares over the whole step. at: how far into each pass."""
    starts, walk = passes(events)
    ends = [*starts[1:], events[-1].stop]
    busy = merged(filter(is_compute, events))
    shares = {}
    for lane in LANES[1:]:
        spans = merged(e for e in events if e.kind == lane)
        shares[lane] = {"seconds": length(spans), "under_compute": overlap(spans, busy) / max(length(spans), 1e-12)}
    windows = {}
    for name, first, last in (("fill", 0, walk), ("walk back", walk, len(starts))):
        begin = min(first + round(at * (last - first)), last - chunks)
        start, stop = starts[begin], ends[begin + chunks - 1]
        inside = [e for e in events if e.stop > start and e.start < stop]
        windows[name] = {
            "start": start,
            "stop": stop,
            "marks": starts[begin : begin + chunks],
            "lanes": {lane: bars([e for e in inside if _lane(e) == lane]) for lane in LANES},
        }
    step = {"seconds": events[-1].stop, "compute_busy": length(busy), "chunk_passes": len(starts)}
    return {"step": step, "copies": shares, "windows": windows}


def bars(events: Sequence[Event], gap: float = 2e-5) -> list[Bar]:
    """Neighbours of one colour are one bar; gaps too short to be seen are not drawn."""
    joined: list[Bar] = []
    for event in events:
        colour = _colour(event)
        if joined and joined[-1][2] == colour and event.start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], event.stop), colour)
        else:
            joined.append((event.start, event.stop, colour))
    return joined


def draw(data: dict, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, window) in zip(figure.subplots(len(data["windows"])), data["windows"].items(), strict=True):
        zero = window["start"]
        for row, lane in enumerate(LANES):
            for start, stop, colour in window["lanes"][lane]:
                axes.barh(row, 1e3 * (stop - start), left=1e3 * (start - zero), height=0.7, color=COLOURS[colour], lw=0)
        for mark in window["marks"]:
            axes.axvline(1e3 * (mark - zero), color="black", lw=0.7, ls=":")
        axes.set(xlim=(0, 1e3 * (window["stop"] - zero)), yticks=range(len(LANES)), yticklabels=LANES)
        axes.set_title(f"{len(window['marks'])} chunks of the {name}", loc="left", fontsize=10)
        axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path)


def record(layers: int, tokens: int, system: str) -> list[Event]:
    import torch
    from gpu_trace import device_events
    from step import SYSTEMS, VOCAB, build, use_liger
    from torch.profiler import ProfilerActivity, profile

    use_liger()
    model = build(layers)
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    SYSTEMS[system](model, ids)
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        SYSTEMS[system](model, ids)
        torch.cuda.synchronize()
    return device_events(trace)


def _lane(event: Event) -> str:
    return "compute" if is_compute(event) else event.kind


def _colour(event: Event) -> str:
    if not is_compute(event):
        return "copies"
    if event.kind.startswith("attention"):
        return "attention"
    return "products" if event.kind == "matmul" else "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--layers", type=int, default=4)
    recording.add_argument("--tokens", type=int, default=131072)
    recording.add_argument("--system", default="all on the host")
    recording.add_argument("--at", type=float, default=0.5, help="how far into each pass the drawn chunks lie")
    recording.add_argument("--chunks", type=int, default=2)
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        events = record(arguments.layers, arguments.tokens, arguments.system)
        data = summary(events, arguments.at, arguments.chunks)
        data["of"] = {"system": arguments.system, "layers": arguments.layers, "tokens": arguments.tokens}
        arguments.file.write_text(json.dumps(data) + "\n")
    else:
        data = json.loads(arguments.file.read_text())
        draw(data, arguments.picture)
    print(json.dumps(data["step"]))
    for lane, share in data["copies"].items():
        print(f"{lane}: {share['seconds']:.3f} s, {100 * share['under_compute']:.1f} % of it under compute")


if __name__ == "__main__":
    main()
