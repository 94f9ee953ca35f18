"""No op raises because of its device: XLA's product runs, and `explain` why."""

import contextlib
import types

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import compat, report
from pallas_gemm.kernels import triton_config
from tests.support.products import normal

# As JAX describes the GPU of a machine. A name alone is all that an abstract
# device has; "unknown" is one that tells nothing.
DEVICES = {
  "T4": ("Tesla T4", {"compute_capability": "7.5", "core_count": 40}),
  "V100": ("Tesla V100", {"compute_capability": "7.0", "core_count": 80}),
  "A100": ("NVIDIA A100-SXM4-80GB", {"compute_capability": "8.0"}),
  "MI300X": ("AMD Instinct MI300X", {"compute_capability": "gfx942"}),
  "rocm": ("strange", {"platform": "rocm", "compute_capability": "gfx90a"}),
  "unknown": ("strange", {}),
}
WHY = {
  "T4": "capability 9.0, the Tesla T4 has 7.5",
  "V100": "capability 9.0, the Tesla V100 has 7.0",
  "A100": "capability 9.0, the NVIDIA A100-SXM4-80GB has 8.0",
  "MI300X": "needs an NVIDIA GPU, this is for AMD Instinct MI300X",
  "rocm": "needs an NVIDIA GPU, this is for strange",
  "unknown": "capability 9.0, the strange has none that is known",
}
A, B, UP = (normal(256, 256, dtype="bfloat16", seed=i) for i in range(3))
W, W_UP = (normal(4, 256, 256, dtype="bfloat16", seed=i) for i in range(2))
SIZES = jnp.array([100, 0, 120, 30])
NUMBERS = lax.RaggedDotDimensionNumbers(
  (((1,), (1,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(0,),
)
OPS = {
  "matmul": (pallas_gemm.matmul, A, B),
  "gated_matmul": (pallas_gemm.gated_matmul, A, B, UP),
  "dot_general": (
    lambda a, b: pallas_gemm.dot_general(a, b, (((0,), (1,)), ((), ()))), A, B,
  ),
  "ragged_dot": (lambda a, w: pallas_gemm.ragged_dot(a, w, SIZES), A, W),
  "gated_ragged_dot": (
    lambda a, *w: pallas_gemm.gated_ragged_dot(a, *w, SIZES), A, W, W_UP,
  ),
  "ragged_dot_general": (
    lambda a, w: pallas_gemm.ragged_dot_general(a, w, SIZES, NUMBERS), A, W,
  ),
}  # fmt: skip


@contextlib.contextmanager
def pretend(monkeypatch, name, how):
  """As if JAX's device, or the one that is traced for, were such a GPU."""
  kind, known = DEVICES[name]
  known = {"platform": "gpu", "device_kind": kind} | known
  jax.clear_caches()
  with contextlib.ExitStack() as stack:
    if how == "default":
      device = types.SimpleNamespace(**known)
      patch = stack.enter_context(monkeypatch.context())
      patch.setattr(compat, "target_device", lambda: device)
    else:
      abstract = jax.sharding.AbstractDevice(
        device_kind=kind, platform=known["platform"], num_cores=40
      )
      mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    yield
  jax.clear_caches()


def _with_gradients(f, *args):
  out, pullback = jax.vjp(f, *args)
  return [out, *pullback(jnp.ones_like(out))]


@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients_are_xlas(op, monkeypatch):
  f, *args = OPS[op]
  want = _with_gradients(f, *args)
  for name in DEVICES:
    with pretend(monkeypatch, name, "default"):
      got = _with_gradients(f, *args)
    for x, y in zip(got, want, strict=True):
      np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("how", ("default", "abstract"))
@pytest.mark.parametrize("name", DEVICES)
def test_what_is_lowered_for_cuda(name, how, monkeypatch):
  """Ahead of time too, where the device only has a name."""
  for f, *args in OPS.values():
    with pretend(monkeypatch, name, how):
      traced = jax.jit(_with_gradients, static_argnums=0).trace(f, *args)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize("platform", (None, "cuda"))
@pytest.mark.parametrize("name", DEVICES)
def test_explain_says_why(name, platform, monkeypatch):
  for f, *args in OPS.values():
    with pretend(monkeypatch, name, "default"):
      found = pallas_gemm.explain(f, *args, platform=platform)
    assert found.products
    for ran in found.products:
      assert ran.implementation == "xla"
      assert ran.why.startswith("sm90: ") and ran.why.endswith(WHY[name])


@pytest.mark.parametrize("name", DEVICES)
def test_batch_invariance_is_said_to_have_no_effect(name, monkeypatch):
  said = []
  monkeypatch.setattr(report, "warn_once", said.append)
  with pretend(monkeypatch, name, "default"), pallas_gemm.batch_invariant():
    pallas_gemm.matmul(A, B)
    pallas_gemm.ragged_dot(A, W, SIZES)
  assert said and all("has no effect here" in text for text in said)


@pytest.mark.parametrize("name", DEVICES)
def test_tuning_needs_a_hopper_gpu(name, monkeypatch):
  with pretend(monkeypatch, name, "default"):
    with pytest.raises(RuntimeError, match=r"tuning needs .*9\.0"):
      pallas_gemm.autotune(pallas_gemm.matmul, A, B)


@pytest.mark.parametrize("name", DEVICES)
def test_triton_asks_the_driver_of_gpus_it_has_no_numbers_for(
  name, monkeypatch
):
  with pretend(monkeypatch, name, "default"):
    assert (triton_config.current_gpu() is None) == (name != "A100")


def test_lowered_for_cuda_where_the_machines_gpu_is_amds(monkeypatch):
  """As on a machine without a GPU: for the Hopper that is the default."""
  here = types.SimpleNamespace(
    platform="gpu", device_kind="gfx942", compute_capability="gfx942"
  )
  traced = jax.jit(pallas_gemm.matmul).trace(
    *[jnp.zeros((4096, 4096), "bfloat16")] * 2
  )
  monkeypatch.setattr(jax, "devices", lambda: [here])
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in text
