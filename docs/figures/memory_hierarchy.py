"""Four levels of memory, each farther away and shared by more than the last.

Registers belong to a thread, shared memory to a thread block, L2 and device
memory to all of them. Sizes are of H100 and H200, which differ in L2 and in
device memory alone.
"""

from docs.figures.style import Figure, Sheet, Style
from pallas_gemm import hardware

GPUS = ("H100 80GB HBM3", "H200")
# NVIDIA's datasheets.
DEVICE_GB = {"H100 80GB HBM3": 80, "H200": 141}
_KIB, _MIB = 1024, 1024**2


def sizes() -> list[tuple[str, str, str]]:
  """(level, who shares it, size) from the SM outwards."""
  gpus = [hardware.lookup(name) for name in GPUS]
  first = gpus[0]
  registers = first.registers_per_sm * 4 // _KIB
  shared = first.shared_bytes_per_sm // _KIB
  l2 = " / ".join(str(gpu.l2_bytes // _MIB) for gpu in gpus)
  device = " / ".join(str(DEVICE_GB[name]) for name in GPUS)
  return [
    ("registers", "of a thread", f"{registers} KiB an SM"),
    ("shared memory", "of a thread block", f"up to {shared} KiB an SM"),
    ("L2", "of all blocks", f"{l2} MiB"),
    ("device memory", "of all blocks", f"{device} GB"),
  ]


def draw(style: Style) -> Figure:
  """A staircase: narrow and near above, wide and far below."""
  sheet = Sheet(style, 46)
  levels = sizes()
  sms = hardware.lookup(GPUS[0]).sm_count
  fills = [style.tint(style.c, x) for x in (0.5, 0.36, 0.22, 0.1)]
  # SMs behind the one that is drawn.
  for behind in (2, 1):
    place = 5 + 1.2 * behind, 4.2 - 1.2 * behind, 51, 20
    z = 0.5 - behind / 10
    sheet.box(*place, fill=style.page, edge=style.line, z=z)
  sheet.box(5, 4.2, 51, 20, fill=style.page, edge=style.line, line=1.4)
  sheet.text(30.5, 22.6, f"one of {sms} SMs", colour=style.muted)
  y = 5.4
  for index, (name, whose, size) in enumerate(levels):
    width = (40, 46, 54, 60)[index]
    x = 30.5 - width / 2 if index < 2 else 32 - width / 2
    if index == 2:
      y += 4.6
    sheet.box(x, y, width, 7, fill=fills[index], edge=style.c, z=2)
    sheet.say(x + 1.5, y + 2.2, name, weight="bold", zorder=4)
    sheet.say(x + 1.5, y + 4.9, whose, zorder=4)
    sheet.text(x + width - 1.5, y + 3.5, size, ha="right", zorder=4)
    y += 7.9
  sheet.text(32, 44.6, "L2 and device memory: H100 / H200", colour=style.muted)
  return sheet.figure
