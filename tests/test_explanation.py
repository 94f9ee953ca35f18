"""`pallas_gemm.explain`: what computes each product, and why."""

import functools
import os
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import hardware, tuning
from tests.support import stand_in
from tests.support.products import normal


def _shape(*shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, dtype)


LARGE = _shape(4096, 4096), _shape(4096, 4096)


def _only(f, *args, **how):
  """The one product of a function."""
  (ran,) = pallas_gemm.explain(f, *args, **how).products
  return ran


# For CUDA, where there is no GPU.


def test_kernel_and_config():
  ran = _only(pallas_gemm.matmul, *LARGE, platform="cuda")
  assert ran.implementation == "sm90"
  assert isinstance(ran.config, tuning.Config)
  assert ran.shapes == ((1, 4096, 4096), (1, 4096, 4096))
  assert (ran.why, ran.around) == ("", "")
  assert ran.product.startswith("matmul bfloat16 to bfloat16")


def test_config_of_the_user():
  config = tuning.Config(block_m=128, block_n=128)
  product = functools.partial(pallas_gemm.matmul, config=config)
  ran = _only(product, *LARGE, platform="cuda")
  assert (ran.config, ran.source) == (config, "user")


def test_how_often_a_product_occurs():
  config = tuning.Config(block_m=128, block_n=128)

  def f(x, w):
    for _ in range(2):
      x = pallas_gemm.matmul(x, w, config=config)

    def step(x, _):
      return pallas_gemm.matmul(x, w, activation=jnp.tanh), None

    return jax.lax.scan(step, x, length=3)[0]

  found = pallas_gemm.explain(f, *LARGE, platform="cuda")
  assert found.times == (2, 3)
  text = str(found)
  assert "NN, x 2\n" in text and "NN + activation, x 3\n" in text
  assert "\n  Config(block_n=128), as given\n" in text


@pytest.mark.parametrize("m, n, k", ((64, 64, 64), (4096, 4096, 8)))
def test_why_a_product_is_left_to_xla(m, n, k):
  """The kernel could: it would be slower."""
  args = _shape(m, k), _shape(k, n)
  ran = _only(pallas_gemm.matmul, *args, platform="cuda")
  assert ran.implementation == "xla"
  assert ran.why.startswith("sm90: ")
  assert "XLA's kernel" in ran.why
  asked = functools.partial(pallas_gemm.matmul, implementation="sm90")
  ran = _only(asked, *args, platform="cuda")
  assert (ran.implementation, ran.why) == ("sm90", "")


def test_every_product_in_order():
  def layer(x, gate, down, w, sizes):
    h = pallas_gemm.gated_matmul(x, gate, gate)
    h = pallas_gemm.matmul(h, down)
    return pallas_gemm.ragged_dot(h, w, sizes)

  found = pallas_gemm.explain(
    layer,
    _shape(4096, 1024),
    _shape(1024, 2048),
    _shape(2048, 1024),
    _shape(8, 1024, 512),
    _shape(8, dtype="int32"),
    platform="cuda",
  )
  kinds = [ran.product.split()[0] for ran in found.products]
  assert kinds == ["gated_matmul", "matmul", "ragged_dot"]
  assert [ran.implementation for ran in found.products] == ["sm90"] * 3


def test_gradients():
  """Those of the backward pass, too: A, B and the result all differ."""

  def loss(a, b):
    return pallas_gemm.matmul(a, b, out_dtype="float32").sum()

  args = _shape(4096, 1024), _shape(1024, 2048)
  found = pallas_gemm.explain(jax.grad(loss, (0, 1)), *args, platform="cuda")
  layouts = {ran.product.rpartition(", ")[2] for ran in found.products}
  assert layouts == {"NT", "TN"}


def test_alike_products_are_listed_once():
  def twice(a, b):
    return pallas_gemm.matmul(pallas_gemm.matmul(a, b), b)

  _only(twice, *LARGE, platform="cuda")


# On the devices that there are.


def test_on_one_device():
  found = pallas_gemm.explain(pallas_gemm.matmul, normal(8, 16), normal(16, 4))
  (ran,) = found.products
  assert found.platform == "cpu"
  assert ran.implementation == "xla"
  assert ran.shapes == ((1, 8, 16), (1, 16, 4))


def test_on_one_device_with_a_kernel():
  with stand_in.installed(default=True) as calls:
    ran = _only(pallas_gemm.matmul, normal(8, 16), normal(16, 4))
    assert len(calls) == 1
  assert (ran.implementation, ran.why) == ("sm90", "")


