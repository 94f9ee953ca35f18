"""Exported functions of any number of rows, that keep their kernels."""

import functools
import io
import os
from pathlib import Path
import subprocess
import sys
import zipfile

from absl import logging
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import report, serving
from tests.support import ops, stand_in
from tests.support.products import assert_product, normal

PLATFORMS = "cpu", "cuda"
# On a size, just below one, just above, in the middle.
ROWS = 1, 2, 7, 9, 16, 17
SIZES = 1, 8, 16, 32


def _shape(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def exported(fn=pallas_gemm.matmul, x=(1, 16), sizes=SIZES, **how):
  """Of x [M, 16], or of another shape, and w [16, 8], in float32."""
  return pallas_gemm.export_buckets(
    fn, _shape(*x), _shape(16, 8), sizes=sizes, **how
  )


@pytest.fixture(scope="module")
def served():
  return exported(platforms=PLATFORMS)


@pytest.mark.parametrize("rows", ROWS)
def test_rows(served, rows):
  x, w = normal(rows, 16), normal(16, 8)
  out = served(x, w)
  assert out.dtype == "float32" and out.shape == (rows, 8)
  assert_product(out, x, w)
  np.testing.assert_array_equal(jax.jit(served)(x, w), out)


def test_the_next_size_runs(served):
  """And no other: its program is in the lowered call."""
  for rows, size in ((2, 8), (8, 8), (9, 16)):
    shapes = _shape(rows, 16), _shape(16, 8)
    text = ops.lowered(served.__call__, *shapes, platform="cpu")
    assert f"tensor<{size}x16xf32>" in text
    others = {*SIZES} - {size, rows, 16, 8}
    assert not [other for other in others if f"tensor<{other}x16xf32>" in text]


def _kernels(text) -> int:
  return text.count("@mosaic_gpu")


def test_kernels_are_in_each_module():
  """A layer of two products has two in each, for CUDA; the CPU has none.

  What was read holds the kernel of the next size, too.
  """

  def layer(x, gate, down):
    h = pallas_gemm.gated_matmul(x, gate, gate)
    return pallas_gemm.matmul(h, down, activation=jnp.tanh)

  shapes = [
    _shape(*shape, dtype="bfloat16")
    for shape in ((1, 1024), (1024, 2048), (2048, 1024))
  ]
  of = functools.partial(pallas_gemm.export_buckets, layer, *shapes)
  found = of(platforms=PLATFORMS, sizes=SIZES)
  assert [_kernels(x.mlir_module()) for x in found.exported] == [2] * 4
  (alone,) = of(platforms=("cpu",), sizes=(8,)).exported
  assert _kernels(alone.mlir_module()) == 0
  again = serving.Buckets.deserialize(found.serialize())
  args = _shape(5, 1024, dtype="bfloat16"), *shapes[1:]
  assert _kernels(ops.lowered(again.__call__, *args)) == 2


def test_a_kernel_of_padded_rows():
  """Whose sizes are those of the bucket; here the stand-in on the CPU."""
  product = functools.partial(pallas_gemm.matmul, implementation="sm90")
  with stand_in.installed() as calls:
    served = exported(product, sizes=(1, 8))
  assert [call.shapes[0] for call in calls] == [(1, 1, 16), (1, 8, 16)]
  x, w = normal(5, 16), normal(16, 8)
  assert_product(served(x, w), x, w)


def test_gradients(served):
  """They are the function's where it was exported, and not serialized."""
  x, w = normal(5, 16), normal(16, 8)

  def gradients(served):
    return jax.grad(lambda x, w: (served(x, w) ** 2).sum(), (0, 1))(x, w)

  want = gradients(pallas_gemm.matmul)
  for one, other in zip(gradients(served), want):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
  again = serving.Buckets.deserialize(served.serialize())
  with pytest.raises(ValueError, match="VJP"):
    gradients(again)


# Arguments and results.


def test_trees_of_arguments_and_results():
  """Weights in a tree; every result has the rows of x."""

  def layer(x, params, scale):
    h = pallas_gemm.matmul(x, params["w"], bias=params["bias"])
    return {"h": h, "parts": (h * scale, x.sum(1))}

  params = {"w": normal(16, 8), "bias": normal(8)}
  served = pallas_gemm.export_buckets(
    layer, normal(3, 16), params, 2.0, sizes=(4, 8)
  )
  for rows in (1, 4, 5):
    x = normal(rows, 16)
    got, want = served(x, params, 2.0), layer(x, params, 2.0)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# Sizes.


def test_sizes_are_sorted():
  """Rows of x are not those that it was given with; what follows M stays."""
  served = exported(x=(999, 3, 16), sizes=(8, 1, 8))
  assert served.sizes == (1, 8)
  shapes = [x.in_avals[0].shape for x in served.exported]
  assert shapes == [(1, 3, 16), (8, 3, 16)]
  x, w = normal(2, 3, 16), normal(16, 8)
  assert_product(served(x, w), x, w)
  # By default 1 and powers of two.
  assert serving.SIZES == (1, *(2**i for i in range(3, 13)))


@pytest.mark.parametrize(
  ("error", "words", "sizes"),
  [
    *((ValueError, "positive numbers", x) for x in ((), (0,), (0, 8), (-1,))),
    *(
      (TypeError, "a sequence of integers", x)
      for x in (8, (1.0, 8), "18", (True, 8))
    ),
  ],
)
def test_wrong_sizes(error, words, sizes):
  with pytest.raises(error, match=f"sizes must be {words}"):
    exported(sizes=sizes)


@pytest.mark.parametrize(
  "fn", (lambda x: x.sum(0), lambda x: x.T, lambda x: (2 * x, x.mean()))
)
def test_results_have_rows(fn):
  with pytest.raises(ValueError, match="must all have M rows, got one"):
    pallas_gemm.export_buckets(fn, _shape(1, 4), sizes=(4, 8))


@pytest.mark.parametrize(
  ("sizes", "fn"),
  [
    ((1,), lambda x: x @ x.T),
    ((8,), lambda x: (x, {"scores": x @ x.T})),
    ((1, 8), lambda x: jnp.zeros((x.shape[0], 2 * x.shape[0]))),
    ((4, 16), lambda x: x[:, :1].repeat(x.shape[0] - 1, 1)),
    ((1,), lambda x: x[:, : x.shape[0]]),
    ((4, 16), lambda x: [x] * x.shape[0]),
  ],
)
def test_rows_are_in_one_dimension(fn, sizes):
  """A call would cut the first alone."""
  message = "depend on M in their first dimension alone, got"
  with pytest.raises(ValueError, match=message):
    pallas_gemm.export_buckets(fn, _shape(1, 12), sizes=sizes)


def test_a_function_of_its_sizes_alone():
  """It need not take other numbers of rows."""
  fn = lambda x: x.reshape(-1, 4, 12).sum(2).reshape(-1)  # noqa: E731
  x = normal(5, 12)
  out = pallas_gemm.export_buckets(fn, x, sizes=(8, 16))(x)
  np.testing.assert_array_equal(out, fn(jnp.pad(x, ((0, 3), (0, 0))))[:5])


def test_the_rows_come_first():
  w = jnp.ones((4, 2))
  with pytest.raises(TypeError, match=r"x, the first argument .*, got dict"):
    pallas_gemm.export_buckets(lambda params, x: x @ params["w"], {"w": w}, w)
  with pytest.raises(ValueError, match="x must have rows, got a scalar"):
    pallas_gemm.export_buckets(pallas_gemm.matmul, jnp.float32(1), w)


@pytest.mark.parametrize("rows", (33, 4096))
def test_too_many_rows(served, rows):
  message = f"x must have at most 32 rows, got {rows}"
  with pytest.raises(ValueError, match=message):
    served(normal(rows, 16), normal(16, 8))


def test_no_array_of_rows(served):
  with pytest.raises(ValueError, match=r"x must have rows, got shape \(\)"):
    served(3.0, normal(16, 8))
  with pytest.raises(ValueError, match=r"rows of shape \(16,\), got \(\)"):
    served(normal(16), normal(16, 8))
  with pytest.raises(TypeError, match="x must be an array, got list"):
    served([[1.0]], normal(16, 8))


def test_no_rows(served):
  """They are padded to the smallest size; the result has none."""
  assert served(normal(0, 16), normal(16, 8)).shape == (0, 8)


# Artifacts.


def test_serialized(served):
  again = serving.Buckets.deserialize(served.serialize())
  assert again.sizes == served.sizes
  for one, other in zip(again.exported, served.exported):
    assert one.mlir_module() == other.mlir_module()
    assert one.platforms == PLATFORMS


def _zip(**files):
  data = io.BytesIO()
  with zipfile.ZipFile(data, "w") as file:
    for name, text in files.items():
      file.writestr(name, text)
  return data.getvalue()


@pytest.mark.parametrize(
  "broken",
  (
    lambda data: b"junk",
    lambda data: b"",
    lambda data: bytearray(b"junk"),
    lambda data: data[: len(data) // 2],
    lambda data: data[:-3],
    lambda data: data[3:],
    lambda data: data[:60] + b"junk" + data[64:],
    lambda data: _zip(),
    lambda data: _zip(model="weights"),
    lambda data: _zip(**{"8": "junk"}),
    lambda data: _zip(**{"0": "junk"}),
  ),
)
def test_bytes_that_are_something_else(served, broken):
  message = r"data must be what Buckets.serialize gave, got \d+ bytes"
  with pytest.raises(ValueError, match=message):
    serving.Buckets.deserialize(broken(served.serialize()))


@pytest.mark.parametrize("data", ("junk", 3, None, [b"junk"]))
def test_no_bytes(data):
  message = f"data must be bytes, got {type(data).__name__}"
  with pytest.raises(TypeError, match=message):
    serving.Buckets.deserialize(data)


# Prints how far results are off x @ w at most, for each number of rows. The
# package is needed for the class that reads the file alone.
READER = """
import sys
import numpy as np
from pallas_gemm import serving
from tests.support.products import normal

with open(sys.argv[1], "rb") as data:
  served = serving.Buckets.deserialize(data.read())
w = normal(16, 8)
for m in map(int, sys.argv[2:]):
  x = normal(m, 16)
  print(np.abs(np.asarray(served(x, w)) - np.asarray(x) @ np.asarray(w)).max())
"""


def test_another_process_reads_it(served, tmp_path):
  file = tmp_path / "served.zip"
  file.write_bytes(served.serialize())
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", READER, str(file), *map(str, ROWS)],
    cwd=Path(__file__).parent.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  off = [float(line) for line in done.stdout.splitlines()]
  assert len(off) == len(ROWS) and max(off) < 1e-4


def test_symbolic_sizes_are_left_to_xla_with_one_warning(monkeypatch):
  warned = []
  monkeypatch.setattr(
    logging, "warning", lambda form, *args: warned.append(form % args)
  )
  report.reset()
  (rows,) = export.symbolic_shape("m")
  f = export.export(jax.jit(pallas_gemm.matmul), platforms=["cuda"])
  for lead in ((), (2,)):
    x = _shape(*lead, rows, 256, dtype="bfloat16")
    found = f(x, _shape(256, 512, dtype="bfloat16"))
    assert "mosaic_gpu" not in found.mlir_module()
  (message,) = warned
  assert "export_buckets" in message


def test_weights_of_this_package_are_serialized():
  w = normal(16, 8)
  q, s = pallas_gemm.quantize(w, block=(None, 1)), pallas_gemm.split(w)
  f = lambda x, q, s: pallas_gemm.matmul(x, q) + pallas_gemm.matmul(x, s)  # noqa: E731
  served = pallas_gemm.export_buckets(f, _shape(1, 16), q, s, sizes=(4,))
  data, x = served.serialize(), normal(3, 16)
  got = serving.Buckets.deserialize(data)(x, q, s)
  assert np.array_equal(got, served(x, q, s))


@pytest.mark.parametrize(
  ("args", "words"),
  [
    ((_shape(1, 16), "relu"), "arguments behind x must be arrays or their"),
    ((jax.random.split(jax.random.key(0)),), "x must hold numbers, got key"),
  ],
)
def test_no_numbers(args, words):
  with pytest.raises(TypeError, match=words):
    pallas_gemm.export_buckets(lambda x, *rest: x, *args)


def test_a_symbolic_number_of_groups():
  (groups,) = export.symbolic_shape("groups")
  f = functools.partial(pallas_gemm.ragged_dot, group_offset=jnp.int32(1))
  shapes = _shape(8, 4), _shape(2, 4, 3), _shape(groups, dtype="int32")
  sizes = jnp.array([2, 2, 2, 2])
  args = normal(8, 4), normal(2, 4, 3), sizes
  got = export.export(jax.jit(f))(*shapes).call(*args)
  assert np.array_equal(got, f(*args))
