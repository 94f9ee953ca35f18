"""GPUs that are no Hopper, and what is lowered or compiled for them."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

from pallas_gemm import hardware, ladder


def _like(row: str, name: str, major: int, minor: int, **known: Any):
  return dataclasses.replace(
    hardware.lookup(row), name=name, compute_capability=(major, minor), **known
  )


V100 = _like("Tesla T4", "Tesla V100", 7, 0, sm_count=80)
T4, A100, B200 = map(hardware.lookup, ("T4", "A100-SXM4-80GB", "B200"))
H200 = hardware.lookup("H200")
# One of each target that rungs are compiled for.
TARGETS = {
  "75": T4,
  "80": A100,
  "86": hardware.lookup("RTX 3090"),
  "89": hardware.lookup("RTX 4090"),
  "90a": H200,
  "100a": B200,
  "103a": hardware.lookup("GB300"),
  "120a": hardware.lookup("RTX 5090"),
  "121a": hardware.lookup("GB10"),
}
OTHERS = tuple(gpu for gpu in TARGETS.values() if gpu is not H200)


def example(labels: Sequence[str], size: int) -> tuple[Any, list[Any]]:
  """Squares by several rungs as one function; see `compiled.compile_example`.

  So a process compiles them together.
  """
  rungs = [ladder.find(label) for label in labels]
  dtypes = list(dict.fromkeys(rung.dtypes[0] for rung in rungs))

  def run(*operands):
    pairs = dict(zip(dtypes, zip(operands[::2], operands[1::2])))
    return [rung.gemm(*pairs[rung.dtypes[0]]) for rung in rungs]

  shapes = [jax.ShapeDtypeStruct((size, size), x) for x in dtypes for _ in "ab"]
  return run, shapes


def target_of_kernel(lowered: jax.stages.Lowered) -> tuple[int, int]:
  """The compute capability that the module of the one kernel carries."""
  modules = []

  def visit(op):
    if op.name == "stablehlo.custom_call":
      call = ir.StringAttr(op.attributes["call_target_name"]).value
      if call.startswith("mosaic_gpu"):
        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        modules.append(ir.StringAttr(config["module"]).value_bytes)
    return ir.WalkResult.ADVANCE

  lowered.compiler_ir().operation.walk(visit)
  (module,) = modules
  with mlir.make_ir_context() as context:
    mosaic_gpu.dialect.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True
    said = ir.Module.parse(module).operation.attributes
    parts = (said[f"mosaic_gpu.arch_{part}"] for part in ("major", "minor"))
    major, minor = (ir.IntegerAttr(part).value for part in parts)
  return major, minor
