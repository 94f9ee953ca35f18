"""The ladder's contract: names, signature, and what a wrong call is told."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import LADDER, contract, with_variants
from tests.support import problems

SimtConfig = contract.SimtConfig
TensorCoreConfig, Gemm = contract.TensorCoreConfig, contract.Gemm
ONE_TILE = TensorCoreConfig(64, 64, 64, stages=2, epilogue_n=64)
TOO_MANY = 64 * 65536

each_rung = pytest.mark.parametrize(
  "rung", with_variants(), ids=lambda r: r.name
)


def test_a_rung_of_any_file_has_a_number_and_a_name():
  parts = ("grid", "specs", "is_legal", "kernel", "default_config")
  given = {x: getattr(LADDER[1], x) for x in parts}
  given |= {"idea": "mine", "dtypes": contract.FLOAT32, "uses": LADDER[1].uses}
  mine = contract.make_rung("__main__", number=2, name="mine", **given)
  assert (mine.label, mine.name, mine.module) == ("2", "mine", "__main__")
  a, b = jnp.ones((3, 5)), jnp.ones((5, 2))
  assert (mine.gemm(a, b) == 5).all()
  with pytest.raises(ValueError, match=r"number and name must .* kNN_name.py"):
    contract.make_rung("__main__", name="mine", **given)
  del given["kernel"]
  with pytest.raises(ValueError, match="'k02_mine' must define kernel, or"):
    contract.make_rung("k02_mine", **given)


@pytest.mark.parametrize("own", [{}, {"name": "mine"}, {"kernel": len}])
def test_a_variant_has_a_name_and_a_kernel_of_its_own(own):
  given = {"idea": "mine", "dtypes": contract.FLOAT32, "variant": "z"}
  with pytest.raises(ValueError, match="variant 2z needs name= and kernel="):
    contract.make_rung(LADDER[1].module, **given, **own)
  own = {"name": "mine", "kernel": len}
  assert contract.make_rung(LADDER[1].module, **given, **own).label == "2z"


@each_rung
def test_dtypes_and_kind_of_config(rung):
  dtypes, own, other = contract.FLOAT16S, TensorCoreConfig, SimtConfig
  if rung.number <= 8:
    dtypes, own, other = contract.FLOAT32, SimtConfig, TensorCoreConfig
  assert (rung.dtypes, rung.config_type) == (dtypes, own)
  reason = rung.is_legal(other(64, 64, 64), Gemm(8, 8, 8, dtypes[0]))
  assert reason == f"config must be a {own.__name__}, got {other.__name__}"


@each_rung
def test_the_file_is_the_page(rung):
  module = importlib.import_module(rung.module)
  stem = rung.module.rsplit(".", 1)[-1]
  assert stem.startswith(f"k{rung.number:02}_")
  if not rung.variant:
    assert stem == f"k{rung.number:02}_{rung.name}"
  page = inspect.getdoc(module)
  assert page and len(page.splitlines()) >= 10, "no page on this rung"
  assert rung.idea and "\n" not in rung.idea


@each_rung
def test_signature(rung):
  parameters = inspect.signature(rung.gemm).parameters
  assert list(parameters) == ["a", "b", "c", "alpha", "beta", "config"]
  assert parameters["c"].default is None
  for name, default in (("alpha", 1.0), ("beta", 0.0), ("config", None)):
    assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters[name].default == default


@each_rung
@pytest.mark.parametrize(
  "shape", [(1, 1, 1), (4095, 4095, 4095), (64, 8192, 512), (4095, 1, 7)]
)
def test_the_default_config_is_legal(rung, shape):
  for dtype in rung.dtypes:
    for beta in (0.0, 1.0):
      problem = Gemm(*shape, dtype=dtype, beta=beta)
      config = rung.default_config(problem)
      assert isinstance(config, rung.config_type)
      assert rung.is_legal(config, problem) is None


def test_importing_touches_no_device():
  # An unknown platform makes any use of a device an error.
  done = subprocess.run(
    [sys.executable, "-c", "import pallas_gemm.ladder, experiments.ladder"],
    env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


# What a wrong call is told, and what is wrong in it. Arrays are ones, given by
# shape, and by dtype if it is not the rung's.
FLOAT8, ONE = "float8_e4m3fn", np.ones(())
BAD_CALLS = [
  ("ValueError: a must have rank 2, got shape (3,)", {"a": (3,)}),
  ("ValueError: b must have rank 2, got shape (1, 5, 2)", {"b": (1, 5, 2)}),
  ("ValueError: c must have rank 2, got shape (3,)", {"c": (3,)}),
  ("ValueError: b must have K = 5 rows, as a (3, 5) has", {"b": (4, 2)}),
  ("ValueError: c must have shape (3, 2), got (2, 3)", {"c": (2, 3)}),
  (
    "TypeError: a has dtype int32; {name} takes {dtype}",
    {"a": (3, 5, "int32")},
  ),
  ("TypeError: b has dtype float8_e4m3fn; {name} takes", {"b": (5, 2, FLOAT8)}),
  ("TypeError: c has dtype int8; {name} takes", {"c": (3, 2, "int8")}),
  ("TypeError: a must have native byte order", {"a": (3, 5, ">f{size}")}),
  ("TypeError: a must be an array, got list", {"a": [[1.0]]}),
  ("TypeError: b must be an array, got NoneType", {"b": None}),
  ("ValueError: beta is 0.5 but c is None; pass c", {"beta": 0.5}),
  ("TypeError: alpha must be a Python int or float, got nd", {"alpha": ONE}),
  ("TypeError: alpha must be a Python int or float, got str", {"alpha": "1"}),
  ("ValueError: alpha must fit into float32: 3.4e+38 at", {"alpha": 10**400}),
  ("ValueError: beta must fit into float32", {"beta": -1e39, "c": (3, 2)}),
  (
    "TypeError: beta must be a Python int or float, got bool",
    {"beta": True, "c": (3, 2)},
  ),
  ("TypeError: config of {name} must be a {config}, got dict", {"config": {}}),
  (
    "TypeError: config of {name} must be a {config}, got {other}",
    {"config": lambda own, other: other(64, 64, 64)},
  ),
  (
    "ValueError: config of {name} is not legal: block_m must be an int >= 1,"
    " got 0",
    {"config": lambda own, other: own(0, 64, 64)},
  ),
  (
    "ValueError: config of {name} is not legal: block_n must be an int >= 1,"
    " got 64.5",
    {"config": lambda own, other: own(64, 64.5, 64)},
  ),
]


def _argument(value, rung, *configs):
  """What stands for an argument of `BAD_CALLS`."""
  if callable(value):
    return value(*configs)
  if not isinstance(value, tuple):
    return value
  shape = [x for x in value if isinstance(x, int)]
  own = np.dtype("float16" if rung.number > 8 else "float32")
  dtype = value[-1] if isinstance(value[-1], str) else rung.dtypes[0]
  return np.ones(shape, jnp.dtype(dtype.format(size=own.itemsize)))


@pytest.mark.parametrize(
  ("words", "changes", "rung"),
  [
    (*call, rung)
    for i, call in enumerate(BAD_CALLS)
    for j, rung in enumerate(with_variants())
    if (i - j) % 4 == 0 or rung.number in (1, 12)
  ],
)
def test_a_wrong_call_is_told_what_is_wrong(rung, words, changes):
  own = rung.config_type
  other = TensorCoreConfig if own is SimtConfig else SimtConfig
  call = {"a": (3, 5), "b": (5, 2)} | changes
  with pytest.raises((TypeError, ValueError)) as caught:
    rung.gemm(**{k: _argument(v, rung, own, other) for k, v in call.items()})
  words = words.format(
    name=rung.name,
    dtype=rung.dtypes[0],
    config=own.__name__,
    other=other.__name__,
  )
  said = f"{type(caught.value).__name__}: {caught.value}"
  assert said.startswith(words), said


@pytest.mark.parametrize("rung", LADDER[8:], ids=lambda r: r.name)
def test_dtypes_may_not_differ(rung):
  first, second = rung.dtypes
  a = np.ones((3, 5), jnp.dtype(first))
  b = np.ones((5, 2), jnp.dtype(second))
  with pytest.raises(TypeError, match=f"b .*{first}.*{second}"):
    rung.gemm(a, b)


# Configs that Mosaic can't compile, that wait for ever or that CUDA can't
# launch, and why they are refused.
@pytest.mark.parametrize(
  ("name", "config", "m", "reason"),
  [
    (1, SimtConfig(1, 1), 8, "outputs a block: 1, at least 2"),
    (2, SimtConfig(1, 1), 8, "outputs a block: 1, at least 2"),
    (3, SimtConfig(1, 32, 1), 8, "block_m: 1, at least 2"),
    (5, SimtConfig(8, 2048, 64, 1, 128), 8, "bytes of shared memory"),
    ("8a", SimtConfig(32, 512, 32, 4, 32, 4, 4), 8, "bytes of shared memory"),
    (8, SimtConfig(128, 128, 16, 16, 8, 4), 8, "stages must be at least 2"),
    (
      9,
      TensorCoreConfig(64, 64, 64),
      TOO_MANY,
      "tiles along M: 65536, at most",
    ),
    (10, ONE_TILE, TOO_MANY, "tiles along M: 65536, at most 65535"),
  ],
)
def test_a_config_that_cannot_run_is_refused(name, config, m, reason):
  rung = ladder_lib.find(name)
  problem = Gemm(m, 64, 64, rung.dtypes[0])
  assert re.search(reason, rung.is_legal(config, problem) or "legal")


@each_rung
def test_a_config_that_no_gpu_can_hold_is_refused(rung):
  a, b, _ = problems.operands(8, 8, 8, rung.dtypes[0])
  problem = Gemm(8, 8, 8, rung.dtypes[0])
  default = rung.default_config(problem)
  changes = [{"block_m": 1 << 14, "block_n": 1 << 14}, {"stages": 999}]
  if default.block_k:  # Without slabs, their depth means nothing.
    changes.append({"block_k": 1 << 14})
  for change in changes:
    config = dataclasses.replace(default, **change)
    reason = rung.is_legal(config, problem)
    assert reason, f"{change} should not be legal"
    with pytest.raises(ValueError) as caught:
      rung.gemm(a, b, config=config)
    assert reason in str(caught.value) and rung.name in str(caught.value)


@each_rung
def test_errors_are_the_same_under_jit(rung):
  a = np.ones((3, 5), jnp.dtype(rung.dtypes[0]))
  with pytest.raises(ValueError, match="b must have"):
    jax.jit(rung.gemm)(a, a)


ALL, SIZES = contract.TENSOR_CORE_FIELDS, ("block_m", "block_n", "block_k")


@pytest.mark.parametrize(
  ("config", "uses", "reason"),
  [
    (ONE_TILE, ALL, None),
    (dataclasses.replace(ONE_TILE, split="k"), ALL, "split must be 'm' or 'n'"),
    (
      dataclasses.replace(ONE_TILE, raster_dim=1),
      ALL,
      "raster_dim must be 'm'",
    ),
    (ONE_TILE, SIZES, "stages has no meaning here and must stay 1, got 2"),
    (SimtConfig(64, 64, 8), SIZES, None),
    (SimtConfig(64, 64, 8), ("block_k",), "block_m has no meaning"),
    (SimtConfig(48, 64, 8), SIZES, "block_m must be a power of two, got 48"),
  ],
)
def test_fields(config, uses, reason):
  found = contract.check_fields(config, uses)
  assert found == reason if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
  "rung",
  [rung for rung in with_variants() if "raster" in rung.uses],
  ids=lambda rung: rung.name,
)
def test_strips_of_too_many_blocks(rung):
  """JAX's planar_snake would divide by zero."""
  problem = contract.Gemm(1024, 512, 256, rung.dtypes[0])
  config = rung.default_config(problem)
  most = max(rung.grid(problem, config)[:2])
  wide, wider = ((2**31 - 1) // most + more for more in (0, 1))
  assert (
    rung.is_legal(dataclasses.replace(config, raster=wide), problem) is None
  )
  reason = rung.is_legal(dataclasses.replace(config, raster=wider), problem)
  assert reason.startswith("raster must keep strips below 2**31 blocks, got ")


@each_rung
@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 65, 7), (256, 512, 64)])
def test_padding_is_what_the_kernel_needs_and_no_more(rung, shape):
  problem = Gemm(*shape, rung.dtypes[0])
  config = rung.default_config(problem)
  padded = rung.padded(problem, config)
  assert rung.padded(padded, config) == padded
  for name, multiple in zip("mnk", rung.padding(problem, config)):
    size, most = getattr(padded, name), getattr(problem, name)
    assert size % multiple == 0 and most <= size < most + multiple


@pytest.mark.parametrize(
  ("name", "label"),
  [
    (8, "8"),
    ("8a", "8a"),
    ("9", "9"),
    ("tensor_cores_mma", "9a"),
    ("naive", "1"),
  ],
)
def test_rungs_are_found_by_number_label_and_name(name, label):
  rung = ladder_lib.find(name)
  assert rung.label == label
  assert ladder_lib.find(rung) is rung


@pytest.mark.parametrize("name", [0, 14, -1, "fast", 1.5, None, True, "8b"])
def test_no_such_rung(name):
  with pytest.raises(ValueError, match=r"rung must be .*1 naive.*got"):
    ladder_lib.find(name)


def test_variants_stand_behind_their_rung():
  labels = [rung.label for rung in with_variants()]
  assert labels == sorted(labels, key=lambda x: (int(x.rstrip("abc")), x))
  for rung in LADDER:
    for each in rung.variants:
      assert each.number == rung.number and each.variant
      assert each.dtypes == rung.dtypes
