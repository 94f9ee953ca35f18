"""Which implementation runs, on which device, and what is said about it."""

import contextlib
import re
import threading
import types

from absl import logging
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import compat, hardware, report, tuning
from pallas_gemm.kernels import triton_config
from pallas_gemm.ops import implementations, invariance
from tests.support import mistakes, ops, products
from tests.support.ops import lowered
from tests.support.products import normal

A, B = normal(64, 64, dtype="bfloat16"), normal(64, 128, dtype="bfloat16")


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


def test_order_and_reasons(stubs, log):
  pallas_gemm.matmul(A, B, implementation=["triton", "sm90", "xla"])
  assert stubs == ["triton", "sm90"]
  (message,) = log
  reasons = "triton: triton is not in the mood; sm90: sm90 is not in the mood"
  assert "runs on 'xla'" in message and reasons in message
  with pytest.raises(NotImplementedError, match=reasons):
    pallas_gemm.matmul(A, B, implementation=("triton", "sm90"))
  assert stubs == ["triton", "sm90"] * 2


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


REFUSED = (
  ("sm90", {"precision": "TF32_TF32_F32"}, "precision"),
  ("triton", {"transpose_a": True}, "no transposed operand"),
  ("triton", {"activation": jnp.tanh}, "no activation"),
  ("triton", {"bias": normal(128)}, "no bias"),
  ("triton", {"out_dtype": "float32"}, "one dtype"),
  ("triton", {}, "CUDA or ROCm"),
)


@pytest.mark.parametrize(("name", "keywords", "reason"), REFUSED)
def test_what_is_refused(name, keywords, reason):
  with pytest.raises(NotImplementedError, match=f"{name}: .*{reason}"):
    pallas_gemm.matmul(A, B, implementation=name, **keywords)


def test_sm90_refuses_other_dtypes_and_gpus():
  f = lambda a, b: pallas_gemm.matmul(a, b, implementation="sm90")  # noqa: E731
  for dtype, reason in (
    ("int16", "sm90: operands must be bfloat16 or float16"),
    ("float32", "sm90: float32 is XLA's except at precision HIGHEST"),
  ):
    with pytest.raises(NotImplementedError, match=reason):
      f(A.astype(dtype), B.astype(dtype))
  with hardware.assume("A100-SXM4-80GB"):
    with pytest.raises(NotImplementedError, match=r"capability 9\.0"):
      lowered(f, A, B)


# Ahead of time, for a GPU that this machine does not have.


@pytest.mark.parametrize(
  "keywords",
  (
    {"activation": jax.nn.gelu, "bias": normal(128)},
    {"c": normal(64, 128), "beta": 0.5},
    {"out_dtype": "float32"},
    *({"precision": x} for x in (None, "highest", "fastest", "BF16_BF16_F32")),
  ),
  ids=lambda keywords: ",".join(keywords),
)
def test_lowers_for_cuda(keywords):
  """Whatever the precision is, and with wide indices too."""
  config = tuning.Config(epilogue_n=32, stages=3)
  f = lambda a, b: pallas_gemm.matmul(a, b, config=config, **keywords)  # noqa: E731
  for wide in (False, True):
    with jax.enable_x64(wide):
      text = lowered(f, A, B)
      assert "mosaic_gpu" in text and "dot_general" not in text
  assert "mosaic_gpu" not in lowered(f, A, B, platform="cpu")


@pytest.mark.parametrize(
  ("op", "platforms"),
  (
    ("matmul", ("rocm",)),
    ("matmul", ("cpu", "tpu")),
    ("ragged_dot", ("tpu",)),
    ("ragged_dot", ("cuda", "rocm")),
  ),
)
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


