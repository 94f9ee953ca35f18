"""What every compiled example of the Hopper kernels must be."""

from typing import Any

from experiments.harness import compiled as compiled_lib


def of_example(
  problem: dict[str, Any], config: dict[str, Any], activation: str | None
) -> str:
  """Machine code of a product: no spills, no wgmma waits for the one before."""
  support = "ragged_kernels" if "ragged" in problem else "dense"
  compiled = compiled_lib.compile_example(
    f"tests.support.{support}:named_example",
    problem=problem,
    config=config,
    activation=activation,
  )
  assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
  assert compiled.warnings == ()
  return compiled.only("sm90").sass
