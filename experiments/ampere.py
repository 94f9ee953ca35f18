"""Runs the code that rungs have before Hopper on a Hopper GPU.

  python -m experiments.ampere --emit=/tmp/ptx     anywhere: writes PTX
  python -m experiments.ampere --ptx=/tmp/ptx      on a Hopper GPU: measures
  python -m experiments.ampere --ptx=/tmp/ptx --kernels=8a,9a,9c

PTX is forward compatible: what is compiled for `.target sm_80` runs on every
later GPU. So without an Ampere GPU its code can be proven right, and timed, on
a Hopper one. Of each rung that needs nothing of Hopper's three are timed beside
jnp.dot, in turns, each checked against float64:

  the rung    as it runs on this GPU
  lowered     Mosaic GPU is told of an A100, ptxas of this GPU
  ptx         --emit compiled the kernel for an A100; the CUDA driver loads that
              PTX and launches it

Times are no times of an Ampere GPU. Rows go to ampere.jsonl of the device, one
a rung and shape; `arms` has the times, `skipped` why there is none of one.

Exit status: 0; 1 if a result is wrong or can't be had; 2 for a command that
can't be carried out; 130 after Ctrl-C.
"""

from collections.abc import Callable, Sequence
import ctypes
import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import (
  cli,
  compile_process,
  compiled,
  ladder_cases,
  rung_text,
  tables,
)
from experiments.harness import run as run_lib
from experiments.harness import session as session_lib
from experiments.harness import shapes as shapes_lib
from experiments.harness.case import Candidate
from pallas_gemm import hardware, ladder
from pallas_gemm.ladder import contract

EXPERIMENT = "ampere"
GPU = hardware.lookup("A100-SXM4-80GB")
LOWERED, PTX = "lowered for 8.0", "sm_80 PTX"
INDEX = "index.jsonl"
SHAPES = ("1000x777x513", "1024x1024x1024", "4096x4096x4096")
# Calls that take longer than this, by the model in seconds, are timed less.
_LONG_S, _REPEATS, _LONG_REPEATS = 0.01, 20, 3
# Of cuFuncSetAttribute: the most dynamic shared memory of a launch.
_MOST_SHARED = 8

for _name in ("kernels", "seed", "output_dir", "shapes"):
  flags.declare_key_flag(_name)
_EMIT = flags.DEFINE_string("emit", None, "Folder to write PTX to.")
_PTX = flags.DEFINE_string("ptx", None, "Folder that --emit wrote PTX to.")


def rungs() -> list[contract.Rung]:
  """Those of --kernels that run on an A100."""
  named = cli.parse_rungs(cli.KERNELS.value, ladder.LADDER)
  return [x for x in named if x.lacks(GPU) is None]


class AmpereCase(ladder_cases.LadderCase):
  """A rung, of which code for an A100 may be missing."""

  may_skip = True


