"""The ladder's contract: names, signature, and what a wrong call is told."""

import dataclasses
import importlib
import inspect
import os
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
TensorCoreConfig = contract.TensorCoreConfig

NAMES = (
  "naive",
  "coalesced",
  "shared_memory",
  "blocktiling_1d",
  "blocktiling_2d",
  "vectorized",
  "warptiling",
  "double_buffering",
  "tensor_cores",
  "warp_specialized",
  "persistent",
  "cluster_multicast",
)

each_rung = pytest.mark.parametrize(
  "rung", with_variants(), ids=lambda r: r.name
)


def test_twelve_rungs_in_order():
  assert isinstance(LADDER, tuple)
  assert tuple(rung.name for rung in LADDER) == NAMES
  assert tuple(rung.number for rung in LADDER) == tuple(range(1, 13))


@each_rung
def test_dtypes(rung):
  expected = contract.FLOAT32 if rung.number <= 8 else contract.FLOAT16S
  assert rung.dtypes == expected
  assert rung.config_type is (
    SimtConfig if rung.number <= 8 else TensorCoreConfig
  )


@each_rung
def test_the_file_is_the_page(rung):
  module = importlib.import_module(rung.module)
  stem = rung.module.rsplit(".", 1)[-1]
  if rung.variant:
    assert rung.name.startswith(stem.split("_", 1)[1])
  else:
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
def test_a_rung_is_a_value(rung):
  with pytest.raises(dataclasses.FrozenInstanceError):
    rung.number = 0
  config = rung.default_config(contract.Problem(64, 64, 64, rung.dtypes[0]))
  assert hash(config) == hash(dataclasses.replace(config))
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.block_m = 1


@each_rung
@pytest.mark.parametrize(
  "shape", [(1, 1, 1), (4095, 4095, 4095), (8192, 64, 16384)], ids=str
)
def test_the_default_config_is_legal(rung, shape):
  for dtype in rung.dtypes:
    for beta in (0.0, 1.0):
      problem = contract.Problem(*shape, dtype=dtype, beta=beta)
      config = rung.default_config(problem)
      assert isinstance(config, rung.config_type)
      assert rung.is_legal(config, problem) is None


def test_importing_touches_no_device():
  # An unknown platform makes any use of a device an error.
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      "import pallas_gemm.ladder, experiments.ladder",
    ],
    env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


# What a wrong call is told: the argument, what came, what is needed.
# (arguments of gemm, exception, words that the message must hold)


def _ones(*shape, dtype=None):
  return lambda rung: np.ones(shape, jnp.dtype(dtype or rung.dtypes[0]))


_A, _B, _C = _ones(3, 5), _ones(5, 2), _ones(3, 2)
_OTHER_CONFIG = {SimtConfig: TensorCoreConfig, TensorCoreConfig: SimtConfig}

BAD_CALLS = {
  "rank of a": ((_ones(3), _B), {}, ValueError, ("a ", "rank 2", "(3,)")),
  "rank of b": (
    (_A, _ones(1, 5, 2)),
    {},
    ValueError,
    ("b ", "rank 2", "(1, 5, 2)"),
  ),
  "rank of c": (
    (_A, _B, _ones(3)),
    {},
    ValueError,
    ("c ", "rank 2", "(3,)"),
  ),
  "rows of b": (
    (_A, _ones(4, 2)),
    {},
    ValueError,
    ("b ", "5", "(3, 5)", "(4, 2)"),
  ),
  "shape of c": (
    (_A, _B, _ones(2, 3)),
    {"beta": 1.0},
    ValueError,
    ("c ", "(3, 2)", "(2, 3)"),
  ),
  "shape of c that is not read": (
    (_A, _B, _ones(2, 3)),
    {},
    ValueError,
    ("c ", "(3, 2)", "(2, 3)"),
  ),
  "dtype of a": (
    (_ones(3, 5, dtype="int32"), _B),
    {},
    TypeError,
    ("a ", "int32", lambda rung: rung.dtypes[0], lambda rung: rung.name),
  ),
  "dtype of b": (
    (_A, _ones(5, 2, dtype="float8_e4m3fn")),
    {},
    TypeError,
    ("b ", "float8_e4m3fn", lambda rung: rung.dtypes[0]),
  ),
  "dtype of c": (
    (_A, _B, _ones(3, 2, dtype="int8")),
    {"beta": 1.0},
    TypeError,
    ("c ", "int8", lambda rung: rung.dtypes[0]),
  ),
  "a list for a": (
    (lambda rung: [[1.0]], _B),
    {},
    TypeError,
    ("a ", "array", "list"),
  ),
  "None for b": (
    (_A, lambda rung: None),
    {},
    TypeError,
    ("b ", "array", "NoneType"),
  ),
  "beta without c": (
    (_A, _B),
    {"beta": 0.5},
    ValueError,
    ("beta", "0.5", "c "),
  ),
  "alpha an array": (
    (_A, _B),
    {"alpha": np.ones(())},
    TypeError,
    ("alpha", "float", "ndarray"),
  ),
  "alpha a string": (
    (_A, _B),
    {"alpha": "1"},
    TypeError,
    ("alpha", "float", "str"),
  ),
  "beta a bool": (
    (_A, _B, _C),
    {"beta": True},
    TypeError,
    ("beta", "float", "bool"),
  ),
  "config a dict": (
    (_A, _B),
    {"config": {"block_m": 64}},
    TypeError,
    ("config", "dict", lambda rung: rung.config_type.__name__),
  ),
  "config of the other kind": (
    (_A, _B),
    {"config": lambda rung: _OTHER_CONFIG[rung.config_type](64, 64, 64)},
    TypeError,
    (
      "config",
      lambda rung: rung.config_type.__name__,
      lambda rung: _OTHER_CONFIG[rung.config_type].__name__,
    ),
  ),
  "config with a tile of nothing": (
    (_A, _B),
    {"config": lambda rung: rung.config_type(0, 64, 64)},
    ValueError,
    ("config", "block_m", "0"),
  ),
  "config with a broken number": (
    (_A, _B),
    {"config": lambda rung: rung.config_type(64, 64.5, 64)},
    ValueError,
    ("config", "block_n", "64.5"),
  ),
}


