"""Which implementation runs, what is said about it, and what is never run."""

import threading

from absl import logging
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import hardware, report, tuning
from pallas_gemm.ops import implementations, invariance
from tests.support import mistakes, products
from tests.support.products import normal

A, B = normal(64, 64, dtype="bfloat16"), normal(64, 128, dtype="bfloat16")
CONFIG = tuning.Config()


@pytest.fixture(name="log")
def _log(monkeypatch):
  """What is logged, as if it were the first time."""
  messages = []
  monkeypatch.setattr(report, "_said", set())
  monkeypatch.setattr(
    logging, "info", lambda form, *args: messages.append(form % args)
  )
  jax.clear_caches()
  yield messages
  jax.clear_caches()


@pytest.fixture(name="stubs")
def _stubs(monkeypatch):
  """Implementations that only record that they were called."""
  calls = []

  def refuse(name):
    def stub(x, spec):
      del x, spec
      calls.append(name)
      raise NotImplementedError(f"{name} is not in the mood")

    return stub

  for name in ("sm90", "triton"):
    stub = implementations.Implementation(refuse(name), lambda *_: None)
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, stub)
  jax.clear_caches()
  yield calls
  jax.clear_caches()


def lowered(f, *args, platforms=("cuda",)) -> str:
  return jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()


def test_order_and_reasons(stubs, log):
  pallas_gemm.matmul(A, B, implementation=["triton", "sm90", "xla"])
  assert stubs == ["triton", "sm90"]
  (message,) = log
  assert "runs on 'xla'" in message
  assert "triton: triton is not in the mood; sm90: sm90 is" in message


def test_refusal_by_all_lists_every_reason(stubs):
  with pytest.raises(NotImplementedError) as error:
    pallas_gemm.matmul(A, B, implementation=("triton", "sm90"))
  assert stubs == ["triton", "sm90"]
  assert "triton: triton is not" in str(error.value)
  assert "sm90: sm90 is not" in str(error.value)


def test_defaults_of_platforms(stubs):
  lowered(pallas_gemm.matmul, A, B, platforms=("cpu",))
  assert stubs == []
  lowered(pallas_gemm.matmul, A, B)
  assert stubs == ["sm90"]


def test_only_not_implemented_moves_on(monkeypatch):
  def broken(x, spec):
    raise ValueError("a bug")

  stub = implementations.Implementation(broken, lambda *_: None)
  monkeypatch.setitem(implementations.IMPLEMENTATIONS, "sm90", stub)
  with pytest.raises(ValueError, match="a bug"):
    pallas_gemm.matmul(A, B, implementation=("sm90", "xla"))


def test_logs_once(log):
  for _ in range(2):
    pallas_gemm.matmul(A, B)
    jax.clear_caches()
  assert len(log) == 1 and "M 64, N 128, K 64, NN runs on 'xla'" in log[0]
  pallas_gemm.matmul(A, B, activation=jnp.tanh)
  assert len(log) == 2 and "+ activation" in log[1]


REFUSED_BY_SM90 = (
  ("float32", {}, "operands must be bfloat16 or float16"),
  ("bfloat16", {"precision": "TF32_TF32_F32"}, "precision"),
)


@pytest.mark.parametrize(("dtype", "keywords", "reason"), REFUSED_BY_SM90)
def test_what_sm90_refuses(dtype, keywords, reason):
  with pytest.raises(NotImplementedError, match=f"sm90: .*{reason}"):
    pallas_gemm.matmul(
      A.astype(dtype), B.astype(dtype), implementation="sm90", **keywords
    )


def test_sm90_refuses_other_gpus():
  with hardware.assume("A100-SXM4-80GB"):
    with pytest.raises(NotImplementedError, match=r"capability 9\.0"):
      f = jax.jit(lambda a, b: pallas_gemm.matmul(a, b, implementation="sm90"))
      f.trace(A, B).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in lowered(pallas_gemm.matmul, A, B)


@pytest.mark.parametrize(
  "precision", (None, "highest", "fastest", "BF16_BF16_F32"), ids=str
)
def test_precisions_that_are_the_same(precision):
  text = lowered(
    lambda a, b: pallas_gemm.matmul(a, b, precision=precision, config=CONFIG),
    A,
    B,
  )
  assert "mosaic_gpu" in text


REFUSED_BY_TRITON = (
  ({"transpose_a": True}, "no transposed operand"),
  ({"activation": jnp.tanh}, "no activation"),
  ({"bias": normal(128)}, "no bias"),
  ({"out_dtype": "float32"}, "one dtype"),
  ({}, "CUDA or ROCm"),
)


@pytest.mark.parametrize(("keywords", "reason"), REFUSED_BY_TRITON)
def test_what_triton_refuses(keywords, reason):
  with pytest.raises(NotImplementedError, match=f"triton: .*{reason}"):
    pallas_gemm.matmul(A, B, implementation="triton", **keywords)


# Ahead of time, for a GPU that this machine does not have.


@pytest.mark.parametrize(
  "keywords",
  (
    {},
    {"activation": jax.nn.gelu, "bias": normal(128)},
    {"c": normal(64, 128), "beta": 0.5},
    {"out_dtype": "float32"},
  ),
  ids=("plain", "activation", "c", "float32"),
)
def test_lowers_for_cuda(keywords):
  config = tuning.Config(epilogue_n=32, stages=3)
  f = lambda a, b: pallas_gemm.matmul(a, b, config=config, **keywords)  # noqa: E731
  text = lowered(f, A, B)
  assert "mosaic_gpu" in text and "dot_general" not in text
  assert "mosaic_gpu" not in lowered(f, A, B, platforms=("cpu",))


