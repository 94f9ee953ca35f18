"""Tier C: default configs as machine code, compiled without a GPU.

No spills, no serialised wgmma, and the instructions that the pages claim.
"""

import re

import pytest

from pallas_gemm.ladder import LADDER
from tests.support import aot

pytestmark = pytest.mark.aot

SIZE = 4096
TUNED = [rung for rung in LADDER if rung.number >= 6]


def _compile(rung, dtype=None, **options):
  return aot.compile_rung(
    rung.number, SIZE, SIZE, SIZE, dtype or rung.dtypes[0], **options
  )


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
def test_nothing_spills(rung):
  for dtype in rung.dtypes:
    compiled = _compile(rung, dtype)
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    assert compiled.warnings == ()


@pytest.mark.parametrize("rung", TUNED, ids=lambda r: r.name)
def test_nothing_spills_with_c(rung):
  compiled = _compile(rung, beta=1.0)
  assert compiled.spill_bytes == 0
  assert compiled.warnings == ()


# What each page claims. Global references are generic pointers in Mosaic GPU:
# a load from global memory is LD, not LDG.
CLAIMS = {
  1: [r"FFMA", r"LD\.E"],
  2: [r"FFMA", r"LD\.E"],
  3: [r"FFMA", r"SYNCS\S*ARRIVE\S*"],
  4: [r"FFMA", r"SYNCS\S*ARRIVE\S*"],
  5: [r"FFMA", r"LDSM\S*", r"LDS", r"BAR\.SYNC\S*"],
  6: [r"FFMA", r"LDG?\.E\.128\S*", r"LDS\.128", r"STS\.128", r"STG?\.E\.128"],
  7: [r"FFMA", r"LDG?\.E\.128\S*", r"LDS\.128", r"STSM\S*"],
  8: [r"FFMA", r"UTMALDG\S*", r"UTMASTG\S*", r"LDS\.128", r"STSM\S*"],
  9: [r"HGMMA\S*", r"UTMALDG\S*"],
  10: [r"HGMMA\S*", r"UTMALDG\S*", r"USETMAXREG\S*"],
  11: [r"HGMMA\S*", r"UTMALDG\S*", r"UTMASTG\S*", r"USETMAXREG\S*"],
  12: [r"HGMMA\S*", r"UTMALDG\S*MULTICAST\S*", r"UTMASTG\S*"],
}


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
def test_claimed_instructions(rung):
  compiled = _compile(rung)
  for instruction in CLAIMS[rung.number]:
    assert compiled.has(instruction), instruction


@pytest.mark.parametrize("rung", LADDER[:8], ids=lambda r: r.name)
def test_fp32_rungs_use_no_tensor_core(rung):
  """Exact fp32: no TF32 behind the user's back."""
  assert not re.search(r"\b[HQ]G?MMA\S*", _compile(rung).sass)


def test_rung_8_is_nearly_all_ffma():
  """The page's count of the main loop: 2,048 FFMA and 96 LDS.128."""
  sass = _compile(LADDER[7]).sass
  found = [
    line
    for line in (x.strip() for x in sass.splitlines())
    if re.search(r"\b(FFMA|LDS\.128)\b", line)
  ]
  ffma = sum("FFMA" in line for line in found)
  # The loop, and the last slab after it.
  assert ffma == 2 * 2048
  # 96 a slab; the first fragments, ahead of the loop; the loader's few.
  assert 2 * 96 <= len(found) - ffma <= 2 * 96 + 16
