"""What README and docs say was measured is what the committed files hold: numbers, rounding and file names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ["README.md", "benchmarks/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
GIB = 2**30
GROWTH = (GIB / 1e6) / 19.6608  # GiB from 64 K to 256 K, as MB for 10,000 tokens


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def steps(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["system"], row["tokens"]): row for row in result(name)["rows"]}


def text(page: str) -> str:
    """Of a page, in one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def dense_steps() -> Iterator[tuple[str, str]]:
    found, growth = steps("step_h200_2026-11-30"), steps("step_h200_2026-11-30_growth")
    shown = {
        "rival": "rival", "ours, everything on the host": "all on the host", "ours, everything on the GPU": "resident"
    }  # fmt: skip
    for name, system in shown.items():
        cells = (found[system, tokens << 10] for tokens in (32, 64, 128))
        yield "README.md", f"| {name} | " + " | ".join(f"{c['seconds']:#.3g} s, {c['peak_gib']:.1f} GiB" for c in cells)
    ratios = [found["all on the host", n << 10]["seconds"] / found["resident", n << 10]["seconds"] for n in (64, 128)]
    yield "benchmarks/README.md", f"resident, 64 K; 128 K | {ratios[0]:.3f}; {ratios[1]:.3f} |"
    rival, ours = found["rival", 131072], found["all on the host", 131072]
    yield "benchmarks/README.md", f"own peak | {ours['seconds'] / rival['seconds']:.3f} |"
    share = ours["peak_gib"] / rival["peak_gib"]
    yield "benchmarks/README.md", f"at {share:.3f} of the rival's peak | {ours['seconds'] / rival['seconds']:.3f} |"
    grown = growth["all on the host", 262144]["peak_gib"] - growth["all on the host", 65536]["peak_gib"]
    yield "README.md", f"grows by {grown * GROWTH:.2f} MB per 10,000 tokens"
    yield "benchmarks/README.md", f"4 layers, MB for 10,000 tokens | {grown * GROWTH:.2f} |"
    pinned = growth["pages on the host, nothing kept", 65536]
    of_all = pinned["host_gib"] / pinned["pages_gib"]
    yield "benchmarks/README.md", f"| {of_all / (1 - 8192 / 65536):.3f} ({of_all:.3f} of all tokens'"
    kept = [steps(f"step_h200_2026-11-30_{name}") for name in ("kept_28", "kept")]
    saved = [k["resident", 131072]["seconds"] / k["resident, attention not kept", 131072]["seconds"] for k in kept]
    yield "benchmarks/README.md", f"(`_kept`) | {saved[0]:.3f}; {saved[1]:.3f} |"


def sparse_steps() -> Iterator[tuple[str, str]]:
    names = ("", "_growth", "_long", "_gpt_oss")
    plain, growth, long, gpt = (steps(f"sparse_step_h200_2026-11-30{name}") for name in names)
    rows = {
        "256 K tokens, the rival (dense)": long["rival-256k", 262144],
        "256 K, pages on the GPU, spread over the whole past": long["resident-256k", 262144],
        "512 K": long["512k", 524288],
        "1 M": long["1m", 1048576],
        "256 K, pages on the GPU, chosen as by a trained model": plain["resident-skewed-256k", 262144],
        "the same, 8 GiB of pages on the GPU, the others on the host": plain["host-skewed-256k", 262144],
        "GPT-OSS-20B's shapes, 64 K": gpt["gpt-oss-64k", 65536],
        "GPT-OSS-20B's shapes, 256 K": gpt["gpt-oss-256k", 262144],
    }
    for name, row in rows.items():
        host = f"{row['host_gib']:.0f} GiB" if row["host_gib"] else "–"
        yield "README.md", f"| {name} | {row['seconds']:.1f} | {row['peak_gib']:.0f} GiB | {host} |"

    def cell(row: dict[str, Any]) -> str:
        return f"{row['seconds']:.1f} ({row['peak_gib']:.0f}, {row['host_gib']:.0f})"

    yield "benchmarks/README.md", f"`_long` | {cell(rows['512 K'])}; {cell(rows['1 M'])} |"
    yield "benchmarks/README.md", f"`_gpt_oss` | {cell(gpt['gpt-oss-64k', 65536])}; {cell(gpt['gpt-oss-256k', 262144])}"
    faster = long["rival-256k", 262144]["seconds"] / long["resident-256k", 262144]["seconds"]
    yield "benchmarks/README.md", f"`_long`) | {faster:.2f} |"
    slower = plain["host-skewed-256k", 262144]["seconds"] / plain["resident-skewed-256k", 262144]["seconds"]
    yield "benchmarks/README.md", f"all resident | {slower:.3f} |"
    grown = (growth["growth-256k", 262144]["peak_gib"] - growth["growth-64k", 65536]["peak_gib"]) * GROWTH
    yield "README.md", f"sparse by {grown:.2f} MB"
    yield "benchmarks/README.md", f"10,000 tokens (`_growth`) | {grown:.2f} |"
    kernels = result("sparse_h200_2026-11-30_wide")["rows"]

    def three(length: str, key: str, digits: int) -> str:
        return ", ".join(f"{kernels[f'{length} {kind}'][key]:.{digits}f}" for kind in ("spread", "skewed", "scored"))

    yield "benchmarks/README.md", f"scored lists) | {three('256K', 'cuDNN / ours', 1)} |"
    yield "benchmarks/README.md", f"the same, 1 M | {three('1M', 'cuDNN / ours', 1)} |"
    speedups = {"256K": "{:.1f} to {:.1f} times faster than dense cuDNN", "1M": "{:.0f} to {:.0f} times at 1 M"}
    for length, said in speedups.items():
        times = sorted(kernels[f"{length} {kind}"]["cuDNN / ours"] for kind in ("spread", "skewed", "scored"))
        yield "README.md", said.format(times[0], times[-1])
    for way in ("fwd", "bwd"):
        cells = "; ".join(three(length, f"{way} / dense Triton", 2) for length in ("256K", "1M"))
        yield "benchmarks/README.md", f"| {cells} |"