def _resolve(value, rung):
  return value(rung) if callable(value) else value


@each_rung
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_is_told_what_is_wrong(rung, case):
  positional, keywords, error, words = BAD_CALLS[case]
  positional = [_resolve(x, rung) for x in positional]
  keywords = {name: _resolve(x, rung) for name, x in keywords.items()}
  with pytest.raises(error) as caught:
    rung.gemm(*positional, **keywords)
  for word in words:
    assert _resolve(word, rung) in str(caught.value), str(caught.value)


@pytest.mark.parametrize("rung", LADDER[8:], ids=lambda r: r.name)
def test_dtypes_may_not_differ(rung):
  first, second = rung.dtypes
  a = np.ones((3, 5), jnp.dtype(first))
  b = np.ones((5, 2), jnp.dtype(second))
  with pytest.raises(TypeError, match=f"b .*{first}.*{second}"):
    rung.gemm(a, b)


@each_rung
def test_a_config_that_no_gpu_can_hold_is_refused(rung):
  a, b, _ = problems.operands(8, 8, 8, rung.dtypes[0])
  problem = contract.Problem(8, 8, 8, rung.dtypes[0])
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


FIELDS = contract.TENSOR_CORE_FIELDS


@pytest.mark.parametrize("field", ["split", "raster_dim"])
def test_check_fields_of_names(field):
  config = TensorCoreConfig(64, 64, 64, epilogue_n=64, **{field: "k"})
  assert "'m' or 'n'" in contract.check_fields(config, FIELDS)
  assert field in contract.check_fields(config, FIELDS)


def test_check_fields_takes_a_good_config():
  good = TensorCoreConfig(64, 64, 64, epilogue_n=64)
  assert contract.check_fields(good, FIELDS) is None
  assert contract.check_fields(SimtConfig(64, 64, 8), ("block_k",)) is not None
  assert contract.check_fields(SimtConfig(1, 1, 8), ("block_k",)) is not None
  sizes = ("block_m", "block_n", "block_k")
  assert contract.check_fields(SimtConfig(64, 64, 8), sizes) is None
  assert "power of two" in contract.check_fields(SimtConfig(48, 64, 8), sizes)


def test_a_field_without_a_use_must_stay():
  config = TensorCoreConfig(64, 64, 64, stages=3)
  reason = contract.check_fields(config, FIELDS[:3])
  assert reason == "stages has no meaning here and must stay 1, got 3"


@each_rung
@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 65, 7), (256, 512, 64)])
def test_padding_is_what_the_kernel_needs_and_no_more(rung, shape):
  problem = contract.Problem(*shape, rung.dtypes[0])
  config = rung.default_config(problem)
  padded = rung.padded(problem, config)
  assert rung.padded(padded, config) == padded
  for name, multiple in zip("mnk", rung.padding(problem, config)):
    size, most = getattr(padded, name), getattr(problem, name)
    assert size % multiple == 0 and most <= size < most + multiple


@pytest.mark.parametrize(
  "name, label",
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


@pytest.mark.parametrize("name", [0, 13, -1, "fast", 1.5, None, True, "8b"])
def test_no_such_rung(name):
  with pytest.raises(ValueError, match=r"rung must be .*1 naive.*got"):
    ladder_lib.find(name)


def test_variants_stand_behind_their_rung():
  labels = [rung.label for rung in with_variants()]
  assert labels == ("1 2 3 4 5 6 7 8 8a 9 9a 9b 10 10a 11 11a 12".split())
  for rung in LADDER:
    for each in rung.variants:
      assert each.number == rung.number and each.variant
      assert each.module == rung.module and each.dtypes == rung.dtypes
