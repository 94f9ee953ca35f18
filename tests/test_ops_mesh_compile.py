"""Tier C: sharded products compiled for eight GPUs without one.

And Tier B: lowered for them, by eight devices of any kind.
"""

import collections
import itertools
import math
from pathlib import Path
import re
import subprocess
import sys

import pytest

from experiments.harness import compile_process
from tests.support import mesh_compile

# What a device has of M, N and K; of the groups it has all.
M, N, K = mesh_compile.M // 4, mesh_compile.N // 2, mesh_compile.K
GROUPS = mesh_compile.GROUPS
A, B, OUT, W = (M, K), (K, N), (M, N), (GROUPS, K, N)
# The matrices that each kernel reads, the product's own first: the gradient of
# A is OUT @ B.T, that of B is A.T @ OUT. A product with groups has a kernel of
# tables before it, which along K copies rows of both matrices.
EXAMPLES = {
  "dense gradients": [{A, B}, {OUT, B}, {A, OUT}],
  "gated gradients": [{A, B}, {OUT, B}, {OUT, B}, {A, OUT}, {A, OUT}],
  "grouped gradients": [{}, {A, W}, {}, {OUT, W}, {A, OUT}, {A, OUT}],
}
MODES = "auto", "explicit"
_EIGHT = "--xla_force_host_platform_device_count=8"
_MATMUL = re.compile(r" (?:ragged-)?dot\(|__cublas|__cudnn|__triton\S*gemm")


@pytest.fixture(name="compiled", scope="module")
def _compiled():
  """The compiled programs, by name."""
  names = [f"{x} {mode}" for x in mesh_compile.EXAMPLES for mode in MODES]
  return _printed("sums", *names)


@pytest.mark.aot
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_kernels_multiply_what_a_device_has(compiled, example, mode):
  """And XLA multiplies nothing."""
  text = compiled[f"{example} {mode}"]
  kernels = re.findall(
    r'custom_call_target="mosaic_gpu\S*".*?'
    r"operand_layout_constraints=\{(.*?)\}, api_version",
    text,
  )
  _check(kernels, r"\w+\[([\d,]+)\]", example)
  assert not _MATMUL.search(text), _MATMUL.search(text)


@pytest.mark.aot
def test_xla_rounds_no_product_of_a_row(compiled):
  """As it does where a device has one row and sums of 16 bits are asked for."""
  for name in "one row by XLA", "a row each by XLA":
    for mode in MODES:
      text = compiled[f"{name} {mode}"]
      assert set(re.findall(r"= (\w+)\S* multiply\(", text)) == {"f32"}


@pytest.mark.aot
@pytest.mark.parametrize("commands, inside", (("", 3), ("FUSION", 0)))
def test_command_buffers_hold_kernels(commands, inside, tmp_path):
  """XLA puts kernels into command buffers (CUDA graphs), as by default.

  Only if it may put custom calls there, and where enough of them, and of
  fusions, follow each other: there are three before the first collective.
  """
  flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
  if commands:
    flags += f" --xla_gpu_enable_command_buffer={commands}"
  _printed("gated gradients auto", xla_flags=flags)
  (file,) = tmp_path.glob("*.thunk_sequence.txt")
  assert len(_custom_calls(file.read_text())) == 5
  # This one is written if anything was put into a command buffer.
  found = [
    name
    for file in tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    for name in _custom_calls(_inside_command_buffers(file.read_text()))
  ]
  assert len(found) == inside


@pytest.mark.aot
def test_sums_over_devices_are_copied_no_more_than_by_xla(compiled):
  """In bfloat16 XLA's steps and bytes; in float32 one conversion at the end.

  That one also orders dimensions, where XLA has a last step for it.
  """
  programs = compiled["sums"].split("HloModule ")[1:]
  assert len(programs) == 3 * len(mesh_compile.SUMS)
  for own, plain, low in itertools.batched(map(_steps, programs), 3):
    assert [kind for kind, _ in own[:2]] == ["product", "sum"] and len(own) < 4
    assert low == own
    (product, summed), *rest = [size for _, size in plain[:2]], *plain[2:]
    assert [product, summed] == [2 * size for _, size in own[:2]]
    assert rest == [("fusion", own[-1][1])]


def _steps(program: str) -> list[tuple[str, int]]:
  """What a program runs: operations, and how many bytes each gives."""
  names = {"custom-call": "product", "reduce-scatter": "sum"}
  names |= {"all-reduce": "sum"}
  found = []
  for line in program[program.index("\nENTRY ") :].splitlines():
    step = re.match(r" +(?:ROOT )?%?(\S+) = (\w+)\[(.*?)\]\S* ([\w-]+)\(", line)
    if step is None or step[4] in ("parameter", "bitcast"):
      continue
    kind = "product" if "gemm_fusion" in step[1] else step[4]
    size = math.prod(map(int, step[3].split(",")))
    found.append((names.get(kind, kind), size * {"f32": 4, "bf16": 2}[step[2]]))
  return found


def _custom_calls(thunks: str) -> list[str]:
  return re.findall(r": kCustomCall\b", thunks)


def _inside_command_buffers(thunks: str) -> str:
  """The lines that are indented below those of command buffers."""
  blocks = re.findall(r"(?m)^\d+: kCommandBuffer.*\n((?: +.*\n?)*)", thunks)
  return "".join(blocks)


def test_explicit_axes_lower_kernels_of_what_a_device_has():
  names = [f"{example} explicit" for example in EXAMPLES]
  printed = _printed("--lower", *names)
  for example, text in zip(EXAMPLES, printed.values(), strict=True):
    kernels = re.findall(
      r"custom_call @mosaic_gpu\S*\(.*? : \((.*?)\) ->", text
    )
    _check(kernels, r"tensor<((?:\d+x)+)", example)
    assert "stablehlo.dot" not in text


def _check(kernels: list[str], shape: str, example: str) -> None:
  """The kernels, as lists of operands, read what they should."""
  found = []
  for operands in kernels:
    shapes = [
      tuple(map(int, re.findall(r"\d+", text)))
      for text in re.findall(shape, operands)
    ]
    # The others are indices, and what groups have beside whole slabs.
    found.append(frozenset(x for x in shapes if math.prod(x) >= M * K))
  found = collections.Counter(found)
  want = collections.Counter(map(frozenset, EXAMPLES[example]))
  # XLA keeps one of two tables that are equal: of tiles of as many rows.
  tables, asked = found.pop(frozenset(), 0), want.pop(frozenset(), 0)
  assert min(1, asked) <= tables <= asked
  assert found == want


def _printed(*names: str, xla_flags: str = _EIGHT) -> dict[str, str]:
  """What the program prints by name, in a process: some failures end it."""
  done = subprocess.run(
    [sys.executable, "-m", "tests.support.mesh_compile", *names],
    cwd=Path(__file__).parent.parent,
    env=compile_process.environment() | {"XLA_FLAGS": xla_flags},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  printed = done.stdout.split(mesh_compile.START)[1:]
  return {text.partition("\n")[0]: text for text in printed}
