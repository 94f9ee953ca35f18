"""Tier B: every rung lowers for Hopper, on a machine without a GPU.

Lowering decides what Mosaic GPU accepts: register layouts, wgmma shapes,
swizzles, TMA boxes and strides, shared memory.
"""

import functools
import re
import types

import jax
import pytest

from experiments.harness import shapes
from pallas_gemm import compat, hardware, ladder
from pallas_gemm.ladder import BLACKWELL, LADDER, contract, with_variants
from tests.support import gpus, problems

each_rung = pytest.mark.parametrize(
  "rung", with_variants(), ids=lambda r: r.name
)
GPU = "NVIDIA H200"
EVERY = with_variants(LADDER + BLACKWELL)


def _lower(rung, m, n, k, dtype, *, beta=0.0, config=None) -> str:
  arrays = [(m, k), (k, n)] + ([(m, n)] if beta else [])
  operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in arrays]

  def gemm(*operands):
    return rung.gemm(*operands, beta=beta, config=config)

  with hardware.assume(GPU):
    traced = jax.jit(gemm).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _id(x) -> str:
  return getattr(x, "name", str(x))


def _every_other_shape(*names: str) -> list[tuple]:
  """Of suites, the odd ones for one rung and the even ones for the next."""
  found = [shape for name in names for shape in shapes.suite(name)[:6]]
  return [
    (rung, shape)
    for i, rung in enumerate(with_variants())
    for shape in found[i % 2 :: 2]
  ]


@each_rung
def test_with_double_precision(rung):
  """Indices in a kernel have 32 bits all the same."""
  with jax.enable_x64(True):
    assert "mosaic_gpu" in _lower(rung, 20, 12, 24, rung.dtypes[0], beta=0.5)


# The square of 4096 is compiled (tests/test_ladder_compile.py).
@pytest.mark.parametrize(
  ("rung", "shape"), _every_other_shape("edges", "large"), ids=_id
)
def test_default_config(rung, shape):
  """Under the rung's name: profiles and counters find the kernel by it."""
  text = _lower(rung, *shape, rung.dtypes[shape.k % len(rung.dtypes)])
  assert "mosaic_gpu" in text and rung.name in text


@pytest.mark.parametrize(
  ("rung", "shape"), _every_other_shape("unaligned"), ids=_id
)
def test_unaligned_rows_with_c(rung, shape):
  assert "mosaic_gpu" in _lower(rung, *shape, rung.dtypes[-1], beta=2.0)


@each_rung
def test_small_configs(rung):
  m, n, k = 200, 264, 200
  problem = contract.Gemm(m, n, k, rung.dtypes[0], beta=1.0)
  for config in problems.small_configs(rung, problem):
    text = _lower(rung, m, n, k, rung.dtypes[0], beta=1.0, config=config)
    assert "mosaic_gpu" in text


@each_rung
def test_what_is_legal_lowers(rung):
  """`is_legal` promises it; a sample of the legal candidates, evenly taken."""
  problem = contract.Gemm(512, 512, 512, rung.dtypes[0])
  legal = [
    config
    for config in problems.candidate_configs(rung)
    if rung.is_legal(config, problem) is None
  ]
  assert legal
  for config in legal[:: max(1, len(legal) // 3)]:
    text = _lower(rung, 512, 512, 512, rung.dtypes[0], config=config)
    assert "mosaic_gpu" in text, config


@pytest.mark.parametrize("gpu", (*gpus.OTHERS, hardware.lookup(GPU)), ids=_id)
def test_a_kernel_is_lowered_for_the_gpu_that_is_assumed(gpu):
  x = jax.ShapeDtypeStruct((128, 128), "float32")
  with hardware.assume(gpu):
    traced = jax.jit(LADDER[0].gemm).trace(x, x)
    lowered = traced.lower(lowering_platforms=("cuda",))
  assert gpus.target_of_kernel(lowered) == gpu.compute_capability


@pytest.mark.parametrize("gpu", (gpus.V100, *gpus.OTHERS), ids=_id)
@pytest.mark.parametrize("rung", EVERY, ids=_id)
def test_what_other_gpus_lack(rung, gpu):
  """Each config is refused for it, before its sizes; an error says the same."""
  problem = contract.Gemm(512, 512, 512, rung.dtypes[0])
  x = jax.ShapeDtypeStruct((512, 512), rung.dtypes[0])
  lacking = [need for need in ("ptxas", *rung.needs) if gpu.lacks(need)]
  with hardware.assume(gpu):
    found = rung.is_legal(rung.default_config(problem), problem)
    assert rung.lacks() == rung.lacks(gpu)
    assert found == rung.lacks()
    if not lacking:
      # Of JAX 0.11 on compute capability 12.
      assert found is None or "8 needs JAX 0.12 on compute" in found
      return
    # The rungs that it names are those that run there.
    fit = [each.label for each in EVERY if not each.lacks(gpu)]
    assert found.startswith(
      f"rung {rung.label} needs {hardware.FEATURES[lacking[0]].name}, which"
    )
    assert f"; {gpu.name} has " in found
    assert found.endswith(" run on it") == bool(fit)
    with pytest.raises(ValueError, match=re.escape(found)):
      jax.eval_shape(rung.gemm, x, x)


def test_what_runs_there_is_said(monkeypatch):
  labels = "1 2 3 4 5 6 7 8 8a 9 9a 9b 9c 10 10a 11 11a 12 13".split()
  found = [*map(ladder.find, labels)]
  monkeypatch.setattr(ladder, "with_variants", lambda _: found)
  assert LADDER[11].lacks(hardware.lookup("L4")) == (
    "rung 12 needs wgmma, which compute capability 9.0 alone has; NVIDIA L4 has"
    " 8.9; rungs 1-7, 8a, 9a and 9c run on it"
  )
  assert BLACKWELL[0].lacks(hardware.lookup("H200")) == (
    "rung 13 needs tcgen05, which compute capability 10.x alone has; NVIDIA"
    " H200 has 9.0; rungs 1-12, 8a, 9a, 9b, 9c, 10a and 11a run on it"
  )


def test_a_gpu_of_amd_is_refused_in_a_sentence(monkeypatch):
  device = types.SimpleNamespace(platform="gpu", device_kind="AMD MI300X")
  monkeypatch.setattr(compat, "target_device", lambda: device)
  x = jax.ShapeDtypeStruct((512, 512), "float32")
  reason = "rung 1 needs an NVIDIA GPU, this is for AMD MI300X"
  with pytest.raises(ValueError, match=reason):
    jax.eval_shape(LADDER[0].gemm, x, x)


@pytest.mark.parametrize("gpu", (gpus.T4, gpus.A100, gpus.B200), ids=_id)
@pytest.mark.parametrize("rung", EVERY, ids=_id)
def test_what_is_legal_lowers_on_other_gpus(rung, gpu):
  dtype = rung.dtypes[0]
  problem = contract.Gemm(512, 512, 512, dtype)
  # By copies of what no GPU before Hopper has.
  asked = contract.SimtConfig(64, 128, 16, 8, 4, 4, stages=2, raster=8)
  configs = [asked, *problems.candidate_configs(rung)]
  x = jax.ShapeDtypeStruct((512, 512), dtype)
  with hardware.assume(gpu):
    legal = [c for c in configs if rung.is_legal(c, problem) is None]
    for config in legal[:: max(1, len(legal) // 2)]:
      traced = jax.jit(functools.partial(rung.gemm, config=config)).trace(x, x)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
      assert "mosaic_gpu" in text, config
