"""Two blocks of a cluster load B's tile once between them.

Blocks below each other in C need different tiles of A and the same tile of B.
Alone, each fetches all of B's tile from L2. In a cluster each fetches half and
multicasts it to both: B leaves L2 once, in place of twice.
"""

from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import ladder
from pallas_gemm.ladder import blocks, contract

_PROBLEM = contract.Problem(4096, 4096, 4096, "bfloat16")
CONFIGS = {
  cluster: contract.TensorCoreConfig(128, 256, 64, cluster_m=cluster)
  for cluster in (1, 2)
}


def from_l2(cluster: int) -> tuple[int, int]:
  """Bytes of A and of B that leave L2 in a step for two blocks."""
  specs = ladder.find("cluster_multicast").specs(_PROBLEM, CONFIGS[cluster])
  return tuple(
    2 * blocks.elements(spec) * _PROBLEM.itemsize
    // (cluster if spec.collective_axes else 1)
    for spec in specs.in_specs
  )  # fmt: skip


def _panel(sheet, x, title, cluster) -> None:
  style = sheet.style
  sheet.head(x, 2, title)
  sheet.box(x, 4.4, 29, 4, "L2", fill=style.tint(style.line, 0.4),
            colour=style.text)  # fmt: skip
  tops = 24
  if cluster > 1:
    sheet.box(x - 0.6, tops - 1, 30.2, 15.4, edge=style.muted, line=1.2)
  for index in range(2):
    left = x + 15.2 * index
    sheet.box(left, tops, 13.8, 13.4, edge=style.text, line=1.2)
    sheet.text(left + 6.9, tops + 11.4, f"block {index}")
    sheet.box(left + 1, tops + 1.2, 4.6, 8, f"A{index}", fill=style.a)
    sheet.box(left + 6.6, tops + 1.2, 6.2, 8, "" if cluster > 1 else "B",
              fill=style.b)  # fmt: skip
    a = left + 3.3
    sheet.arrow((a, 8.6), (a, tops + 0.9), style.a, 2.6)
    b = left + 9.7
    if cluster == 1:
      sheet.arrow((b, 8.6), (b, tops + 0.9), style.b, 4.4)
      continue
    for half in range(2):
      place = left + 6.6, tops + 1.2 + 4 * half, 6.2, 4
      sheet.box(*place, "½ B", fill=style.b, edge=style.page, z=2)
    sheet.arrow((b, 8.6), (b, 13.2), style.b, 2.2)
    sheet.box(b - 2.6, 13.4, 5.2, 3, "½ B", fill=style.b, z=4)
    for other in range(2):
      end = x + 15.2 * other + 9.7 + (1.4 if index else -1.4)
      sheet.arrow((b, 16.6), (end, tops + 0.9), style.b, 2.0)
  a, b = (count // 1024 for count in from_l2(cluster))
  y = tops + 17.2
  sheet.say(x, y, f"A {a} KiB, B {b} KiB a step")
  sheet.say(x, y + 2.7, f"together {a + b} KiB", weight="bold")


def draw(style: Style) -> Figure:
  """Alone on the left, as a cluster on the right."""
  sheet = Sheet(style, 46)
  _panel(sheet, 1.2, "Two blocks alone", 1)
  _panel(sheet, 33.8, "A cluster of two", 2)
  return sheet.figure
