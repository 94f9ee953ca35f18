"""Suites and tables of grouped products. No GPU needed."""

import pytest

from experiments.harness import (
  ragged_cases,
  ragged_tables,
  rows,
)
from experiments.harness import run as run_lib
from tests.support import result_rows

# Suites.


def test_sizes_are_a_curve_over_rows_a_group():
  cases = ragged_cases.suite("sizes")
  assert len(cases) == 11 * 3 * 3 == len(set(cases))
  for pass_ in ("forward", "dx", "dw"):
    for how in ("even", "random", "zipf"):
      found = [x for x in cases if (x.pass_, x.sizes) == (pass_, how)]
      assert [x.m // x.groups for x in found] == [
          8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024,
      ]  # fmt: skip
      assert all(x.m % x.groups == 0 for x in found)
  for case in cases:
    assert 2 * case.groups * case.k * case.n > 500e6  # bytes of weights
    assert case.flops(0) < 1.5e-3 * 800e12
  # Distributions share what is compiled.
  assert len({case.program for case in cases}) == 11 * 3
  # Groups of one size come first, so that the others have what to refer to.
  assert cases[0].sizes == "even"
  special = {"sizes", "odd", "experts"}
  assert not special & {x.suite for x in ragged_cases.suite("all")}


def test_odd_sizes_stand_beside_the_next_multiple_of_64():
  found = {(x.m, x.n, x.k, x.groups) for x in ragged_cases.suite("odd")}
  assert found == {
    (8191, 1400, 4096, 60),
    (8191, 1407, 4096, 60),
    (8191, 1408, 4096, 60),
    (8192, 4096, 1407, 60),
    (8192, 4096, 1408, 60),
    (8192, 4100, 4096, 16),
    (8192, 4160, 4096, 16),
  }
  passes = [x.pass_ for x in ragged_cases.suite("odd")]
  assert sorted(passes) == sorted(["forward", "dx", "dw"] * len(found))


# Tables.


def test_summary_gives_means_of_each_suite_and_pass():
  found = [
    result_rows.ragged(0.5),
    result_rows.ragged(2.0, group_sizes="zipf"),
    result_rows.ragged(None, group_sizes="odd", passed=False),
    result_rows.ragged(4.0, suite="qwen", **{"pass": "dx"}),
  ]
  found[1] |= {"tflops": 400.0, "copy_gbytes_per_s": 1e6}
  for row in found:
    rows.validate(row)
  assert rows.latest(found) == found
  header, cells = ragged_tables.summary(found)
  assert header == [
      "suite", "pass", "cases", "TFLOP/s", "share", "x jnp.dot", "worst",
      "worst case", "failed",
  ]  # fmt: skip
  assert cells == [
    ["mixtral", "forward", "3", "28.3", "50%", "1.000x", "0.500x",
     "48x40x24 in 8 zipf, forward", "1"],
    ["qwen", "dx", "1", "0.25", "-", "0.250x", "0.250x",
     "48x40x24 in 8 even, dx", "0"],
  ]  # fmt: skip


def test_share_by_hand():
  case = ragged_cases.Case(suite="test", m=64, n=256, k=128, groups=2)
  # Of two even groups: 2 * 64 * 128 * 256 FLOP at 800e12 a second take 5.24 ns;
  # 2 * (2 * 128 * 256 + 64 * (128 + 256)) bytes at 4e12 a second 45.1 ns.
  flops, least = case.flops(0), case.least_bytes(0)
  assert (flops, least) == (4194304, 180224)
  ms = 90.112e-6
  row = result_rows.ragged(ms, tflops=flops / ms / 1e9)
  row |= {"gbytes_per_s": least / ms / 1e6, "copy_gbytes_per_s": 4000.0}
  assert ragged_tables.share(row) == pytest.approx(0.5)
  assert "share 50%" in ragged_tables.measured_parts(
    row | {"implementation": "sm90"}
  )
  # With a memory of 100 times the rate the FLOP take longer.
  row["copy_gbytes_per_s"] *= 100
  assert ragged_tables.share(row) == pytest.approx(5.24288 / 90.112)
  del row["copy_gbytes_per_s"]
  assert ragged_tables.share(row) is None
  assert (
    ragged_tables.share(result_rows.ragged(None, gbytes_per_s=None)) is None
  )


def test_losses_to_a_peer_are_counted():
  times = (("even", 3.0), ("zipf", 0.75), ("random", None))
  found = [result_rows.ragged(1.0, group_sizes=how) for how, _ in times]
  for row, (_, ms) in zip(found, times):
    row["arms"] |= {"lax.ragged_dot": {"ms_median": 12.0}}
    if ms:
      row["arms"] |= {"tokamax mosaic": {"ms_median": ms}}
  found.append(result_rows.ragged(1.0, suite="qwen"))  # no peer ran there
  header, cells = ragged_tables.against(found)
  assert header == [
      "suite", "beside", "cases", "slower", "geomean", "worst", "worst case",
  ]  # fmt: skip
  assert cells == [
    ["mixtral", "`lax.ragged_dot`", "3", "0", "12.0x", "12.0x",
     "48x40x24 in 8 even, forward"],
    ["mixtral", "`tokamax mosaic`", "2", "1", "1.500x", "0.750x",
     "48x40x24 in 8 zipf, forward"],
  ]  # fmt: skip
  assert "| mixtral | `tokamax mosaic` | 2 | 1 |" in ragged_tables.markdown(
    found
  )


def test_the_page_says_which_tokamax_it_was():
  config = {"tokamax": "0.1", "triton": "3.6", "patched": "Triton patched"}
  found = [result_rows.ragged(1.0), result_rows.ragged(2.0)]
  for row in found:
    row["arms"]["tokamax triton"] = {"ms_median": 2.0, "config": config}
  found[0]["arms"]["tokamax mosaic tuned"] = {
    "ms_median": 2.0,
    "config": {"tokamax": "0.1", "tuned": {"tried": 3}},
  }
  assert (
    " `tokamax triton`: version 0.1, Triton 3.6, Triton patched, not"
    " tuned. `tokamax mosaic tuned`: version 0.1, by its own tuner.\n"
  ) in ragged_tables.markdown(found) + "\n"


def test_the_page_has_the_share_over_rows_a_group():
  text = ragged_tables.markdown(result_rows.sizes()[::-1])
  lines = text.splitlines()
  at = next(i for i, x in enumerate(lines) if x.startswith("| rows a group"))
  columns = [
    f"{pass_} {how}"
    for pass_ in ("forward", "dx", "dw")
    for how in ("zipf", "even")
  ]
  assert lines[at] == f"| rows a group | {' | '.join(columns)} |"
  assert lines[at + 1] == f"|{' --: |' * 7}"
  assert lines[at + 2 : at + 5] == [
    f"| {a_group} |{f' {share} |' * 6}"
    for a_group, share in ((8, "10%"), (96, "20%"), (1024, "30%"))
  ]
  assert "Share, of 4096 x 2048 in 32 groups" in text


# Arms.


def test_peers_are_left_out():
  case = ragged_cases.Case(suite="test", m=12, n=16, k=8, groups=3)
  name = ragged_cases.LAX
  for peers, expected in ((None, True), ((name,), True), ((), False)):
    (found,) = run_lib.prepare([case], peers=peers)
    try:
      is_there = bool(found.arms[name][0].fn())
    except NotImplementedError as error:
      assert "--beside" in str(error)
      is_there = False
    assert is_there == expected
