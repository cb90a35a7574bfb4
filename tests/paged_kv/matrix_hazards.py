"""What a chip's program does to registers that a matrix product is still using; read from the assembly of Hopper.

There, products run beside the instructions behind them and read their left operand from registers, if it is there,
until they are waited for. A loop whose order lets something else be computed meanwhile can be compiled so that those
registers are written too early: results are then wrong now and then, and only on some shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\S+ R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")
_STORES = ("ST", "RED", "BAR", "BRA", "BSSY", "BSYNC", "UTMA", "SYNCS", "WARP", "LDGSTS", "MEMBAR", "R2UR", "VOTE")
_WIDTHS = {"64": 2, "128": 4, "WIDE": 2}
_MOST_GROUPS = 8  # of products that are counted apart


def hazards(assembly: str) -> list[str]:
    """Pairs of a product and an instruction that comes too early, on any way through the program.

    A sum that is being added to must be left alone, a left operand must not be written.
    `assembly`: as nvdisasm prints it. Raises: ValueError for a product whose form is not known here.
    """
    lines, nexts = _program(assembly)
    products = {i: _Product.of(line) for i, line in enumerate(lines) if "HGMMA" in line}
    return [
        f"{lines[i]} | {lines[j]}"
        for i, product in products.items()
        for j in _too_early(i, product, lines, nexts, products)
    ]


@dataclass(frozen=True)
class _Product:
    sums: frozenset[int]
    left: frozenset[int]

    @staticmethod
    def of(line: str) -> _Product:
        form = _PRODUCT.search(line)
        if form is None:
            raise ValueError(f"a matrix product of a form that is not known: {line}")
        columns, first, left = form.groups()
        sums = range(int(first), int(first) + int(columns) // 2)
        return _Product(frozenset(sums), frozenset(range(int(left), int(left) + 4)) if left else frozenset())


def _too_early(
    start: int, product: _Product, lines: list[str], nexts: list[list[int]], products: dict[int, _Product]
) -> Iterator[int]:
    """Instructions that can follow before the product's group is waited for. `groups`: committed since, its own too."""
    seen: set[tuple[int, int]] = set()
    todo = [(i, int("gsb0" in lines[start])) for i in nexts[start]]
    told: set[int] = set()
    while todo:
        at, groups = todo.pop()
        if (at, groups) in seen:
            continue
        seen.add((at, groups))
        line = lines[at]
        if wait := _WAIT.search(line):
            if groups > int(wait[1], 16):
                continue
        elif at in products:  # in order with the others, it may add to the same sums, but not take them for its operand
            early = products[at].left & product.sums
            groups = min(groups + ("gsb0" in line), _MOST_GROUPS)
        else:
            written, read = _registers(line)
            early = (written & product.left) | ((written | read) & product.sums)
        if not wait and early and at not in told:
            told.add(at)
            yield at
        todo += [(i, groups) for i in nexts[at]]


def _program(assembly: str) -> tuple[list[str], list[list[int]]]:
    """The instructions, and which can come after each."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for text in assembly.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", text):
            labels[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text):
            lines.append(code[1].strip())
    nexts = []
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(L_x_\d+)", line)
        always = not line.startswith("@") and not re.search(r"\bBRA\S* !?U?P", line) and "BRA.DIV" not in line
        after = [labels[target[1]]] if target else []
        if not (always and (target or line.startswith("EXIT"))):
            after.append(i + 1)
        nexts.append([n for n in after if n < len(lines)])
    return lines, nexts


def _registers(line: str) -> tuple[set[int], set[int]]:
    """Those that an instruction writes and those that it reads."""
    code, _, text = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
    operands = [x.strip() for x in text.split(", ")]
    while operands and re.fullmatch(r"!?U?P\w+", operands[0]):  # predicates that it sets come first
        del operands[0]
    kinds = code.split(".")
    wide = next((_WIDTHS[x] for x in kinds[1:] if x in _WIDTHS), 2 if kinds[0] == "CS2R" else 1)
    if kinds[0] == "LDSM":
        wide = int(kinds[-1]) if kinds[-1].isdigit() else 1
    stores = code.startswith(_STORES)
    target = None if stores or not operands else re.fullmatch(r"R(\d+)(?:\.\w+)*", operands[0])
    written = set(range(int(target[1]), int(target[1]) + wide)) if target else set()
    read = {int(n) for x in (operands[1:] if target else operands) for n in re.findall(r"\bR(\d+)", x)}
    if stores and operands and (value := re.fullmatch(r"R(\d+)", operands[-1])):
        read |= set(range(int(value[1]), int(value[1]) + wide))
    return written, read
