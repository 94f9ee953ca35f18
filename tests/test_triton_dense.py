"""The Triton matmul: arguments, legality, choice of config, lowering, numbers.

Triton's interpreter runs the kernel's own code on the CPU (float32 and
float16; it multiplies bfloat16 operands as the integers that hold their bits).
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import hardware, numerics
from pallas_gemm.kernels import triton_dense, triton_kernel
from pallas_gemm.problem import Problem

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
SMALL_SHARED = "NVIDIA GeForce RTX 4090"
TILE = triton_dense.Config(64, 64, 32)
HALF = jnp.bfloat16


def problem_of(m, n, k, dtype="float32") -> Problem:
  return Problem.flat(m=m, n=n, k=k, dtype=dtype, out_dtype=dtype)


def zeros(*shape, dtype=jnp.float32):
  return jnp.zeros(shape, dtype)


PROBLEM = problem_of(256, 256, 256, "bfloat16")
HALVES, TF32 = zeros(2, 2, dtype=HALF), {"precision": "tf32"}


def child(code: str, **environment: str) -> str:
  """Standard output of a fresh interpreter that runs `code`."""
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    cwd=pathlib.Path(__file__).parents[1],
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


# What users get wrong.


@pytest.mark.parametrize(
  ("error", "words", "arguments"),
  [
    (TypeError, "int32", {"a": zeros(3, 4, dtype=jnp.int32)}),
    (ValueError, "K = 4", {"b": zeros(3, 5)}),
    (ValueError, "c is None", {"beta": 1.0}),
    (ValueError, "precision must be one of", {"precision": "high"}),
    (ValueError, "'ieee' for bfloat16", {"a": HALVES, "b": HALVES, **TF32}),
    (TypeError, "triton_dense.Config", {"config": (64, 64, 32)}),
    (
      ValueError,
      "not legal: block_m",
      {"config": dataclasses.replace(TILE, block_m=48)},
    ),
  ],
)
def test_wrong_arguments(error, words, arguments):
  arguments = {"a": zeros(3, 4), "b": zeros(4, 5)} | arguments
  with pytest.raises(error, match=words):
    triton_dense.matmul(**arguments)


# Where it can't run.


def test_names_the_device_that_it_needs():
  if jax.default_backend() != "cpu":
    pytest.skip("the default device is no CPU")
  a = zeros(2, 2)
  for f in (triton_dense.matmul, triton_dense.autotune):
    with pytest.raises(NotImplementedError, match=r"CUDA or ROCm device.*cpu"):
      f(a, a)


@pytest.mark.parametrize("package", ["triton", "jax_triton"])
def test_names_the_package_that_is_missing(package, monkeypatch):
  find = triton_dense.importlib.util.find_spec
  spec = find("json")  # of a package that is there

  def find_spec(name):
    return None if name == package else spec if "triton" in name else find(name)

  monkeypatch.setattr(triton_dense.importlib.util, "find_spec", find_spec)
  triton_dense._missing_package.cache_clear()
  distribution = package.replace("_", "-")
  try:
    with hardware.assume(H200):
      with pytest.raises(NotImplementedError, match=f"package {distribution},"):
        triton_dense.matmul(zeros(2, 2), zeros(2, 2))
  finally:
    triton_dense._missing_package.cache_clear()


def test_import_needs_no_triton():
  child("""
      import sys
      sys.modules["triton"] = sys.modules["jax_triton"] = None
      from pallas_gemm.kernels import triton_dense
      assert triton_dense.CONFIGS
      """)


# Legality and the choice of a config.


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"block_m": 8}, "block_m must be a power of two >= 16, got 8"),
    ({"block_n": 96}, "block_n must be a power of two"),
    ({"block_k": 24}, "block_k must be a power of two"),
    ({"block_k": 0}, "block_k must be an int >= 1"),
    ({"group_m": 0}, "group_m must be an int >= 1"),
    ({"num_warps": 3}, "num_warps must be a power of two"),
    ({"num_warps": 64}, "num_warps must be a power of two <= 32"),
    ({"num_stages": True}, "num_stages must be an int"),
    ({"block_m": 256, "block_n": 256}, "512 accumulators a thread"),
    ({"num_stages": 40}, "shared memory"),
  ],
)
def test_illegal(change, words):
  config = dataclasses.replace(TILE, **change)
  assert words in (triton_dense.is_legal(config, PROBLEM) or "legal")


def test_legal():
  for config in (TILE, *triton_dense.CONFIGS):
    assert triton_dense.is_legal(config, PROBLEM) is None, config
  with hardware.assume(SMALL_SHARED):
    reason = triton_dense.is_legal(triton_dense.CONFIGS[0], PROBLEM)
  assert "shared memory" in reason


@pytest.mark.parametrize("gpu", [H200, A100, SMALL_SHARED])
@pytest.mark.parametrize("dtype", triton_dense.DTYPES)
@pytest.mark.parametrize("precision", triton_dense.PRECISIONS)
def test_default_config_is_legal(gpu, dtype, precision):
  with hardware.assume(gpu):
    for m in (1, 16, 17, 4095, 4096, 2**20):
      for n in (1, 64, 4096):
        for k in (1, 64, 4095):
          problem = problem_of(m, n, k, dtype)
          config = triton_dense.default_config(problem, precision)
          assert triton_dense.is_legal(config, problem) is None


def test_default_config_fills_the_gpu():
  with hardware.assume(H200) as gpu:
    for size in (1024, 2048, 4096, 8192):
      problem = problem_of(size, size, size, "bfloat16")
      config = triton_dense.default_config(problem)
      blocks = (size // config.block_m) * (size // config.block_n)
      assert blocks >= gpu.sm_count or config.block_m == 64


@pytest.mark.parametrize(
  ("shape", "needs"),
  [
    ((4096, 4096, 4096), False),
    ((2**16, 2**15, 1), True),  # C has 2^31 elements
    ((2**16, 1, 2**15), True),
    ((1, 2**16, 2**15), True),
    # The elements fit, what a masked edge addresses does not.
    ((1, 2**26, 1), True),
  ],
)
def test_offsets_of_64_bits_where_32_overflow(shape, needs):
  assert triton_kernel.needs_int64(TILE, problem_of(*shape)) == needs


# Autotuning, with a stand-in for the kernel.


@pytest.fixture
def tunable(monkeypatch):
  """`autotune` on any device; yields the configs that were launched."""
  launched = []

  def launch(a, b, c, alpha, beta, *, problem, config, precision):
    launched.append(config)
    return a @ b

  monkeypatch.setattr(triton_kernel, "launch", launch)
  monkeypatch.setattr(triton_dense, "unavailable_reason", lambda: None)
  monkeypatch.setattr(triton_dense, "_best", {})
  return launched


def test_autotune_remembers_the_fastest(tunable):
  a, b = zeros(32, 48), zeros(48, 16)
  want = triton_dense.CONFIGS[-2]
  seen = []

  def measure(runs):
    seen.extend(runs)
    for run in runs.values():
      assert run().shape == (32, 16)
    return {name: float(name != str(want)) for name in runs}

  problem = problem_of(32, 16, 48)
  assert triton_dense.best_config(problem) == triton_dense.default_config(
    problem
  )
  assert triton_dense.autotune(a, b, measure=measure) == want
  assert seen == [
    str(config)
    for config in triton_dense.CONFIGS
    if triton_dense.is_legal(config, problem) is None
  ]
  assert triton_dense.best_config(problem) == want
  # Other shapes, dtypes and precisions were not tuned.
  assert not any(
    triton_dense._key(other, precision) in triton_dense._best
    for other, precision in (
      (problem_of(32, 16, 47), "ieee"),
      (problem_of(32, 16, 48, "float16"), "ieee"),
      (problem, "tf32"),
    )
  )
  tunable.clear()
  jax.jit(triton_dense.matmul)(a, b)
  assert tunable == [want]


def test_autotune_measures_by_itself(tunable):
  pair = triton_dense.CONFIGS[-2:]
  assert (
    triton_dense.autotune(zeros(16, 16), zeros(16, 16), configs=pair) in pair
  )


def test_autotune_needs_a_legal_config_and_concrete_arrays(tunable):
  a, bad = zeros(16, 16), dataclasses.replace(TILE, num_warps=3)
  with pytest.raises(ValueError, match="configs must hold a legal config"):
    triton_dense.autotune(a, a, configs=(bad,))
  with pytest.raises(TypeError, match="a must be a concrete array"):
    jax.jit(lambda a: triton_dense.autotune(a, a) and a)(a)


# Lowering for a GPU that is not there.


def lowered(gpu, m, n, k, dtype, **options):
  """StableHLO of a matmul for that GPU; skips without jax-triton."""
  with hardware.assume(gpu):
    if (reason := triton_dense.unavailable_reason()) is not None:
      pytest.skip(reason)
    shapes = [
      jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n), (m, n))
    ]
    f = jax.jit(lambda a, b, c: triton_dense.matmul(a, b, c, **options))
    return f.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("config", triton_dense.CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", triton_dense.DTYPES)
def test_lowers_each_config(config, dtype):
  problem = problem_of(300, 264, 520, dtype)
  if (reason := triton_dense.is_legal(config, problem)) is not None:
    pytest.skip(reason)
  text = lowered(H200, 300, 264, 520, dtype, config=config)
  assert text.count("@triton_kernel_call") == 1


@pytest.mark.parametrize(
  ("gpu", "shape", "dtype", "options"),
  [
    *itertools.product(
      [H200, A100],
      [(1, 1, 1), (129, 257, 65), (16, 512, 1024)],
      triton_dense.DTYPES,
      [{"alpha": 1.5, "beta": -2.0}],
    ),
    (H200, (128, 128, 128), "float32", TF32),
    (H200, (2**16, 2**16, 64), "bfloat16", {}),  # with offsets of 64 bits
  ],
)
def test_lowers_the_default(gpu, shape, dtype, options):
  assert "@triton_kernel_call" in lowered(gpu, *shape, dtype, **options)


@pytest.mark.parametrize(
  ("shape", "options"),
  [
    ((3, 5, 0), {}),
    ((3, 5, 0), {"beta": 2.0}),
    ((0, 5, 4), {}),
    ((3, 5, 4), {"alpha": 0.0, "beta": 2.0}),
  ],
)
def test_nothing_to_multiply_launches_nothing(shape, options):
  m, n, k = shape
  with hardware.assume(H200):
    if (reason := triton_dense.unavailable_reason()) is not None:
      pytest.skip(reason)
    f = jax.jit(lambda a, b, c: triton_dense.matmul(a, b, c, **options))
    arguments = zeros(m, k) + jnp.nan, zeros(k, n), jnp.ones((m, n))
    trace = f.trace(*arguments)
  text = trace.lower(lowering_platforms=("cpu",))
  assert "triton" not in text.as_text()
  np.testing.assert_array_equal(
    text.compile()(*arguments), np.full((m, n), options.get("beta", 0.0))
  )


# Numbers.


def test_numbers_in_the_interpreter():
  pytest.importorskip("triton")
  shapes = [(1, 1, 1), (64, 32, 48), (65, 33, 47), (16, 100, 7)]
  cases = [
    (shape, dtype, (16, 32, 16, group), alpha, beta, wide)
    for shape in shapes
    for dtype, group, alpha, beta, wide in (
      ("float32", 1, 1.0, 0.0, False),
      ("float32", 3, 1.5, -2.0, True),
      ("float16", 2, 1.0, 1.0, False),
    )
  ]
  code = f"from tests.support import triton_numbers as x; x.run({cases})"
  printed = child(code, TRITON_INTERPRET="1").splitlines()
  assert len(printed) == len(cases)
  for line in printed:
    case, passed, worst = json.loads(line)
    assert passed, (case, worst)


@pytest.fixture
def device():
  if (reason := triton_dense.unavailable_reason()) is not None:
    pytest.skip(reason)


def normal(*shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", triton_dense.DTYPES)
@pytest.mark.parametrize(
  "shape",
  [(1, 1, 1), (16, 16, 16), (129, 257, 65), (16, 512, 1024), (1023, 511, 77)],
)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.5, -2.0)])
def test_numbers_on_the_device(dtype, shape, alpha, beta, device):
  m, n, k = shape
  a, b, c = (normal(*x, dtype=dtype) for x in ((m, k), (k, n), (m, n)))
  f = jax.jit(lambda *x: triton_dense.matmul(*x, alpha=alpha, beta=beta))
  out = f(a, b, c)
  assert out.dtype == a.dtype
  assert numerics.check(out, a, b, c, alpha=alpha, beta=beta).passed
  assert jnp.array_equal(out, f(a, b, c))


@pytest.mark.gpu
def test_tf32_on_the_device(device):
  a = normal(256, 256)
  out = triton_dense.matmul(a, a, precision="tf32")
  assert numerics.check(out, a, a, tf32=True).passed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", triton_dense.DTYPES)
def test_autotune_on_the_device(dtype, device):
  a, problem = normal(512, 512, dtype=dtype), problem_of(512, 512, 512, dtype)
  best = triton_dense.autotune(a, a)
  assert best in triton_dense.CONFIGS
  assert triton_dense.best_config(problem) == best
  for config in triton_dense.CONFIGS:
    if triton_dense.is_legal(config, problem) is None:
      out = triton_dense.matmul(a, a, config=config)
      assert numerics.check(out, a, a).passed, config
