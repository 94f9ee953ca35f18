"""Where a number comes from: device, versions, clocks, commit.

Whatever can't be found out is None; nothing here raises.
"""

from collections.abc import Callable
import dataclasses
import datetime
import functools
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import threading
from typing import Any

import jax
import jaxlib

SAMPLE_EVERY_S = 0.05
# Names the code's version where there is no git to ask (an unpacked archive).
COMMIT_VARIABLE = "PALLAS_GEMM_COMMIT"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_QUERY = "clocks.sm,power.draw,temperature.gpu"


@dataclasses.dataclass(frozen=True)
class Load:
  """State of the GPU while it worked.

  Attributes:
    sm_clock_mhz: clock of the multiprocessors.
    power_w: power drawn by the board.
    temperature_c: temperature of the chip.
  """

  sm_clock_mhz: float | None = None
  power_w: float | None = None
  temperature_c: float | None = None


class Monitor:
  """Context that samples clock, power and temperature while it is open.

  Example:
    with Monitor() as monitor:
      work()
    monitor.load.sm_clock_mhz  # the median over the samples
  """

  def __init__(self, read: Callable[[], Load] | None = None):
    self._read = read or reader()
    self._samples: list[Load] = []
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self) -> "Monitor":
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._stop.set()
    self._thread.join()

  def _run(self) -> None:
    while True:
      self._samples.append(self._read())
      if self._stop.wait(SAMPLE_EVERY_S):
        return

  @property
  def load(self) -> Load:
    """Medians over the samples taken so far."""

    def median(name: str) -> float | None:
      values = [getattr(sample, name) for sample in self._samples]
      known = [value for value in values if value is not None]
      return float(statistics.median(known)) if known else None

    return Load(**{f.name: median(f.name) for f in dataclasses.fields(Load)})


def reader() -> Callable[[], Load]:
  """Reads the first GPU's state: NVML where Python has it, else nvidia-smi."""
  if jax.devices()[0].platform == "cpu":
    return Load
  return _nvml_reader() or _smi_load


def _nvml_reader() -> Callable[[], Load] | None:
  try:
    import pynvml  # pylint: disable=g-import-not-at-top

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    # One reading now: a library that can't is no reader.
    pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
  except Exception:  # pylint: disable=broad-exception-caught
    return None

  def ask(question: Callable[..., Any], *args: Any, scale: float = 1.0):
    try:
      return question(gpu, *args) * scale
    except pynvml.NVMLError:
      return None

  return lambda: Load(
    sm_clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
    power_w=ask(pynvml.nvmlDeviceGetPowerUsage, scale=1e-3),
    temperature_c=ask(
      pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
    ),
  )


def _smi(query: str) -> list[str] | None:
  """Answers of nvidia-smi for the first GPU, or None."""
  if shutil.which("nvidia-smi") is None:
    return None
  command = ["nvidia-smi", f"--query-gpu={query}"]
  command += ["--format=csv,noheader,nounits", "--id=0"]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=20, check=True
    )
  except (OSError, subprocess.SubprocessError):
    return None
  answers = [answer.strip() for answer in done.stdout.strip().split(",")]
  return answers if len(answers) == len(query.split(",")) else None


def _smi_load() -> Load:
  answers = _smi(_QUERY)
  return Load() if answers is None else Load(*map(_number, answers))


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def device_name() -> str:
  """Name of the device that JAX computes on: "NVIDIA H200", or "cpu"."""
  return jax.devices()[0].device_kind


@functools.cache
def versions() -> dict[str, str | None]:
  """The fields device, driver, cuda, jax, jaxlib and commit of a row."""
  device = jax.devices()[0]
  on_gpu = device.platform != "cpu"
  answers = _smi("driver_version") if on_gpu else None
  # PJRT says e.g. "cuda 13000" for CUDA 13.0.
  said = re.search(r"cuda\s+(\d+)", device.client.platform_version)
  cuda = None
  if said:
    number = int(said.group(1))
    cuda = f"{number // 1000}.{number % 1000 // 10}"
  return {
    "device": device_name(),
    "driver": answers[0] if answers else None,
    "cuda": cuda if on_gpu else None,
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "commit": commit(),
  }


def commit() -> str | None:
  """The commit of this code, "-dirty" after it if files differ from it."""
  if stated := os.environ.get(COMMIT_VARIABLE):
    return stated
  head = _git("rev-parse", "HEAD")
  if head is None:
    return None
  # Results are what a run writes; they don't change what was run.
  changed = _git(
      "status", "--porcelain", "--untracked-files=no", "--", ".",
      ":!experiments/results", ":!README.md",
  )  # fmt: skip
  return head + "-dirty" if changed else head


def _git(*args: str) -> str | None:
  try:
    done = subprocess.run(
      ["git", "-C", str(_ROOT), *args],
      capture_output=True,
      text=True,
      timeout=20,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()


def utc() -> str:
  """The time now, ISO 8601, UTC, to the second."""
  now = datetime.datetime.now(datetime.UTC)
  return now.isoformat(timespec="seconds").replace("+00:00", "Z")
