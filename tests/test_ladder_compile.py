"""Tier C: default configs as machine code, compiled without a GPU.

No spills, no serialised wgmma, and the instructions that the pages claim.
"""

import re

import pytest

from experiments import targets
from experiments.harness import compiled as compiled_lib
from experiments.harness import rows
from pallas_gemm import hardware
from pallas_gemm.ladder import LADDER, contract, with_variants

pytestmark = pytest.mark.aot

SIZE = 4096
TUNED = [rung for rung in with_variants() if rung.number >= 6]


def _compile(rung, dtype=None, beta=0.0):
  dtype = dtype or rung.dtypes[0]
  problem = contract.Gemm(SIZE, SIZE, SIZE, dtype, beta=beta)
  return compiled_lib.compile_rung(rung, problem)


# What each page claims. Global references are generic pointers in Mosaic GPU:
# a load from global memory is LD, not LDG.
CLAIMS = {
  "1": [r"FFMA", r"LD\.E"],
  "2": [r"FFMA", r"LD\.E"],
  "3": [r"FFMA", r"SYNCS\S*ARRIVE\S*"],
  "4": [r"FFMA", r"SYNCS\S*ARRIVE\S*"],
  "5": [r"FFMA", r"LDSM\S*", r"LDS", r"BAR\.SYNC\S*"],
  "6": [r"FFMA", r"LDG?\.E\.128\S*", r"LDS\.128", r"STS\.128", r"STG?\.E\.128"],
  "7": [r"FFMA", r"LDG?\.E\.128\S*", r"LDS\.128", r"STSM\S*"],
  "8": [r"FFMA", r"UTMALDG\S*", r"UTMASTG\S*", r"LDS\.128", r"STSM\S*"],
  "8a": [r"FFMA", r"LDG?\.E\.128\S*", r"LDS\.128", r"STSM\S*"],
  "9": [r"HGMMA\S*", r"UTMALDG\S*"],
  "9a": [r"HMMA\.16816\S*", r"LDG?\.E\.128\S*", r"LDSM\S*"],
  "9b": [r"HGMMA\S*", r"UTMALDG\S*"],
  "9c": [r"HMMA\.16816\S*", r"LDGSTS\.E\.BYPASS\S*\.128\S*", r"LDSM\S*"],
  "10": [r"HGMMA\S*", r"UTMALDG\S*", r"USETMAXREG\S*"],
  "10a": [r"HGMMA\S*", r"UTMALDG\S*", r"USETMAXREG\S*"],
  "11": [r"HGMMA\S*", r"UTMALDG\S*", r"UTMASTG\S*", r"USETMAXREG\S*"],
  "11a": [r"HGMMA\S*", r"UTMALDG\S*", r"UTMASTG\S*", r"USETMAXREG\S*"],
  "12": [r"HGMMA\S*", r"UTMALDG\S*MULTICAST\S*", r"UTMASTG\S*"],
  "13": [r"UTCHMMA\S*", r"LDTM\S*", r"UTMALDG\S*", r"UTMASTG\S*"],
}
# Instructions in the whole kernel: of these rungs the page's idea is a count.
# A's loads of 128 bits are easily taken apart into words by LLVM.
COUNTS = {
  "5": {"FFMA": 64, r"LD\.E": 12, r"LDS": 8, r"LDSM\S*": 2},
  "6": {"FFMA": 16 * 64, r"LD\.E\.128\S*": 6, r"LDS\.128": 16 * 4},
  "7": {"FFMA": 8 * 128, r"LD\.E\.128\S*": 4, r"LDS\.128": 8 * 6},
  "8a": {"FFMA": 8 * 128, r"LD\.E\.128\S*": 8, r"LDS\.128": 8 * 6},
  "9a": {r"HMMA\S*": 64, r"LD\.E\.128\S*": 8, r"LDSM\S*": 16},
  # Two slabs of 8 copies a thread before the loop, one in it.
  "9c": {r"HMMA\S*": 64, r"LDGSTS\S*": 3 * 8, r"LDSM\S*": 16},
}


def _claims(rung):
  assert rung.label in CLAIMS, f"no claims for {rung.label}: add them to CLAIMS"
  return CLAIMS[rung.label]