@pytest.mark.parametrize(
  ("implementation", "a", "b"),
  (
    ("xla", (0, 5), (5, 4)),
    ("sm90", (3, 5), (5, 0)),
    ("xla", (0, 3, 5), (5, 4)),
    ("sm90", (0, 3, 5), (0, 5, 4)),
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


# No op raises because of its device: XLA's product runs.

# As JAX describes the GPU of a machine, and what `explain` says of it. A name
# alone is all that an abstract device has; "unknown" is one that tells nothing.
DEVICES = {
  "T4": ("Tesla T4", "gpu", "7.5", "needs wgmma, .*; Tesla T4 has 7.5"),
  "V100": ("Tesla V100", "gpu", "7.0", "needs CUDA 13's ptxas, .*; Tesla V100"),
  "A100": (
    *("NVIDIA A100-SXM4-80GB", "gpu", "8.0"),
    "needs wgmma, .*; NVIDIA A100-SXM4-80GB has 8.0",
  ),
  "MI300X": (
    *("AMD Instinct MI300X", "gpu", "gfx942"),
    "needs an NVIDIA GPU, this is for AMD Instinct MI300X",
  ),
  "rocm": (
    *("strange", "rocm", "gfx90a"),
    "needs an NVIDIA GPU, this is for strange",
  ),
  "unknown": ("strange", "gpu", None, "strange has none that is known"),
}
OPS = {
  name: op._replace(dtype="bfloat16").of(**dict.fromkeys("mnk", 256))
  for name, op in (ops.ACTIVATED | ops.DROP_INS).items()
}


@contextlib.contextmanager
def pretend(monkeypatch, name, how="default"):
  """As if JAX's device, or the one that is traced for, were such a GPU."""
  kind, platform, capability, _ = DEVICES[name]
  known = {"platform": platform, "device_kind": kind, "core_count": 40}
  if capability is not None:
    known["compute_capability"] = capability
  jax.clear_caches()
  with contextlib.ExitStack() as stack:
    if how == "default":
      device = types.SimpleNamespace(**known)
      patch = stack.enter_context(monkeypatch.context())
      patch.setattr(compat, "target_device", lambda: device)
    else:
      abstract = jax.sharding.AbstractDevice(
        device_kind=kind, platform=platform, num_cores=40
      )
      mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    yield
  jax.clear_caches()


def _with_gradients(f, *args):
  out, pullback = jax.vjp(f, *args)
  return [out, *pullback(jnp.ones_like(out))]


# An op for each device.
EACH_DEVICE = pytest.mark.parametrize(
  ("name", "op"), [*zip(DEVICES, OPS.values(), strict=True)], ids=DEVICES
)


@EACH_DEVICE
def test_results_and_gradients_are_xlas(op, name, monkeypatch):
  want = _with_gradients(op.ours, *op.args())
  with pretend(monkeypatch, name):
    got = _with_gradients(op.ours, *op.args())
  for x, y in zip(got, want, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("how", ("default", "abstract"))
@EACH_DEVICE
def test_what_is_lowered_for_cuda(op, name, how, monkeypatch):
  """Ahead of time too, where the device only has a name."""
  with pretend(monkeypatch, name, how):
    text = lowered(lambda *x: _with_gradients(op.ours, *x), *op.args())
  assert "mosaic_gpu" not in text


@EACH_DEVICE
def test_what_is_said_of_other_devices(op, name, monkeypatch):
  """By `explain`, of batch invariance and of tuning."""
  said = []
  monkeypatch.setattr(report, "warn_once", said.append)
  with pretend(monkeypatch, name):
    for platform in (None, "cuda"):
      found = pallas_gemm.explain(op.ours, *op.args(), platform=platform)
      for ran in found.products:
        assert ran.implementation == "xla"
        assert ran.why.startswith("sm90: ")
        assert re.search(DEVICES[name][3], ran.why)
      assert found.products
    with pallas_gemm.batch_invariant():
      op.ours(*op.args())
    expected = "has no effect here|^products are XLA's: the kernel needs "
    assert said and all(re.search(expected, text) for text in said)
    with pytest.raises(RuntimeError, match="tuning needs "):
      pallas_gemm.autotune(pallas_gemm.matmul, A, B)
    # Triton asks the driver of GPUs that it has no numbers for.
    assert (triton_config.current_gpu() is None) == (name != "A100")


def test_lowered_for_cuda_where_the_machines_gpu_is_amds(monkeypatch):
  """As on a machine without a GPU: for the Hopper that is the default."""
  here = types.SimpleNamespace(
    platform="gpu", device_kind="gfx942", compute_capability="gfx942"
  )
  large = [jnp.zeros((4096, 4096), "bfloat16")] * 2
  traced = jax.jit(pallas_gemm.matmul).trace(*large)
  monkeypatch.setattr(jax, "devices", lambda: [here])
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in text
