"""GPUs that are no Hopper, and what is lowered or compiled for them."""

import dataclasses
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

from experiments import targets
from pallas_gemm import hardware


def _like(row: str, name: str, major: int, minor: int, **known: Any):
  return dataclasses.replace(
    hardware.lookup(row), name=name, compute_capability=(major, minor), **known
  )


V100 = _like("Tesla T4", "Tesla V100", 7, 0, sm_count=80)
T4, A100, B200 = map(hardware.lookup, ("T4", "A100-SXM4-80GB", "B200"))
# One of each target that rungs are compiled for.
OTHERS = tuple(
  hardware.lookup(name)
  for target, name in targets.TARGETS.items()
  if target != "90a"
)


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
