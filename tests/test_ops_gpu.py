"""Tier D: the ops on an NVIDIA GPU of compute capability 9.0.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest -m gpu -n 8 \\
      tests/test_ops_gpu.py

Several processes share the GPU's memory only if none takes it all.
"""

import functools

import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import compat, tuning
from tests.support import calls, canaries, gradients, problems, products
from tests.support.products import normal

pytestmark = pytest.mark.gpu

Call = calls.Call
CHUNK = 50
SMALL = tuple(range(301))
LARGE = (512, 1000, 1024, 1027, 2048, 2049, 3000, 4088, 4095, 4096)
BF16 = "bfloat16"


def _check(drawn: list[tuple[Call, int]]) -> None:
  """Computes several calls in one program, and checks each.

  Every other call by the kernel wherever that can, also where XLA's is faster.
  """
  arguments = [call.operands(seed) for call, seed in drawn]

  @jax.jit
  def together(arguments):
    return [
      call(x, implementation=(None, ("sm90", "xla"))[seed % 2])
      for (call, seed), x in zip(drawn, arguments)
    ]

  for (call, seed), x, out in zip(drawn, arguments, together(arguments)):
    try:
      call.assert_right(out, x)
    except AssertionError as error:
      raise AssertionError(f"operands({seed}) of {error}") from error


def _drawn(key: tuple[int, ...], count: int, sizes) -> list[tuple[Call, int]]:
  rng = np.random.default_rng(key)

  def choose(options):
    return options[int(rng.integers(len(options)))]

  return [(calls.draw(choose, sizes), i) for i in range(count)]


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("chunk", range(39))
def test_random_calls(chunk):
  drawn = _drawn((1, chunk), CHUNK, SMALL)
  for start in range(0, CHUNK, 5):
    _check(drawn[start : start + 5])


@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("chunk", range(10))
def test_random_large_calls(chunk):
  for call in _drawn((2, chunk), 5, LARGE):
    _check([call])