def plans() -> Iterator[tuple[str, str]]:
    found = result("plan_h200_2026-11-30")["rows"]
    small = result("small_gpu_h200_2026-11-30")
    (sparse,) = (row for row in found if "sparse" in row["case"])
    (before,) = (row for row in result("short_steps_h200_2026-11-30")["rows"] if "sparse" in row["case"])
    seconds = (before["measured_seconds"], sparse["measured_seconds"])
    yield "README.md", "takes {:.1f} to {:.1f} s (`short_steps".format(*seconds)
    yield "benchmarks/README.md", "| {:.1f}; {:.1f} | ≤ 22".format(*seconds)
    foretold = [(row["seconds_ratio"], row["peak_ratio"]) for row in found]
    foretold.append((small["predicted_seconds"] / small["seconds"], small["predicted_peak"] / small["peak"]))
    table = re.findall(r"\| (\d\.\d\d) \| (\d\.\d{3}) \|", text("benchmarks/README.md").split("| foretold")[1])
    assert table == [(f"{s:.2f}", f"{p:.3f}") for s, p in foretold]
    for machine, count, peak, time in (("h200", 7, 0.05, 0.10), ("cpu", 3, 0.02, 0.20)):
        rows = result(f"plan_{machine}_2026-11-30")["rows"]
        assert len(rows) == count
        assert max(abs(row["peak_ratio"] - 1) for row in rows) <= peak
        assert max(abs(row["seconds_ratio"] - 1) for row in rows) <= time
    yield "README.md", "`oomb plan` foretold seven steps"
    yield "README.md", "peaks within 5 %, seconds within 10 % (`plan_h200_2026-11-30.json`)"
    yield "README.md", "three on a CPU within 2 % and 20 % (`plan_cpu_2026-11-30.json`)"
    took = f"took {small['seconds']:.0f} s and {small['peak'] / GIB:.1f} GiB, beside"
    host = sum(small["host_bytes"].values()) / GIB
    told = f"{small['predicted_seconds']:.0f} s and {small['predicted_peak'] / GIB:.1f} GiB"
    yield "README.md", f"{took} {host:.0f} GiB on the host; foretold were {told}"
    step = result("optimizer_step_h200_2026-11-30")["steps"][-1]
    yield "README.md", f"takes {step['seconds']:.1f} s and {step['peak_bytes'] / GIB:.1f} GiB"


def studies() -> Iterator[tuple[str, str]]:
    real = result("smollm2_h200_2026-11-30")
    told = {name.replace("before, ", "").replace(" tokens", ""): value for name, value in real["perplexity"].items()}
    for row, key in (
        ("as it comes", "as it is"), ("with the rotary setting, not trained", "rotary setting only"),
        ("trained", "after"),
    ):  # fmt: skip
        cells = (told[f"{key}, {tokens}"] for tokens in ("4,096", "32,768"))
        yield "docs/quickstart.md", f"| {row} | " + " | ".join(f"{c:.2f}" if c < 100 else f"{c:.0f}" for c in cells)
    yield "docs/quickstart.md", f"{real['held-out tokens']:,} held-out tokens"
    sparse = [told[f"after, 32,768{more}"] for more in ("", ", sparse, 64 pages", ", sparse, 16 pages")]
    words = "tokens is {:.3f} dense, {:.3f} with 64 pages chosen and {:.3f} with 16"
    yield "docs/choosing.md", words.format(*sparse)
    found = {
        (case["tokens"], row["rule"], row["pages"]): row
        for case in result("sparse_quality_h200_2026-11-30")["cases"] if case["page_tokens"] == 128
        for row in case["rows"]
    }  # fmt: skip
    short, long = found[16384, "mean", 64], found[32768, "mean", 64]
    words = "With 64 pages of 128 it is {:.2f} of its norm off at 16,384 tokens (cosine {:.2f})"
    yield "docs/choosing.md", words.format(short["error"], short["cosine"])
    yield "docs/choosing.md", f"and {long['error']:.2f} off at 32,768 ({long['cosine']:.2f})"
    yield "README.md", f"64 of 256 pages is {long['error']:.2f} of its norm off"
    last = [found[32768, rule, 32]["error"] for rule in ("recent", "mean", "minmax")]
    yield "docs/choosing.md", "({:.2f} with 32, where the mean has {:.2f} and bounds {:.2f};".format(*last)
    recall = result("recall_cpu_2026-11-29")["recall"]
    own = [100 * recall[kind][kind] for kind in ("sparse, minmax", "sparse, mean", "dense")]
    yield "README.md", "recalled {:.0f} %, by mean keys {:.0f} %, dense {:.0f} %".format(*own)
    yield "docs/choosing.md", f"Trained sparse by bounds it recalls {own[0]:.0f} %, by the mean {own[1]:.0f} %"
    others = [100 * recall["dense"][kind] for kind in ("sparse, minmax", "sparse, mean")]
    yield "docs/choosing.md", f"all pairs when it generates dense, {others[0]:.0f} % when pages are chosen by bounds"
    yield "docs/choosing.md", f"and {others[1]:.0f} % by their mean key"