def test_lowers_for_cuda_with_wide_indices():
  with jax.enable_x64(True):
    f = lambda a, b: pallas_gemm.matmul(a, b, config=CONFIG)  # noqa: E731
    assert "mosaic_gpu" in lowered(f, A, B)


def test_exports_for_both_platforms():
  f = jax.jit(lambda a, b: pallas_gemm.matmul(a, b, config=CONFIG))
  exported = export.export(f, platforms=("cpu", "cuda"))(A, B)
  assert "mosaic_gpu" in exported.mlir_module()
  again = export.deserialize(exported.serialize())
  products.assert_product(again.call(A, B), A, B)


@pytest.mark.parametrize(
  "platforms", (("tpu",), ("rocm",), ("cpu", "tpu"), ("cuda", "rocm"))
)
@pytest.mark.parametrize("op", ("matmul", "ragged_dot"))
def test_exports_where_no_kernel_runs(op, platforms):
  """XLA's product, if it is asked for too."""
  sizes = jnp.array([A.shape[0]])
  with_groups = lambda a, b, **how: pallas_gemm.ragged_dot(  # noqa: E731
    a, b[None], sizes, **how
  )
  f = pallas_gemm.matmul if op == "matmul" else with_groups

  def exported(names):
    of = jax.jit(lambda a, b: f(a, b, implementation=names))
    return export.export(of, platforms=platforms)(A, B)

  other = next(x for x in platforms if x in ("tpu", "rocm"))
  with pytest.raises(
    NotImplementedError, match=f"runs on CUDA, .*not on {other}"
  ):
    exported("sm90")
  assert exported(("sm90", "xla")).platforms == platforms
  assert exported(None).platforms == platforms


# Batch invariance.


def test_batch_invariance_is_a_context_a_decorator_and_nests():
  traced = []

  @jax.jit
  def f(a, b):
    traced.append(invariance.is_batch_invariant())
    return pallas_gemm.matmul(a, b)

  f(A, B)  # Compiled outside: compiled again inside.
  with pallas_gemm.batch_invariant():
    with pallas_gemm.batch_invariant():
      assert invariance.is_batch_invariant()
    assert invariance.is_batch_invariant()
    f(A, B)
  assert not invariance.is_batch_invariant()
  f(A, B)
  pallas_gemm.batch_invariant()(lambda: f(A, B))()
  f(A, B)
  assert traced == [False, True]


def test_batch_invariance_is_the_threads_own():
  outs = []
  with pallas_gemm.batch_invariant():
    thread = threading.Thread(
      target=lambda: outs.append(pallas_gemm.matmul(A, B))
    )
    thread.start()
    thread.join()
  products.assert_product(outs[0], A, B)


# Sums over devices.


@pytest.mark.parametrize("op", mistakes.CALLS)
def test_products_of_derivatives_are_reduced_alike(op):
  """All that are derived from a call, of a vmap's too."""
  call = {k: v for k, v in mistakes.CALLS[op].items() if k not in ("bias", "c")}
  names = [k for k, v in call.items() if getattr(v, "ndim", 0) > 1]

  def loss(x):
    out = getattr(pallas_gemm, op)(**call | x, reduce_dtype="bfloat16")
    return jnp.sum(out**2)

  x = {name: jnp.stack([call[name]] * 2) for name in names}
  text = str(jax.make_jaxpr(jax.vmap(jax.value_and_grad(loss)))(x))
  assert text.count("reduce_dtype=dtype(bfloat16)") >= 1 + len(names)
  assert "reduce_dtype=None" not in text


# Nothing to multiply.


@pytest.mark.parametrize("implementation", ("xla", "sm90"))
@pytest.mark.parametrize(
  ("a", "b"),
  (
    ((0, 5), (5, 4)),
    ((3, 5), (5, 0)),
    ((0, 3, 5), (5, 4)),
    ((0, 3, 5), (0, 5, 4)),
  ),
  ids=str,
)
def test_empty_results(implementation, a, b):
  a, b = (normal(*shape, dtype="bfloat16") for shape in (a, b))
  out = pallas_gemm.matmul(a, b, implementation=implementation)
  assert out.shape == jnp.matmul(a, b).shape and out.dtype == jnp.bfloat16
  for grad in jax.grad(
    lambda a, b: pallas_gemm.matmul(a, b, activation=jnp.tanh).sum(), (0, 1)
  )(a, b):
    assert not np.asarray(grad, float).any()


@pytest.mark.parametrize("implementation", ("xla", "sm90"))
def test_k_of_zero(implementation):
  a, b = normal(3, 0, dtype="bfloat16"), normal(0, 4, dtype="bfloat16")
  epilogue = {
    "c": normal(3, 4, dtype="bfloat16"),
    "beta": 2.0,
    "bias": normal(4, dtype="bfloat16"),
    "activation": jnp.tanh,
  }
  out = pallas_gemm.matmul(a, b, implementation=implementation, **epilogue)
  products.assert_product(out, a, b, **epilogue)
  out = pallas_gemm.gated_matmul(a, b, b, implementation=implementation)
  assert out.shape == (3, 4) and not np.asarray(out, float).any()


def test_a_new_config_is_used_from_the_next_call_on(monkeypatch):
  """What tuning finds changes the key of what was compiled."""
  traced = []
  original = tuning.generation()
  monkeypatch.setattr(
    report, "log_once", lambda message: traced.append(message)
  )
  jax.clear_caches()
  for generation in (original, original, original + 1):
    monkeypatch.setattr(tuning, "generation", lambda g=generation: g)
    pallas_gemm.matmul(A, B)
  assert len(traced) == 2
