"""Where a number comes from: device, versions, clocks, commit.

Whatever can't be found out is None; nothing here raises.
"""

from collections.abc import Callable
import ctypes
import dataclasses
import datetime
import functools
import os
import pathlib
import re
import statistics
import subprocess
import threading

import jax
import jaxlib

SAMPLE_EVERY_S = 0.05
# Names the code's version where there is no git to ask (an unpacked archive).
COMMIT_VARIABLE = "PALLAS_GEMM_COMMIT"
# Numbers or names of the GPUs that CUDA sees; NVML sees all.
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of NVML.
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0


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
    self._read = read or read_load
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


def read_load() -> Load:
  """The first GPU's state at this moment."""
  if jax.devices()[0].platform == "cpu":
    return Load()
  return Load(
    sm_clock_mhz=_ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
    power_w=_ask("nvmlDeviceGetPowerUsage", scale=1e-3),
    temperature_c=_ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
  )


@functools.cache
def _nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
  """NVML, which comes with the driver, and the handle of the first GPU."""
  try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
  except OSError:
    return None
  gpu = ctypes.c_void_p()
  first, _, _ = os.environ.get(GPU_VARIABLE, "0").partition(",")
  index = int(first) if first.isdigit() else 0
  failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(
    index, ctypes.byref(gpu)
  )
  return None if failed else (nvml, gpu)


def _ask(question: str, *args: int, scale: float = 1.0) -> float | None:
  """A number of the first GPU."""
  if (there := _nvml()) is None:
    return None
  nvml, gpu = there
  value = ctypes.c_uint()
  failed = getattr(nvml, question)(gpu, *args, ctypes.byref(value))
  return None if failed else value.value * scale


def _driver() -> str | None:
  if (there := _nvml()) is None:
    return None
  text = ctypes.create_string_buffer(80)
  failed = there[0].nvmlSystemGetDriverVersion(text, len(text))
  return None if failed else text.value.decode()


def device_name() -> str:
  """Name of the device that JAX computes on: "NVIDIA H200", or "cpu"."""
  return jax.devices()[0].device_kind


@functools.cache
def versions() -> dict[str, str | None]:
  """The fields device, driver, cuda, jax, jaxlib and commit of a row."""
  device = jax.devices()[0]
  on_gpu = device.platform != "cpu"
  # PJRT says e.g. "cuda 13000" for CUDA 13.0.
  said = re.search(r"cuda\s+(\d+)", device.client.platform_version)
  cuda = None
  if said:
    number = int(said.group(1))
    cuda = f"{number // 1000}.{number % 1000 // 10}"
  return {
    "device": device_name(),
    "driver": _driver() if on_gpu else None,
    "cuda": cuda if on_gpu else None,
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "commit": commit(),
  }


def commit(untracked: bool = False) -> str | None:
  """The commit of this code, "-dirty" after it if files differ from it.

  Args:
    untracked: whether a file counts too that git neither has nor ignores.
  """
  if stated := os.environ.get(COMMIT_VARIABLE):
    return stated
  head = _git("rev-parse", "HEAD")
  if head is None:
    return None
  # Results are what a run writes; they don't change what was run.
  others = f"--untracked-files={'normal' if untracked else 'no'}"
  changed = _git(
      "status", "--porcelain", others, "--", ".",
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
