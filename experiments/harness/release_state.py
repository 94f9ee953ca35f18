"""The pieces of a release, and which of them are done."""

from collections.abc import Mapping
import hashlib
import json
import pathlib
import shlex
import sys
from typing import Any, NamedTuple

from experiments.harness import cli

TESTS, STATE, OUTPUT = "gpu_tests", "state.json", "output.txt"
# Tests that need several GPUs; times of the host, which others would take.
ALONE = "tests-mesh", "latency"
# What all rows have in common.
SAME = "commit", "jax", "jaxlib", "device"
_PYTEST = "-q -m gpu -n 12 --dist worksteal -p no:cacheprovider"
# Name, file of its rows, seconds on an H100 or H200, command, of which {0} to
# {2} are seeds. None takes longer than eight minutes alone; of five
# pieces of tests that began at once the longest took fifteen.
_PIECES = """
tests-ladder gpu_tests 140 pytest tests/test_ladder_gpu.py
tests-ops gpu_tests 100 pytest tests/test_ops_gpu.py -k 'not random_calls'
tests-calls gpu_tests 350 pytest tests/test_ops_gpu.py -k random_calls
tests-ragged gpu_tests 260 pytest tests/test_ops_ragged_gpu.py
tests-eight-bits gpu_tests 140 pytest tests/test_ops_eight_bits_gpu.py
tests-float32 gpu_tests 70 pytest tests/test_ops_float32_gpu.py
tests-mesh gpu_tests 50 pytest tests/test_ops_mesh_gpu.py
tests-others gpu_tests 40 pytest tests/test_triton_dense.py\
 tests/test_tuning_autotune.py
sanitizer gpu_tests 300 make sanitize
ladder ladder 290 ladder --shapes=4096x4096x4096,4096x8192x4096,8192x8192x8192
sweep sweep 190 ladder --sweep
counters counters 40 counters
memory memory 40 memory
dense-1 dense 150 dense --suite=square,llama_8b,llama_70b,unaligned,\
tall_skinny,lora,narrow,models
dense-2 dense 95 dense --suite=short,float32,vocabulary,layouts,epilogues,\
gated,training,batched
dense-unseen-1 dense_unseen 130 dense --unseen=60 --seed={0}
dense-unseen-2 dense_unseen 130 dense --unseen=60 --seed={1}
dense-unseen-3 dense_unseen 120 dense --unseen=60 --seed={2}
ragged-1 ragged 165 ragged --suite=mixtral,deepseek
ragged-2 ragged 120 ragged --suite=qwen,decode
ragged-3 ragged 140 ragged --suite=distributions,gated,moe
ragged-forward ragged 140 ragged --suite=sizes --passes=forward
ragged-dx ragged 135 ragged --suite=sizes --passes=dx
ragged-dw ragged 120 ragged --suite=sizes --passes=dw
ragged-odd ragged 170 ragged --suite=odd
ragged-experts ragged 155 ragged --suite=experts
ragged-unseen ragged 215 ragged --unseen=40 --seed={0}
xla ragged_xla 55 ragged --implementation=xla --suite=mixtral
xla-float32 ragged_xla 80 ragged --implementation=xla --suite=mixtral\
 --dtype=float32
xla-unseen ragged_xla 95 ragged --implementation=xla --unseen=20 --seed={0}
eight-bits-1 eight_bits 315 eight_bits --suites=dense
eight-bits-2 eight_bits 155 eight_bits --suites=stored,small
eight-bits-3 eight_bits 340 eight_bits --suites=grouped,layer,errors
float32-1 float32 110 float32 --suites=dense
float32-2 float32 145 float32 --suites=layer,grouped,errors
float32-3 float32 205 float32 --suites=unseen --seed={0}
float32-4 float32 115 float32 --suites=sizes
latency dense 15 dense --suite=latency
"""


class Piece(NamedTuple):
  """A part of a release; the rows of those with the same `file` go together."""

  name: str
  file: str
  seconds: int
  command: str

  def arguments(
    self, folder: pathlib.Path, python: str = sys.executable
  ) -> list[str]:
    """What is run."""
    program, *given = shlex.split(self.command)
    if program == "make":
      return [program, *given, f"PYTHON={python}"]
    if self.file == TESTS:
      return [python, "-m", program, *_PYTEST.split(), *given]
    module = f"experiments.{program}"
    return [python, "-m", module, *given, f"--output_dir={folder}"]


def seeds(commit: str) -> list[int]:
  """Three seeds that nobody chose, of a hash or the start of one."""
  digest = hashlib.sha256(commit[:7].encode()).hexdigest()
  return [int(digest[i : i + 8], 16) % 10**6 for i in (0, 8, 16)]


class State:
  """What is done of a release, in a file of its folder.

  Attributes:
    folder: has a folder for each piece.
    of: commit, device and versions; empty if nothing was begun.
    done: by name of a piece, its command, start, seconds and exit status.
  """

  def __init__(self, folder: pathlib.Path) -> None:
    self.folder, path = folder, folder / STATE
    try:
      self.of = json.loads(path.read_text()) if path.exists() else {}
      self.done: dict[str, dict[str, Any]] = self.of.pop("pieces", {})
      if self.of and not all(isinstance(self.of[name], str) for name in SAME):
        raise ValueError(f"want texts for {', '.join(SAME)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise cli.FlagError(f"{path} is no state of a release: {error}") from None

  @property
  def pieces(self) -> list[Piece]:
    """Those of the commit, in the order in which they run."""
    text = _PIECES.format(*seeds(self.of["commit"]))
    fields = (line.split(maxsplit=3) for line in text.strip().splitlines())
    return [Piece(name, file, int(s), how) for name, file, s, how in fields]

  def write(self) -> None:
    """Writes the file, whole."""
    replace(self.folder / STATE, text(self.of, self.done))

  def status(self, piece: Piece) -> int | None:
    """A piece's exit status; None if it has not ended."""
    return self.done.get(piece.name, {}).get("status")

  def seconds(self, piece: Piece) -> float:
    """What a piece took, or its estimate."""
    return self.done.get(piece.name, {}).get("seconds", piece.seconds)

  def same(self, row: Mapping[str, Any]) -> bool:
    """Whether a row is of this commit, JAX and device."""
    return all(row.get(name) == self.of[name] for name in SAME)

  def check(self, got: Mapping[str, Any], where: str, what_to_do: str) -> None:
    """Raises FlagError of what is not of this commit, JAX and device."""
    for name, want in ((name, self.of[name]) for name in SAME):
      if (has := got.get(name)) != want:
        text = f"{where}: want {name} {want}, got {has}; {what_to_do}"
        raise cli.FlagError(text)


def text(of: dict[str, Any], done: dict[str, Any]) -> str:
  """What state.json and release.json hold."""
  return json.dumps(of | {"pieces": done}, indent=2) + "\n"


def replace(path: pathlib.Path, text: str) -> None:
  """Writes a file whole, or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f"{path.name}.new")
  new.write_text(text)
  new.replace(path)