# Each kernel is compiled by one test, whichever process that runs in.
@pytest.mark.parametrize("rung", with_variants(), ids=lambda r: r.name)
def test_default_config(rung):
  for dtype in rung.dtypes:
    compiled = _compile(rung, dtype)
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.warnings == ()
  compiled = _compile(rung)
  for instruction in _claims(rung):
    assert compiled.has(instruction), instruction
  for instruction, count in COUNTS.get(rung.label, {}).items():
    found = re.findall(rf"\s{instruction}\s", compiled.sass)
    assert len(found) == count, (instruction, len(found))
  # Exact fp32: no TF32 behind the user's back.
  if rung in LADDER[:8]:
    assert not re.search(r"\b[HQ]G?MMA\S*", compiled.sass)
  if rung.label == "8":
    _assert_nearly_all_ffma(compiled.sass)


def _assert_nearly_all_ffma(sass: str) -> None:
  """The page's count of the main loop: 2,048 FFMA and 96 LDS.128."""
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


@pytest.mark.parametrize("rung", TUNED, ids=lambda r: r.name)
def test_nothing_spills_with_c(rung):
  compiled = _compile(rung, beta=1.0)
  assert compiled.spill_bytes == 0
  assert compiled.warnings == ()


# Of the cells of the matrix those that a plain run compiles.
SAMPLE = {
  *(("80", label) for label in "1 2 3 4 5 6 7 8a 9a 9c".split()),
  *(("75", "3"), ("75", "7"), ("86", "9c"), ("89", "8a"), ("100a", "13")),
  *(("103a", "8"), ("120a", "8"), ("121a", "4")),
}
# What Hopper's instructions are called, or become, before it.
BEFORE = {r"STSM\S*": r"STS\S*", r"SYNCS\S*ARRIVE\S*": r"BAR\.SYNC\S*"}
ON_TURING = {
  r"LD\.E": r"LD\.E\.SYS",
  r"LDS": r"LDS\S*",
  r"LDS\.128": r"LDS\.U\.128",
  r"STG?\.E\.128": r"ST\.E\.128\S*",
}


def _cells():
  for target in targets.TARGETS:
    for rung in targets.every_rung():
      cell = target, rung.label
      plain = () if cell in SAMPLE else pytest.mark.targets
      yield pytest.param(rung, target, marks=plain, id="-".join(cell))


@pytest.mark.parametrize(("rung", "target"), [*_cells()])
def test_on_every_target(rung, target):
  """Refused before anything is lowered, or as its page says, and clean."""
  gpu = hardware.lookup(targets.TARGETS[target])
  if reason := targets.why_not(rung, target):
    assert rung.lacks(gpu) == reason
    return
  found = targets.kernel(rung, target)
  assert found.spill_bytes == found.stack_bytes == 0
  assert found.warnings == ()
  assert re.findall(r"\t\.target\tsm_(\w+)", found.sass) == [target]
  renamed = BEFORE if gpu.compute_capability < (9, 0) else {}
  if gpu.compute_capability < (8, 0):
    renamed = renamed | ON_TURING
  for instruction in _claims(rung):
    assert found.has(renamed.get(instruction, instruction)), instruction


def test_the_rows_of_all_targets_are_clean():
  """And there are some of the oldest JAX and of a newer one."""
  found = rows.read(rows.RESULTS / targets.FILE)
  versions = sorted({row["jax"] for row in found})
  assert versions[0] == "0.11.2" and len(versions) > 1
  cells = [(x, rung) for x in targets.TARGETS for rung in targets.every_rung()]
  for version in versions:
    of = [row for row in found if row["jax"] == version]
    have = [(row["target"], row["rung"]) for row in of]
    # Of an older JAX what there was then.
    of_then = [x for x in cells if (x[0], x[1].label) in have]
    want = cells if version == versions[-1] else of_then
    labels = [(target, rung.label) for target, rung in want]
    missing = {x[1]: None for x in labels if x not in have}
    command = f"python -m experiments.targets --kernels={','.join(missing)}"
    assert have == labels, command
    for row, (target, rung) in zip(of, want):
      lacks = rung.lacks(hardware.lookup(targets.TARGETS[target])) or ""
      refused = row.get("refused", "")
      # Which rungs run there is said as of then.
      assert "JAX 0.12" in refused or (
        refused.split("; rungs")[0] == lacks.split("; rungs")[0]
      )
      assert "refused" in row or targets.is_clean(row)
