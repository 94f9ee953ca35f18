"""Random calls of float32 products in planes, held to float64."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import pallas_gemm
from tests.support import products

ON_KERNEL = {"implementation": "sm90", "precision": "highest"}
X3 = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
_ACTIVATIONS = (None, None, jax.nn.relu, jax.nn.gelu)


def check(seed: int, most: float) -> None:
  """A dense product of sizes up to 2^most, in any layout, with what follows.

  One of A and B may be bfloat16, C, a bias and a batch may be there.
  """
  rng = np.random.default_rng(seed)
  m, n, k = (int(2 ** rng.uniform(0, most)) for _ in range(3))
  batch = (2,) * int(rng.integers(0, 2))
  a = products.normal(*batch, m, k, seed=seed)
  b = products.normal(k, n, seed=seed)
  planes = int(rng.choice([2, 3, 3]))
  narrow = rng.choice(["a", "b", ""]) if planes == 3 else ""
  a = a.astype(jnp.bfloat16) if narrow == "a" else a
  b = b.astype(jnp.bfloat16) if narrow == "b" else b
  after = {"activation": rng.choice(_ACTIVATIONS)}
  if rng.random() < 0.5:
    after["bias"] = products.normal(n, seed=seed + 1)
  if rng.random() < 0.5:
    after |= {"c": products.normal(m, n, seed=seed + 2), "beta": -0.5}
  dtype = jnp.dtype(rng.choice(["float32", "float32", "bfloat16"]))
  flags = [bool(x) for x in rng.integers(0, 2, 2)]
  given = [jnp.swapaxes(x, -1, -2) if t else x for x, t in zip((a, b), flags)]
  how = ON_KERNEL | {"precision": X3 if planes == 2 else "highest"}
  how |= dict(zip(("transpose_a", "transpose_b"), flags))
  out = pallas_gemm.matmul(*given, out_dtype=dtype, **how, **after)
  assert out.dtype == dtype and out.shape == (*batch, m, n)
  products.assert_product(out, a, b, planes=planes, **after)
