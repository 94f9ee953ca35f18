"""Which implementation computes a product: tried in order, and logged once."""

from collections.abc import Callable, Mapping
import threading
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from pallas_gemm.ops import spec as spec_lib
from pallas_gemm.ops.implementations import IMPLEMENTATIONS, Target
from pallas_gemm.ops.spec import Operands, Spec

_lock = threading.Lock()
_logged: set[str] = set()


def run(*operands: jax.Array, spec: Spec, target: Target) -> Any:
  """The results, of the first implementation that takes the product.

  Args:
    *operands: as `spec` names them.
    spec: what is computed.
    target: what is lowered for.

  Raises:
    NotImplementedError: none takes it; the reason of each.
  """
  x = spec.named(operands)
  if spec_lib.is_empty(spec.sizes(x)) or spec.alpha == 0:
    return _without_product(x, spec)
  return first_of(IMPLEMENTATIONS, x, spec, target, _shapes(x, spec))


def first_of(
  implementations: Mapping[str, Callable[..., Any]],
  x: Any,
  spec: Any,
  target: Target,
  product: str,
) -> tuple[jax.Array, ...]:
  """The results of the first implementation that takes a product.

  Args:
    implementations: by name; each is called with x, spec and target.
    x: the operands.
    spec: what is computed; `spec.implementation` has the names to try.
    target: what is lowered for.
    product: the product in words, as far as the choice depends on it.

  Raises:
    NotImplementedError: none takes it; the reason of each.
  """
  refusals: dict[str, str] = {}
  for name in spec.implementation or target.default:
    try:
      outs = implementations[name](x, spec, target)
    except NotImplementedError as error:
      refusals[name] = str(error)
      continue
    platform = "CUDA" if target.cuda else "other platforms than CUDA"
    skipped = f" (not {_listed(refusals)})" if refusals else ""
    log_once(f"{product} runs on {name!r} on {platform}{skipped}")
    return tuple(outs)
  raise NotImplementedError(
    f"no implementation computes {product}: {_listed(refusals)}"
  )


def log_once(message: str) -> None:
  """Logs a message the first time in this process."""
  with _lock:
    if message in _logged:
      return
    _logged.add(message)
  logging.info("%s", message)


def _without_product(x: Operands, spec: Spec) -> list[jax.Array]:
  """As in BLAS: K = 0 and alpha = 0 leave activation(beta * C + bias)."""
  batch, m, n, _ = spec.sizes(x)
  dtype = spec_lib.accumulation_dtype(x.a.dtype, spec.out_dtype)
  nothing = jnp.zeros((batch, m, n), dtype)
  return spec_lib.epilogue([nothing] * (2 if spec.gated else 1), x, spec)


def _shapes(x: Operands, spec: Spec) -> str:
  """The product in words, as far as the choice depends on it."""
  batch, m, n, k = spec.sizes(x)
  layout = "NT"[spec.transpose_a] + "NT"[spec.transpose_b]
  parts = {
    "bias": spec.bias is not None,
    "activation": spec.activation is not None,
    "C": spec.has_c,
    "saved pre-activation": spec.save,
    "batch invariance": spec.batch_invariant,
  }
  extra = "".join(f" + {part}" for part, there in parts.items() if there)
  return (
    f"{'gated_matmul' if spec.gated else 'matmul'} {x.a.dtype.name} to"
    f" {jnp.dtype(spec.out_dtype).name}, batch {batch}, M {m}, N {n}, K {k},"
    f" {layout}{extra}"
  )


def _listed(refusals: dict[str, str]) -> str:
  return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