def test_for_cpu():
  found = pallas_gemm.explain(pallas_gemm.matmul, *LARGE, platform="cpu")
  assert found.platform == "cpu"
  assert found.products[0].implementation == "xla"


def test_for_this_machine_where_a_gpu_is_assumed():
  with hardware.assume("H100"):
    found = pallas_gemm.explain(pallas_gemm.matmul, *LARGE)
  assert (found.platform, found.products[0].implementation) == ("cpu", "xla")


def test_nothing_is_interpreted_where_a_gpu_is_assumed():
  named = functools.partial(pallas_gemm.matmul, implementation="sm90")
  either = functools.partial(named, implementation=("sm90", "xla"))
  with hardware.assume("H100"):
    assert _only(either, *LARGE).implementation == "xla"
    with pytest.raises(NotImplementedError, match="traced for a GPU"):
      pallas_gemm.explain(named, *LARGE)


def test_what_jit_has_compiled_is_explained():
  f = jax.jit(pallas_gemm.matmul)
  args = normal(8, 16), normal(16, 4)
  f(*args)
  first = pallas_gemm.explain(f, *args)
  assert len(first.products) == 1
  assert pallas_gemm.explain(f, *args) == first


def test_nothing_runs():
  """And keywords are the function's."""
  seen = []

  def f(x, *, w):
    jax.debug.callback(seen.append, x)
    return pallas_gemm.matmul(x, w)

  _only(f, normal(8, 16), w=normal(16, 4))
  jax.effects_barrier()
  assert not seen


def test_under_meshes():
  """On eight devices, which JAX must know of before it starts."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  }
  done = subprocess.run(
    [sys.executable, "-W", "error", "-m", "tests.support.explained"],
    cwd=Path(__file__).parent.parent,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


# What is printed.


@pytest.mark.parametrize(
  ("n", "config"),
  (
    (4096, "Config(epilogue_n=32), of the shipped table"),
    (
      4160,
      "Config(block_m=256, block_n=128, epilogue_n=32), by the cost model",
    ),
  ),
)
def test_text(capsys, n, config):
  arrays = _shape(4096, 4096), _shape(4096, n)
  found = pallas_gemm.explain(pallas_gemm.matmul, *arrays, platform="cuda")
  assert capsys.readouterr().out == f"{found}\n"
  assert str(found).splitlines() == [
    "on cuda:",
    f"matmul bfloat16 to bfloat16, batch 1, M 4096, N {n}, K 4096, NN",
    f"  runs on 'sm90', a device reads [1, 4096, 4096] x [1, 4096, {n}]",
    f"  {config}",
  ]


def test_text_of_a_reason():
  a = _shape(64, 64, dtype="float32")
  found = pallas_gemm.explain(pallas_gemm.matmul, a, a, platform="cuda")
  assert str(found).splitlines()[2:] == [
    "  runs on 'xla', a device reads [1, 64, 64] x [1, 64, 64]",
    f"  because {found.products[0].why}",
  ]


def test_text_without_products():
  found = pallas_gemm.explain(jnp.sin, normal(3))
  assert found.products == ()
  assert str(found).startswith("on cpu: no product of this package")


@pytest.mark.parametrize("platform", ("gpu", "tpu", "CUDA", ""))
def test_wrong_platform(platform):
  with pytest.raises(ValueError, match="platform must be None, 'cpu' or"):
    pallas_gemm.explain(pallas_gemm.matmul, *LARGE, platform=platform)


def test_arguments_that_are_no_arrays(capsys):
  """They may be static, as options of an op are."""
  x = jnp.ones((4, 4), jnp.bfloat16)

  @functools.partial(jax.jit, static_argnames="name")
  def f(x, name):
    activation = {"relu": jax.nn.relu}[name]
    return pallas_gemm.matmul(x, x, activation=activation)

  (ran,) = pallas_gemm.explain(f, x, name="relu").products
  assert "+ activation" in ran.product
  found = pallas_gemm.explain(pallas_gemm.matmul, x, x, implementation="xla")
  assert found.products[0].implementation == "xla"
  assert capsys.readouterr().out.count("runs on 'xla'") == 2


def test_a_product_is_no_function():
  with pytest.raises(TypeError, match=r"fn must be a function.*got \w*Array"):
    pallas_gemm.explain(pallas_gemm.matmul(normal(8, 8), normal(8, 8)))
