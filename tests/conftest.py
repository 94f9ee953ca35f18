"""What holds for every test: platform, time limits, strictness, skips.

Plugins beside pytest itself (pytest-timeout, pytest-xdist, hypothesis) are
used where they are installed; the GPU tests run without them.
"""

import contextlib
import gc
import os
from pathlib import Path
import sys

import pytest

# A test takes seconds; a machine may be several times slower than another.
_LIMIT_S = 300
# An unpacked sdist has all that a checkout has but these.
_ROWS = Path(__file__).parent.parent / "experiments/results/nvidia_h200"
_NO_ROWS = "needs the rows of a checkout"
# Programs run once, so compiling them well is time lost.
_XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


def pytest_configure(config):
  # Before any test module imports JAX. With a GPU in the machine, kernels are
  # interpreted all the same unless the GPU tests are asked for.
  if not _asks_for_gpu(config):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_FLAGS", _XLA_FLAGS)
    _import_for_triton()
    _keep_compiled(config.rootpath / ".pytest_cache" / "jax")
  if not _ROWS.is_dir():
    _skip_what_reads_rows()
  # A marker of its own where pytest-timeout, which declares it, is missing.
  config.addinivalue_line("markers", "timeout(seconds, method): time limit")
  try:
    from hypothesis import settings
  except ImportError:
    return
  # The same examples in every run; HYPOTHESIS_PROFILE=explore looks further.
  # The interpreter is slow and its first call slower: no deadline.
  settings.register_profile("default", deadline=None, derandomize=True)
  settings.register_profile(
    "explore", deadline=None, max_examples=200, print_blob=True
  )
  settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
  """A folder for what is measured, instead of the user's; it is empty."""
  from pallas_gemm.tuning import cache

  monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
  cache.clear()
  yield
  cache.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
  """Processes for `-n auto`: one more than cores.

  The threads of an interpreted kernel wait for each other, some of the time
  with nothing to do.
  """
  del config
  return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config, items):
  del config
  missing_gpu = None
  for item in items:
    if item.path.name.endswith("_lower.py"):
      item.add_marker(pytest.mark.smoke)
    if item.get_closest_marker("timeout") is None:
      # From a thread: the main thread of a kernel that hangs in the
      # interpreter serves no signal.
      item.add_marker(pytest.mark.timeout(_LIMIT_S, method="thread"))
    if item.get_closest_marker("gpu") is not None:
      if missing_gpu is None:
        missing_gpu = _why_no_hopper()
      if missing_gpu:
        item.add_marker(pytest.mark.skip(reason=missing_gpu))
    if item.get_closest_marker("rows") is not None and not _ROWS.is_dir():
      item.add_marker(pytest.mark.skip(reason=_NO_ROWS))
    if item.get_closest_marker("aot") is not None:
      from experiments.harness import compile_process

      if reason := compile_process.unavailable():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
  """Hardly anything of it is garbage, and it stays: nothing to look for."""
  del session
  gc.disable()
  try:
    return (yield)
  finally:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter(pytestconfig):
  """Kernels are interpreted without copies that nobody needs."""
  if _asks_for_gpu(pytestconfig):
    yield
    return
  from tests.support import interpret

  with interpret.arguments_in_numpy():
    yield


@pytest.fixture(scope="session")
def repository() -> Path:
  """The root of the checkout."""
  return Path(__file__).resolve().parent.parent


def _import_for_triton() -> None:
  """What jax-triton needs of JAX's CUDA plugin, which is no start of it.

  It is kept from other programs (tools/setup_env.sh).
  """
  plugin = str(Path(sys.prefix, "cuda-plugin"))
  sys.path.append(plugin)
  with contextlib.suppress(ImportError):
    import jaxlib.gpu_triton  # noqa: F401
  sys.path.remove(plugin)


def _keep_compiled(folder: Path) -> None:
  """Test processes share what XLA compiles, and so do later runs.

  Programs that tests start do not: what they print may be about compiling.
  """
  import jax

  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _asks_for_gpu(config) -> bool:
  words = (config.option.markexpr or "").replace("(", " ").split()
  return any(
    word == "gpu" and (i == 0 or words[i - 1] != "not")
    for i, word in enumerate(words)
  )


def _why_no_hopper() -> str:
  """Why the tests marked `gpu` can't run here; empty if they can."""
  import jax

  if os.environ.get("JAX_PLATFORMS") == "cpu":
    return "needs an NVIDIA GPU: run with -m gpu"
  device = jax.devices()[0]
  capability = getattr(device, "compute_capability", None)
  if device.platform != "gpu" or capability != "9.0":
    return (
      "needs an NVIDIA GPU of compute capability 9.0; JAX sees"
      f" {device.device_kind} ({device.platform})"
    )
  return ""


def _skip_what_reads_rows() -> None:
  """Where `rows.read` finds none; other tests carry the marker `rows`."""
  from experiments.harness import rows

  read, results = rows.read, rows.RESULTS

  def read_or_skip(path):
    if results in Path(path).parents and not Path(path).exists():
      pytest.skip(_NO_ROWS, allow_module_level=True)
    return read(path)

  rows.read = read_or_skip
