"""The cost model of grouped products, and autotune's trials of them."""

import random

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import autotuning, hardware, tuning
from pallas_gemm.kernels.sm90 import legal, loaders
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.kernels.sm90.plan import Plan
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import grouped, model, trial
from tests.support import products
from tests.test_tuning_model import python_calls

pytestmark = pytest.mark.usefixtures("own_cache")
DTYPES = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
ROWS = Problem.flat(m=8192, n=14336, k=4096, ragged="m", groups=8, **DTYPES)
SLABS = Problem.flat(
  m=4096, n=14336, k=8192, ragged="k", groups=8, transpose_a=True, **DTYPES
)
SMALL = Config(block_m=64, block_n=64, stages=2, consumers=1)


PROBLEMS = {
  "rows": ROWS,
  "slabs": SLABS,
  "many_groups": ROWS.changed(m=131072, n=1024, groups=256),
  "decode": ROWS.changed(m=64),
  "gated": ROWS.changed(gated=True, activation="silu"),
  "unaligned": ROWS.changed(m=517, n=1001, k=2003),
  "one_column": ROWS.changed(n=1),
  "more_groups_than_rows": ROWS.changed(m=100, groups=512),
  "float32": SLABS.changed(out_dtype="float32"),
  # Threads may find no room for two stages; such tiles are passed over.
  "no_room": ROWS.changed(
    m=16000, n=1407, gated=True, activation="silu", save_preactivation=True
  ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_choice_is_legal(name):
  problem = PROBLEMS[name]
  config = tuning.resolve(problem)
  assert legal.reason(Plan.of(problem, config)) is None
  assert config == grouped.choose(problem)


@pytest.mark.parametrize(
  ("m", "n", "width"), [(4096, 2048, 128), (4100, 2048, 64), (4096, 2056, 64)]
)
def test_short_groups_store_two_atoms_at_a_time(m, n, width):
  short = SLABS.changed(m=m, n=n, k=1024, groups=32)
  found = [x for x in grouped.candidates(short) if x.split == "n"]
  found = [x for x in found if (x.block_m, x.block_n) == (64, 256)]
  assert {x.epilogue_n for x in found} == {width}


HOPPERS = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.mark.parametrize("gpu", HOPPERS)
def test_results_that_would_straddle_sectors_leave_by_rows(gpu):
  """Subtiles of 64 bytes took 572 us (H200), 1407 columns by rows 367."""
  straddling = SLABS.changed(n=1400, k=8191, groups=60)
  with hardware.assume(gpu):
    assert Plan.of(straddling, grouped.choose(straddling)).tiling.by_rows


@pytest.mark.parametrize("gpu", HOPPERS)
@pytest.mark.parametrize("rows", (136, 512))
@pytest.mark.parametrize("dx", (False, True), ids=["forward", "dx"])
def test_weights_that_threads_move_find_room_and_get_tall_tiles(gpu, rows, dx):
  """A chunk takes threads as long however many rows A's tile has."""
  sizes = {"m": 60 * rows, "n": 1407, "k": 4096, "groups": 60}
  if dx:
    sizes |= {"n": 4096, "k": 1407, "transpose_b": True}
  problem = Problem.flat(**sizes, ragged="m", **DTYPES)
  with hardware.assume(gpu):
    config = grouped.choose(problem)
    assert isinstance(Plan.of(problem, config).loader, loaders.Shifts)
    assert legal.reason(Plan.of(problem, config)) is None
  assert config.block_m >= 192 and config.block_n == 128


@pytest.mark.parametrize("gpu", HOPPERS)
def test_no_cluster_is_predicted_to_be_best(gpu):
  """So the choice is the first candidate, without a look at clusters."""
  rng = random.Random(0)
  with hardware.assume(gpu):
    for _ in range(40):
      m, n = (rng.choice((768, 1408, 2048, 5120, 14336)) for _ in "mn")
      groups, rows = rng.choice((2, 8, 32, 128)), rng.choice((8, 64, 200, 2000))
      problem = SLABS.changed(m=m, n=n, k=groups * rows, groups=groups)
      best = model.first_legal(problem, grouped.candidates(problem))
      assert grouped.choose(problem) == best


def test_few_rows_get_low_tiles_and_many_get_high_ones():
  assert grouped.choose(PROBLEMS["decode"]).block_m == 64
  assert grouped.choose(ROWS).block_m >= 128


@pytest.mark.parametrize("problem", [ROWS, SLABS], ids=["rows", "slabs"])
def test_predicted_is_no_faster_than_the_tensor_cores(problem):
  gpu = hardware.lookup("NVIDIA H200")
  seconds = grouped.predict(Plan.new(problem, grouped.choose(problem), gpu))
  flops = 2 * problem.m * problem.n * problem.k
  assert 0.3 < flops / seconds / gpu.bf16_flops < 1


def test_a_choice_takes_little_time():
  """10,176 calls of Python functions take 6 ms of a busy core."""
  other = ROWS.changed(n=ROWS.n + 64)
  assert 1000 < python_calls(grouped.choose, ROWS, other) < 12_500


def test_no_legal_config():
  with pytest.raises(NotImplementedError, match="must be bfloat16 or float16"):
    grouped.choose(ROWS.changed(dtype="int16"))


# Trials, interpreted.

SMALL_ROWS = ROWS.changed(m=96, n=72, k=64, groups=2)
SMALL_SLABS = SLABS.changed(m=72, n=64, k=96, groups=2)
SILU = {"activation": "silu"}
TRIALS = {
  "bias": SMALL_ROWS.changed(bias="n", **SILU),
  "gated": SMALL_ROWS.changed(
    gated=True, save_preactivation=True, transpose_b=True, **SILU
  ),
  "slabs": SMALL_SLABS,
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_right_result_passes_and_a_wrong_one_does_not(name):
  activation = TRIALS[name].epilogue.activation and jax.nn.silu
  attempt = trial.Trial(trial.Case(TRIALS[name], activation))
  by_xla = autotuning.compiled_xla(attempt.case, attempt.operands)
  assert attempt.error(attempt.call(by_xla)()) is None
  kernel = trial.compiled(attempt.case, SMALL, attempt.operands)
  results = attempt.call(kernel)()
  assert attempt.error(results) is None
  last = results[-1]
  wrong = last.at[(-1,) * last.ndim].add(jnp.asarray(64, last.dtype))
  assert "wrong result" in attempt.error((*results[:-1], wrong))


def test_autotune_finds_the_products_of_a_training_step():
  x = products.normal(40, 64, dtype=jnp.bfloat16)
  w = products.normal(2, 64, 72, dtype=jnp.bfloat16)
  sizes = jnp.array([25, 12], jnp.int32)

  def loss(w, x):
    out = pallas_gemm.ragged_dot(x, w, sizes, implementation="sm90")
    return jnp.sum(out.astype(jnp.float32) ** 2)

  found = autotuning.find(jax.grad(loss), w, x)
  kinds = [
    (p.along, p.groups.count, p.m, p.n, p.k) for p in (c.problem for c in found)
  ]
  assert kinds == [("m", 2, 40, 72, 64), ("k", 2, 64, 72, 40)]


def test_tiles_of_groups_whose_sizes_are_spread():
  """Some have just as many rows as the others in the mean."""
  count = grouped._row_tiles
  for rows in (0.25, 1, 64, 128, 136, 1000, 100_000):
    for height in (64, 128, 192, 256):
      assert max(1, rows / height) <= count(rows, height) <= rows / height + 1
  assert count(64, 256) == pytest.approx(1)
  assert 1.2 < count(128, 128) < 1.4
  assert 1.0 < count(136, 192) < 1.2
