"""What a chip's program does to registers that a matrix product is still using; read from the assembly of Hopper.

There, products run beside the instructions behind them and read their left operand from registers, if it is there,
until they are waited for. A loop whose order lets something else be computed meanwhile can be compiled so that those
registers are written too early: results are then wrong now and then, and only on some shapes.
"""

from __future__ import annotations

import re

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S+ R(\d+), (?:R(\d+)|gdesc)")
_WIDTH = {"64": 2, "128": 4, "WIDE": 2}


def hazards(assembly: str) -> list[str]:
    """Pairs of a product and an instruction that comes too early, of each innermost loop with products.

    `assembly`: as nvdisasm prints it. An accumulator must be left alone, a left operand must not be written.
    """
    found = []
    for body in _loops(assembly):
        for i, line in enumerate(body):
            product = _PRODUCT.search(line)
            if not product:
                continue
            columns, total, left = product.groups()
            sums = set(range(int(total), int(total) + int(columns) // 2))
            operand = set(range(int(left), int(left) + 4)) if left else set()
            for other in body[i + 1 :] + body[:i]:  # once around
                if "WARPGROUP.DEPBAR" in other:
                    break
                if "HGMMA" in other:
                    continue
                written, read = _registers(other)
                if written & operand or (written | read) & sums:
                    found.append(f"{line} | {other}")
    return found


def _loops(assembly: str) -> list[list[str]]:
    lines: list[str] = []
    labels: dict[str, int] = {}
    for text in assembly.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", text):
            labels[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text):
            lines.append(code[1].strip())
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"BRA.*?(L_x_\d+)", line)
        start = labels.get(target[1], end + 1) if target else end + 1
        if start <= end and any("HGMMA" in x for x in lines[start:end]):
            loops.append((start, end))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [lines[start : end + 1] for start, end in inner]


def _registers(line: str) -> tuple[set[int], set[int]]:
    """Those that an instruction writes and those that it reads."""
    code, _, operands = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
    first, *rest = operands.split(", ")
    stores = code.startswith(("ST", "RED", "BAR", "BRA", "UTMA", "SYNCS", "WARPGROUP"))
    target = None if stores else re.fullmatch(r"R(\d+)(?:\.\w+)*", first.strip())
    wide = next((_WIDTH[x] for x in code.split(".")[1:] if x in _WIDTH), 2 if code.startswith("CS2R") else 1)
    written = set(range(int(target[1]), int(target[1]) + wide)) if target else set()
    reads = rest if target else [first, *rest]
    return written, {int(n) for x in reads for n in re.findall(r"\bR(\d+)", x)}
