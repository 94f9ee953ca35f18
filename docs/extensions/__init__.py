"""What the pages of this site are written with: numbers and code by reference.

No page holds a number that was measured, nor a copy of the code. Roles print
numbers from the rows in experiments/results and from the package's own models;
directives print tables, code, diffs and pictures. What is asked for and is not
there is an error of the build that says what is there.

Roles. 4096^3, the rung's own dtype and the H200 unless said; "h100" as the last
word is the other GPU. Units are printed with the number:

  {rung}`6 tflops`             39.7 TFLOP/s; also time, peak (of the unit used),
                               jnp (x jnp.dot), before, first, or a row's field
  {rung}`12 jnp 4096x8192x4096`
  {rung}`jnp.dot time`         a row that is no rung's: "jnp.dot HIGHEST time"
  {counter}`6 dram_read_bytes` a key of measured, stalls or occupancy
  {model}`6 intensity`         a field of pallas_gemm.ladder.traffic.Traffic;
                               floor is its least time, binds what it is due to
  {published}`Boehm 6`         a published step, by the rung next to which it
                               stands or by its name; "Boehm cublas"
  {row}`nvidia_h200/memory ns level=l2`
                               a field of the one row of a file that matches;
                               format=.3g unit=ns scale=1e3 reduce=geomean
  {gpu}`h200 sms`              facts of pallas_gemm.hardware
  {calc}`2 * 4096**3 / 1e9 .1f`

Directives: rung-card, rung-grid, rung-diff, rung-code, rung-traffic,
rung-counters, rung-sass, picture, ladder-table, ops-table, random-table
(directives.py).
"""

from typing import Any


def setup(app: Any) -> dict[str, Any]:
  """Sphinx's hook."""
  # Here, so that the tests of what roles print need no Sphinx.
  from docs.extensions import (
    directives,
    docstrings,
    mathml,
    pictures,
    roles,
  )

  for module in (roles, directives, pictures, docstrings, mathml):
    module.setup(app)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