def lowered(case: AmpereCase) -> Callable[..., Any]:
  """The rung as Mosaic GPU lowers it for an A100, compiled for this GPU."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
  here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  operands = {
    name: x and jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    for name, x in case.operands().items()
  }
  with hardware.assume(GPU):
    traced = jax.jit(case.rung.gemm, out_shardings=here).trace(**operands)
    program = traced.lower(lowering_platforms=("cuda",))
  return program.compile()


def by_driver(case: AmpereCase, folder: pathlib.Path) -> Callable[..., Any]:
  """The rung's PTX, which the CUDA driver compiles.

  Raises:
    NotImplementedError: there is none, or the driver refuses it.
  """
  p = case.problem
  for line in (folder / INDEX).read_text().splitlines():
    found = json.loads(line)
    if (found["rung"], found["shape"]) == (case.rung.label, [p.m, p.n, p.k]):
      return _padded(
        case, _launcher((folder / found["file"]).read_text(), found)
      )
  raise NotImplementedError(f"{folder} has no PTX of it")


def _padded(
  case: AmpereCase, launch: Callable[..., None]
) -> Callable[..., Any]:
  """A function of A and B that launches a kernel of two padded operands."""
  p = case.problem
  whole = case.rung.padded(p, case.rung.default_config(p))

  @jax.jit
  def pad(a, b):
    return (
      jnp.pad(a, [(0, whole.m - p.m), (0, whole.k - p.k)]),
      jnp.pad(b, [(0, whole.k - p.k), (0, whole.n - p.n)]),
    )

  cut = jax.jit(lambda x: x[: p.m, : p.n])
  # Written behind JAX's back, call for call.
  out = jax.block_until_ready(jnp.full((whole.m, whole.n), jnp.nan, p.dtype))

  def call(a, b, c=None):
    del c
    operands = (a, b) if whole == p else jax.block_until_ready(pad(a, b))
    launch(*(x.unsafe_buffer_pointer() for x in (*operands, out)))
    return out if whole == p else cut(out)

  return call


def _launcher(ptx: str, found: dict[str, Any]) -> Callable[..., None]:
  """Launches the kernel of a PTX text on pointers, and waits for it.

  Raises:
    NotImplementedError: the driver refuses it.
  """
  cuda = ctypes.CDLL("libcuda.so.1")

  def check(status: int) -> None:
    if status:
      text = ctypes.c_char_p()
      cuda.cuGetErrorString(status, ctypes.byref(text))
      raise NotImplementedError(f"CUDA: {text.value} ({status})")

  context, module, kernel = (ctypes.c_void_p() for _ in range(3))
  check(cuda.cuInit(0))
  check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))  # JAX's
  check(cuda.cuCtxSetCurrent(context))
  check(cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode() + b"\0"))
  name = found["entry"].encode()
  check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name))
  shared = found["shared"]
  check(cuda.cuFuncSetAttribute(kernel, _MOST_SHARED, shared))
  dimensions = *found["grid"], *found["threads"], shared

  def launch(*pointers: int) -> None:
    values = [ctypes.c_void_p(x) for x in pointers]
    slots = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuLaunchKernel(kernel, *dimensions, None, slots, None))
    check(cuda.cuCtxSynchronize())

  return launch


def emit(folder: pathlib.Path, shapes: Sequence[shapes_lib.Shape]) -> int:
  """Writes the PTX of each rung and shape, and index.jsonl."""
  if reason := compile_process.unavailable():
    raise cli.FlagError(f"--emit: {reason}")
  cli.check_folder(folder)
  folder.mkdir(parents=True, exist_ok=True)
  lines = []
  for rung in rungs():
    for shape in shapes:
      problem = contract.Problem(*shape, rung.dtypes[0])
      keywords = {"rung": rung.label, "problem": dataclasses.asdict(problem)}
      text = compile_process.run(
        f"{compiled.__name__}:{compiled.rung_example.__name__}",
        json.dumps(keywords | {"config": None}),
        GPU,
      )
      [ptx] = compiled.PTX.findall(text)
      [entry] = re.findall(r"\.entry (\w+)", ptx)
      [launch] = [[int(x) for x in y] for y in compiled.LAUNCH.findall(text)]
      file = f"{entry}_{shape}.ptx"
      (folder / file).write_text(ptx)
      found = {"rung": rung.label, "shape": shape, "file": file, "entry": entry}
      found |= {"grid": launch[:3], "threads": launch[6:9], "shared": launch[9]}
      lines.append(json.dumps(found) + "\n")
      cli.say(f"{file}  {len(ptx):,} bytes")
  (folder / INDEX).write_text("".join(lines))
  return 0


def parts(row: dict[str, Any]) -> list[str]:
  """Time of each arm, and why there is none."""
  found = [
    f"{name} {tables.duration(arm['ms_median'])}"
    for name, arm in row["arms"].items()
  ]
  return found + [f"{name}: {why}" for name, why in row["skipped"].items()]


def measure(
  bench: run_lib.Bench, case: AmpereCase, folder: pathlib.Path
) -> dict[str, Any]:
  """The row of a case."""
  arms = {
    name: [Candidate(functools.partial(lambda fn: fn, jax.jit(fn)), config)]
    for name, arm in case.arms().items()
    for fn, config in arm()
  }
  target = {"target": "sm_80"}
  arms[LOWERED] = [Candidate(functools.partial(lowered, case), target)]
  arms[PTX] = [Candidate(functools.partial(by_driver, case, folder), target)]
  model = rung_text.traffic_of(case.rung, case.problem, hardware.current())
  if model.floor.seconds > _LONG_S:
    bench = dataclasses.replace(bench, repeats=_LONG_REPEATS)
  return bench.measure(run_lib.Prepared(case, arms, {}))


def run(folder: pathlib.Path, shapes: Sequence[shapes_lib.Shape]) -> int:
  """Measures every rung and shape."""
  if not (folder / INDEX).exists():
    raise cli.FlagError(f"--ptx: no {INDEX} in {folder}, which --emit writes")
  if reason := ladder_cases.why_no_hopper():
    raise cli.FlagError(f"--ptx: {reason}")
  session = session_lib.start(EXPERIMENT, True)
  bench = dataclasses.replace(
    session_lib.bench(EXPERIMENT, True), warmup=2, repeats=_REPEATS
  )
  with session.measuring():
    for rung in rungs():
      for shape in shapes:
        problem = contract.Problem(*shape, rung.dtypes[0])
        arm = ladder_cases.rung(rung, problem).arm
        case = AmpereCase(rung.name, problem, arm, rung)
        session.case(
          f"{rung.label:>3} {rung.name:<26} {shape}",
          functools.partial(measure, bench, case, folder),
          parts,
        )
  left_out = [row["kernel"] for row in session.rows if row["skipped"]]
  session.failures.extend(f"{name} has no time" for name in left_out)
  return session.finish()


def main(argv: Sequence[str]) -> int:
  """Carries out the flags; returns the exit status."""
  del argv
  shapes = cli.parse_shapes(cli.SHAPES.value or SHAPES)
  if bool(_EMIT.value) == bool(_PTX.value):
    raise cli.FlagError("--emit, --ptx: want one of them")
  if _EMIT.value:
    return emit(pathlib.Path(_EMIT.value), shapes)
  return run(pathlib.Path(_PTX.value), shapes)


if __name__ == "__main__":
  cli.run(main)