# Problems whose sums are computed in each of the ways that there are.
_TILE = {"block_m": 128, "block_n": 128, "stages": 4}
_SMALL = {
  "block_m": 64, "block_n": 64, "stages": 6, "consumers": 1, "moves": True
}  # fmt: skip
REPEATED = {
  "default": (Call(m=1000, n=777, k=513), None),
  "split_k": (
    Call(m=64, n=512, k=8192),
    tuning.Config(**_TILE | {"block_m": 64, "consumers": 1}, split_k=8),
  ),
  "cluster_k": (
    Call(m=100, n=1000, k=5000, bias="n", c_dtype=BF16, activation=jax.nn.gelu),
    tuning.Config(**_TILE, cluster_k=4, epilogue_n=32),
  ),
  "cluster_k_of_few_rows": (
    Call(m=9, n=776, k=3000, transpose_b=True, out_dtype="float32"),
    tuning.Config(
      block_m=64, block_n=64, consumers=1, cluster_k=2, epilogue_n=32
    ),
  ),
  "cluster_k_gated": (
    Call(m=200, n=384, k=2049, gated=True, activation=jax.nn.silu),
    tuning.Config(**_TILE | {"block_n": 64}, cluster_k=4, epilogue_n=16),
  ),
  "cluster_k_of_eight": (
    Call(m=70, n=512, k=4000, transpose_a=True),
    tuning.Config(
      block_m=64, block_n=256, split="n", cluster_k=8, epilogue_n=16, stages=2
    ),
  ),
  "moves": (
    Call(m=300, n=207, k=685),
    tuning.Config(**_SMALL | {"stages": 3}, cluster_k=4, epilogue_n=16),
  ),
  "moves_rounds": (
    Call(m=1000, n=1001, k=777, transpose_a=True, transpose_b=True),
    tuning.Config(block_m=128, block_n=128, stages=3, moves=True),
  ),
  "cluster": (
    Call(m=2048, n=2048, k=1024, bias="n", c_dtype=BF16),
    tuning.Config(**_TILE, cluster_m=2),
  ),
  # A round of clusters is no whole number of rows of tiles.
  "cluster_of_four": (
    Call(m=5000, n=1048, k=1032, transpose_b=True),
    tuning.Config(**_TILE, cluster_n=4),
  ),
  "gated": (
    Call(m=1024, n=1024, k=1000, gated=True, activation=jax.nn.silu),
    None,
  ),
  "swapped": (
    Call(m=300, n=1000, k=2000, bias="n", activation=jax.nn.gelu),
    tuning.Config(block_n=112, stages=4, epilogue_n=32, swap_ab=True),
  ),
  "swapped_with_c": (
    Call(m=300, n=2000, k=600, bias="n", c_dtype=BF16),
    tuning.Config(
      block_n=160, stages=4, epilogue_n=32, epilogue_buffers=5, swap_ab=True
    ),
  ),
  "overlap": (
    Call(m=1000, n=1000, k=600, transpose_b=True, c_dtype=BF16),
    tuning.Config(block_n=144, stages=4, epilogue_n=32),
  ),
  "pingpong": (
    Call(m=1000, n=1096, k=200, bias="n", c_dtype=BF16),
    tuning.Config(block_m=64, block_n=64, stages=8, split="pingpong"),
  ),
  "c_ahead": (
    Call(m=2000, n=2048, k=200, c_dtype=BF16),
    tuning.Config(**_TILE | {"epilogue_buffers": 1}),
  ),
  "half_deferred": (
    Call(m=3000, n=2048, k=300, out_dtype="float32"),
    tuning.Config(stages=4, epilogue_n=32),
  ),
  "shifted_inward": (
    Call(m=1200, n=3000, k=1000, transpose_a=True, bias="n", c_dtype=BF16),
    tuning.Config(**_TILE),
  ),
  "shifted_inward_in_a_cluster": (
    Call(m=2048, n=3000, k=1024, out_dtype="float32"),
    tuning.Config(**_TILE, epilogue_n=32, cluster_m=2),
  ),
  "swapped_and_transposed": (
    Call(m=200, n=3000, k=1000, transpose_a=True, bias="n", c_dtype=BF16),
    tuning.Config(
      block_n=208, stages=3, epilogue_n=32, epilogue_buffers=1, swap_ab=True
    ),
  ),
  "rows": (Call(m=1000, n=1001, k=512, activation=jax.nn.gelu), None),
  # Short sums: tiles end with columns that the next ones start with.
  "rows_of_tiles_that_overlap": (
    Call(m=1000, n=1001, k=200, bias="n", c_dtype=BF16),
    tuning.Config(**_TILE),
  ),
  "rows_of_tiles_that_overlap_in_a_row_of_two": (
    Call(m=1000, n=1003, k=256, out_dtype="float32"),
    tuning.Config(**_TILE, cluster_n=2, epilogue_n=32),
  ),
  "rows_of_tiles_that_overlap_in_a_column_of_two": (
    Call(m=1000, n=2047, k=256, transpose_b=True, activation=jax.nn.gelu),
    tuning.Config(**_TILE, cluster_m=2),
  ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_bits_every_time(name):
  call, config = REPEATED[name]
  x = call.operands()
  compute = jax.jit(functools.partial(call, config=config))
  call.assert_right(canaries.assert_same_bits(compute, x), x)


ROWS = (
  *range(1, 17), 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 101, 127, 128, 129,
  191, 193, 199, 255, 256, 257, 307, 383, 401, 499, 510, 511, 512,
)  # fmt: skip


@pytest.mark.parametrize(
  ("n", "k"), ((4096, 4096), (1000, 8192), (129, 515)), ids=str
)
def test_a_row_does_not_depend_on_the_batch(n, k):
  a, b = normal(ROWS[-1], k, dtype=BF16), normal(k, n, dtype=BF16)
  with pallas_gemm.batch_invariant():
    want = problems.bits(pallas_gemm.matmul(a, b)[:, None])
    for m in ROWS:
      got = problems.bits(pallas_gemm.matmul(a[:m], b)[:, None])
      np.testing.assert_array_equal(got, want[:m], err_msg=f"M = {m}")


def test_a_row_does_not_depend_on_where_it_is():
  a, b = normal(300, 4096, dtype=BF16), normal(4096, 1024, dtype=BF16)
  order = np.random.default_rng(0).permutation(300)
  with pallas_gemm.batch_invariant():
    want = pallas_gemm.matmul(a, b)[order]
    got = pallas_gemm.matmul(a[order], b)
  np.testing.assert_array_equal(problems.bits(got), problems.bits(want))


# Tiles hang over each of these results.
_SWAPPED = {"stages": 3, "epilogue_n": 32, "swap_ab": True}
CANARIES = (
  (Call(m=96, n=1000, k=256), None),
  (Call(m=80, n=136, k=64), tuning.Config(block_n=256, stages=3)),
  (
    Call(m=384, n=72, k=128, out_dtype="float32"),
    tuning.Config(
      block_m=256, block_n=128, stages=3, epilogue_n=32, cluster_m=2
    ),
  ),
  (Call(m=72, n=208, k=128), tuning.Config(block_n=96, **_SWAPPED)),
  (
    Call(m=104, n=208, k=128, c_dtype=BF16),
    tuning.Config(block_n=96, **_SWAPPED),
  ),
  (
    Call(m=72, n=208, k=128, transpose_b=True),
    tuning.Config(block_n=112, stages=3, epilogue_n=64),
  ),
  (Call(m=128, n=77, k=130), tuning.Config(**_SMALL)),
  (
    Call(m=128, n=77, k=131, transpose_b=True),
    tuning.Config(**_SMALL | {"block_n": 48}, epilogue_n=16, swap_ab=True),
  ),
)


@pytest.mark.parametrize(("call", "config"), CANARIES, ids=tuple("abcdefgh"))
def test_nothing_is_written_outside(call, config):
  x = call.operands()
  canaries.assert_written_inside(
    jax.jit(functools.partial(call, config=config)),
    x,
    check=lambda out: call.assert_right(out, x),
  )


# What runs.


def _kernels(f, *args) -> list[str]:
  compiled = jax.jit(f).lower(*args).compile()
  jax.block_until_ready(compiled(*args))
  with compat.cupti_session() as timings:
    jax.block_until_ready(compiled(*args))
  return [name for name, _ in timings]


@pytest.mark.parametrize("layout", ("nn", "nt", "tn", "tt"))
@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_one_kernel_whatever_the_layout(layout, dtype):
  left, right = (side == "t" for side in layout)
  how = {"dtype": dtype, "transpose_a": left, "transpose_b": right}
  call = Call(m=1024, n=1536, k=512, **how)
  (kernel,) = _kernels(call, call.operands())
  assert "sm90_dense" in kernel


def test_the_tail_is_fused():
  for call in (
    Call(m=512, n=512, k=512, bias="n", c_dtype=BF16, activation=jax.nn.gelu),
    Call(m=512, n=512, k=512, gated=True, activation=jax.nn.silu),
  ):
    (kernel,) = _kernels(call, call.operands())
    assert ("sm90_gated" if call.gated else "sm90_dense") in kernel


def test_float32_is_left_to_xla():
  a, b = normal(256, 256), normal(256, 256, seed=1)
  assert not any("sm90" in name for name in _kernels(pallas_gemm.matmul, a, b))


# Activations. With B the identity, what they are applied to is exact.

ACTIVATIONS = (
  *products.ACTIVATIONS,
  jax.nn.sigmoid,
  jax.nn.leaky_relu,
  jax.nn.soft_sign,
  jax.nn.squareplus,
  jnp.sin,
  jnp.exp,
  jnp.square,
  jax.nn.softplus,
  jax.nn.mish,
  jax.nn.elu,
  lax.erf,
)


@pytest.mark.parametrize("out_dtype", calls.OUT_DTYPES)
@pytest.mark.parametrize(
  "activation",
  ACTIVATIONS,
  ids=lambda f: getattr(f, "__name__", "gelu_by_erf"),
)
def test_activations(activation, out_dtype):
  z = (2 * normal(256, 64)).astype(BF16)
  eye = jnp.eye(64, dtype=BF16)
  epilogue = {"activation": activation}
  out = pallas_gemm.matmul(
    z, eye, out_dtype=out_dtype, implementation="sm90", **epilogue
  )
  products.assert_product(out, z, eye, **epilogue)


# Derivatives.


@pytest.mark.parametrize("activation", gradients.ACTIVATIONS)
@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("with_c", (False, True))
def test_gradients(activation, dtype, with_c):
  gradients.assert_right((200, 264, 136), dtype, activation, with_c)


# Beyond one call.


def test_export():
  call = Call(m=200, n=256, k=128, bias="n", activation=jax.nn.silu)
  x = call.operands()
  exported = export.export(jax.jit(call), platforms=("cuda",))(x)
  assert "mosaic_gpu" in exported.mlir_module()
  again = export.deserialize(exported.serialize())
  out = again.call(x)
  call.assert_right(out, x)
  np.testing.assert_array_equal(problems.bits(out), problems.bits(call(x)))


@pytest.mark.parametrize("check_vma", (True, False))
def test_shard_map(check_vma):
  call = Call(m=256, n=264, k=136, bias="n", activation=jax.nn.silu)
  x = call.operands()
  mesh = jax.make_mesh(
    (1,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
  )
  sharded = jax.shard_map(
    functools.partial(call, implementation="sm90"),
    mesh=mesh,
    in_specs=({"a": P("d"), "b": P(), "bias": P()},),
    out_specs=P("d"),
    check_vma=check_vma,
  )
  call.assert_right(jax.jit(sharded)(x), x)
