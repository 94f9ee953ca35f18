"""The excerpts in docs/sass are what the compiler makes of the rungs."""

import re

import pytest

from docs.sass import extract
from pallas_gemm import ladder

RUNGS = ladder.with_variants()
SASS = """
\t.target\tsm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LD.E R2, desc[UR4][R8.64] ;
        /*0020*/                   LD.E.128 R4, desc[UR4][R10.64] ;
.L_x_1:
        /*0030*/                   LDS R3, [R9] ;
        /*0040*/                   FFMA R1, R2, R3, R1 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   EXIT ;
"""


def head(text):
  """[(count, opcode)] of an excerpt's loops, without the others."""
  rows = re.findall(r"(?m)^ *([\d,]+)  (\S+) +\S", text)
  return [
    (int(count.replace(",", "")), name)
    for count, name in rows
    if name != "others"
  ]


def test_every_rung_has_an_excerpt():
  found = {path.name for path in extract.HERE.glob("*.txt")}
  assert found == {extract.path(rung).name for rung in RUNGS}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.label)
def test_excerpts_are_short(rung):
  text = extract.path(rung).read_text()
  assert text.startswith(f"Rung {rung.label}, {rung.name}, {rung.dtypes[0]}:")
  parts = text.split("Loop of the producer")
  for part in parts:
    assert len(part.splitlines()) <= extract.LONGEST + 15
  assert max(map(len, text.splitlines())) <= 80


def test_loops_of_a_disassembly():
  inner, outer, forever = extract.loops(SASS)
  assert inner.opcodes == ("LDS", "FFMA", "BRA")
  assert len(outer.instructions) == 6
  assert forever.opcodes == ("BRA",)
  assert extract.main_loop(SASS) == inner
  assert extract.loader_loop(SASS) is None


def test_counts_are_of_the_whole_loop():
  _, outer, _ = extract.loops(SASS)
  assert [(n, name) for n, name, _ in extract.counted(outer)] == [
    (1, "FFMA"),
    (1, "LD.E"),
    (1, "LD.E.128"),
    (1, "LDS"),
    (2, "others"),
  ]


def test_a_long_loop_is_folded():
  body = ("S2R R0, SR_TID.X", *["FFMA R1, R2, R3, R1"] * 9, "IADD3 R4, R4, 1")
  body += ("LDS R3, [R9]", "LDS R5, [R9+4]", *["LDS.128 R4, [R8]"] * 30)
  loop = extract.Loop((*body, "@P0 BRA `(.L_x_1)"))
  assert extract.folded(loop, longest=12) == [
    "  ... 1 other",
    "FFMA R1, R2, R3, R1",
    "  ... 8 more FFMA, 1 other",
    "LDS R3, [R9]",
    "LDS R5, [R9+4]",
    "LDS.128 R4, [R8]",
    "  ... 29 more LDS.128",
    "@P0 BRA `(.L_x_1)",
  ]
  assert extract.folded(loop, longest=8)[-2:] == [
    "  ... 30 more instructions",
    "@P0 BRA `(.L_x_1)",
  ]
  assert extract.folded(loop, longest=99) == list(loop.instructions)


def test_rungs_1_and_2_are_the_same_instructions():
  """The page of rung 2 says so."""
  naive, coalesced = (extract.path(rung).read_text() for rung in RUNGS[:2])
  assert (
    re.findall(r"(?m)^(?:@\S+ )?[A-Z]\S+", naive)[1:]
    == (re.findall(r"(?m)^(?:@\S+ )?[A-Z]\S+", coalesced)[1:])
  )


# The committed files are of the newest JAX and its compiler.
@pytest.mark.aot
@pytest.mark.parametrize("label", ["2", "6", "10"])
def test_counts_are_what_the_compiler_gives(label):
  rung = ladder.find(label)
  committed = extract.path(rung).read_text()
  assert head(committed) == head(extract.excerpt(rung))
