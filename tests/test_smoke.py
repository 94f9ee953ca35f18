"""Each op once under jit, grad and vmap: with what is lowered, and a case of
each rung and kernel in the interpreter, all that runs on the oldest JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.ops import EVERY, x64  # noqa: F401


@pytest.mark.smoke
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EVERY)
def test_an_op(name):
  op = EVERY[name]
  few, others = op.args(), op.args(seed=9)
  several = jax.tree.map(lambda *xs: jnp.stack(xs), few, others)

  def gradients(f):
    def loss(*args):
      return (f(*args) ** 2).sum()

    return jax.grad(loss, argnums=tuple(range(len(few))))

  tolerance = 2**-6 if op.dtype == "bfloat16" else 1e-12
  for transform, args in (
    (jax.jit, few),
    (gradients, few),
    (jax.vmap, several),
  ):
    found, wanted = (
      jax.tree.leaves(transform(f)(*args)) for f in (op.ours, op.plain)
    )
    for got, want in zip(found, wanted, strict=True):
      assert got.dtype == want.dtype
      got, want = (np.asarray(x, np.float64) for x in (got, want))
      np.testing.assert_allclose(got, want, tolerance, tolerance)