def kernels() -> Iterator[tuple[str, str]]:
    rows = result("attention_h200_2026-11-30_guards")["rows"]
    before, bursts = (result(f"attention_h200_2026-11-30_{name}")["rows"] for name in ("turns", "bursts"))
    base, narrow = "4K x 64K D128 28/4 P128", "4K x 64K D64 64/8 P128 window 128 sinks"

    def ratio(rows: dict[str, Any], name: str, pair: str) -> tuple[str, str]:
        return tuple(f"{rows[name]['ratios'][pair][way]:.2f}" for way in ("fwd", "bwd"))  # type: ignore[return-value]

    for said, name, pair in (
        ("| 0.80, 0.79 | 0.90, 0.88 |", base, "triton / whole"),
        ("| 0.95 | 0.98 |", base, "cudnn / whole"),
        ("chunks of 2,048 | 0.90 | 0.95 |", base.replace("4K", "2K", 1), "cudnn / whole"),
        ("chunks of 1,024 | 0.80 | 0.90 |", base.replace("4K", "1K", 1), "cudnn / whole"),
        ("Triton / FlexAttention | 1.0 | 1.1 |", base, "triton / flex"),
        ("slots shuffled / in order | 0.97 | 1.0 |", base + " shuffled", "triton / in order"),
        ("our dense kernel's | 0.6 | 0.8 |", narrow, "triton / dense"),
    ):
        yield "benchmarks/README.md", said + " {} | {} |".format(*ratio(rows, name, pair))
    for said, name in (
        ("chunks of 1,024", base.replace("4K", "1K", 1)), ("of 16,384", base.replace("4K", "16K", 1)),
        ("over 256 K", base.replace("64K", "256K")), ("pages of 64", base.replace("P128", "P64")),
        ("head dim 64", base.replace("D128", "D64")), ("80", base.replace("D128", "D80")),
        ("96", base.replace("D128", "D96")), ("192", "4K x 64K D192 14/2 P128"), ("256", "4K x 64K D256 14/2 P128"),
    ):  # fmt: skip
        yield "benchmarks/README.md", "{} {} and {}".format(said, *ratio(rows, name, "triton / whole"))
    assert len(rows) == 15
    old = ratio(before, base, "triton / whole")
    yield "benchmarks/README.md", "{} and {} before".format(*old)
    once = ratio(bursts, base, "triton / whole")
    yield "benchmarks/README.md", "{} and {} of those".format(*once)
    yield "benchmarks/README.md", "{} and {} of a slower dense kernel".format(*ratio(before, narrow, "triton / dense"))
    cells = (f"{rows[base]['triton'][way] / rows[base]['matmul'][way]:.2f}" for way in ("fwd", "bwd"))
    yield "benchmarks/README.md", "{} and {} of what a matrix product does".format(*cells)


@pytest.mark.parametrize(
    "claims", [kernels, dense_steps, sparse_steps, plans, studies], ids=lambda claims: claims.__name__
)
def test_what_is_said_is_what_was_measured(claims):
    missing = [(page, said) for page, said in claims() if said not in text(page)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_files_of_results_that_are_named_are_there(page):
    for name in re.findall(r"[a-z0-9_]+_(?:h200|cpu)_20\d\d-\d\d-\d\d[\w*]*\.(?:jsonl?|txt)", text(page)):
        assert list(RESULTS.glob(name)), name


def test_commands_of_the_benchmarks_name_scripts_and_options_that_are_there():
    rows = [row.split("|") for row in (ROOT / "benchmarks/README.md").read_text(encoding="utf-8").splitlines()]
    named = [row[2] for row in rows if len(row) > 2 and re.search(r"python |bash ", row[2])]
    scripts = set()
    for command in named:
        for script in re.findall(r"benchmarks[./](\w+)", command.replace(".py", "").replace(".sh", "")):
            (path,) = (ROOT / "benchmarks").glob(f"{script}.*")
            source = path.read_text(encoding="utf-8")
            scripts.add(script)
            for option in re.findall(r"(?<= )--(?!tool)[\w-]+", command):
                assert f'"{option}"' in source, (script, option)
    assert len(scripts) >= 17
