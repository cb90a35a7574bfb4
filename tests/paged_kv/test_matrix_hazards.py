"""The reader of hazards finds them, and only them, in a program as nvdisasm prints it."""

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
BACK = ["@P1 BRA `(.L_x_3)", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "FADD R9, R24, R10", "EXIT"]


def printed(lines, tail=BACK):
    code = ["FADD R220, R24, R25", *lines, *tail]
    places = [f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(code)]
    return "\n".join([places[0], ".L_x_3:", *places[1:]])


def test_a_loop_that_waits_has_none():
    assert hazards(printed(LOOP)) == []


@pytest.mark.parametrize(
    ("early", "place"),
    [
        ("FFMA R221, R184, R18.reuse, -R5.reuse", 7),  # writes the left operand behind the product …
        ("@!P0 FMNMX R223, R22, R5, !PT", 0),  # … or in the loop's next turn
        ("LDS.128 R220, [R245+0x18000]", 7),
        ("LDSM.16.M88.4 R218, [R245]", 7),
        ("CS2R R222, SRZ", 7),
        ("SHFL.BFLY PT, R221, R9, 0x1, 0x1f", 7),  # a predicate comes before what it writes
        ("LOP3.LUT P0, R222, R9, 0x1, RZ, 0xc0, !PT", 7),
        ("FMUL R40, R40, R10", 7),  # changes a sum that is being added to
        ("FADD R9, R80, R10", 7),  # reads one too early
        ("STS.128 [R7], R20", 0),  # R20 to R23 are not in use …
        ("STS.128 [R7], R84", 7),  # … R84 to R87 are
        ("HGMMA.64x64x16.F32.BF16 R184, R24, gdesc[UR8], R184", 7),  # sums as an operand before they are there
    ],
)
def test_what_comes_before_the_wait_is_found(early, place):
    found = hazards(printed([*LOOP[:place], early, *LOOP[place:]]))
    assert [early in x for x in found] == [True] * ("R20" not in early.split()[-1])


def test_behind_a_loop_the_sums_are_waited_for_too():
    read = "FADD R9, R30, R10"
    assert len(hazards(printed(LOOP, [BACK[0], read, *BACK[1:]]))) == 1
    assert hazards(printed(LOOP, [*BACK[:2], read, *BACK[2:]])) == []


def test_a_wait_for_all_but_the_last_is_none_for_the_last():
    part = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "F2FP.BF16.F32.PACK_AB R220, R9, R10"]
    assert len(hazards(printed([*LOOP, *part]))) == 1
    another = "HGMMA.64x64x16.F32.BF16 R184, gdesc[UR16], RZ, !UPT, gsb0"
    assert hazards(printed([*LOOP, another, *part])) == []


def test_a_loop_with_two_ways_back():
    early = "FFMA R221, R184, R18, -R5"
    way = ["@P0 BRA `(.L_x_3)", early]
    assert len(hazards(printed([*LOOP, *way]))) == 1


def test_what_is_harmless_is_not_found():
    harmless = ["FADD R9, R220, R10", "LDS.128 R216, [R220]", "STS [R3], R9", "ISETP.NE.AND P1, PT, R9, RZ, PT"]
    assert hazards(printed([*LOOP, *harmless])) == []


def test_a_product_of_an_unknown_form_is_said():
    with pytest.raises(ValueError, match="not known"):
        hazards(printed([*LOOP, "HGMMA.SP.64x64x32.F32.BF16 R184, gdesc[UR16], RZ"]))
