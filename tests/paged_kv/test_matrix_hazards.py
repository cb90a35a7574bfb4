"""The reader of hazards finds them, and only them, in a loop as nvdisasm prints it."""

import pytest
from tests.paged_kv.matrix_hazards import hazards

LOOP = [
    "HGMMA.64x64x16.F32.BF16 R184, gdesc[UR16], RZ, !UPT, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "MUFU.EX2 R216, R184",
    "F2FP.BF16.F32.PACK_AB R220, R217, R216",
    "FMUL R24, R24, R10",
    "HGMMA.64x128x16.F32.BF16 R24, R220, gdesc[UR8].tnspB, R24, gsb0",
    "UTMALDG.4D [UR24], [UR6]",
]


def printed(lines, tail=()):
    code = ["FADD R220, R24, R25", *lines, *tail]
    places = [f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(code)]
    return "\n".join([places[0], ".L_x_3:", *places[1:]])


def test_a_loop_that_waits_has_none():
    assert hazards(printed(LOOP, ["@P1 BRA `(.L_x_3)"])) == []


@pytest.mark.parametrize(
    ("early", "place"),
    [
        ("FFMA R221, R184, R18.reuse, -R5.reuse", 6),  # writes the left operand behind the product …
        ("@!P0 FMNMX R223, R22, R5, !PT", 0),  # … or in the loop's next turn
        ("LDS.128 R220, [R245+0x18000]", 6),
        ("CS2R R222, SRZ", 6),
        ("FMUL R40, R40, R10", 6),  # changes a sum that is being added to
        ("FADD R9, R80, R10", 6),  # reads one too early
        ("STS.128 [R7], R24", 6),
    ],
)
def test_what_comes_before_the_wait_is_found(early, place):
    lines = [*LOOP[:place], early, *LOOP[place:]]
    assert [early in x for x in hazards(printed(lines, ["@P1 BRA `(.L_x_3)"]))] == [True]


def test_what_is_harmless_is_not_found():
    harmless = ["FADD R9, R220, R10", "LDS.128 R216, [R220]", "STS [R3], R9"]
    assert hazards(printed([*LOOP, *harmless], ["@P1 BRA `(.L_x_3)"])) == []
    assert hazards(printed([*LOOP, "FMUL R24, R24, R9"])) == []  # no loop: what is behind it is not looked at
