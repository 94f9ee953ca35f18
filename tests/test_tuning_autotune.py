"""autotune: finds the products, measures, and remembers what is right."""

import dataclasses
import functools
import importlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import autotuning, compat, hardware, measure, tuning
from pallas_gemm.kernels.sm90 import launch
from pallas_gemm.kernels.sm90.config import Config
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import cache, model, trial
from pallas_gemm.tuning.cache import Entry

PROBLEM = Problem.flat(m=96, n=80, k=72, dtype="bfloat16", out_dtype="bfloat16")
# In the order of the model; the second is the fastest.
CONFIGS = tuple(
  Config(block_m=64, block_n=64, consumers=1, stages=2, epilogue_n=n)
  for n in (64, 32, 16)
)
SECONDS = dict(zip((*CONFIGS, "xla"), (2e-4, 1e-4, 3e-4, 5e-4)))


@pytest.fixture(autouse=True)
def fake_model(own_cache, monkeypatch):
  """A model of three configs."""
  monkeypatch.setattr(model, "candidates", lambda problem, **_: [*CONFIGS])
  monkeypatch.setattr(model, "choose", lambda problem: CONFIGS[0])


@pytest.fixture
def kernel(monkeypatch):
  """XLA in place of the kernel, and times that are known.

  Returns a dict: what to make of the results of a config.
  """
  tampering, by_xla = {}, autotuning.compiled_xla

  def fake(case, how, arrays):
    run, tamper = by_xla(case, arrays), tampering.get(how, lambda outs: outs)

    def call(**operands):
      return tamper(run(**operands))

    call.how = how
    return call

  def traced(a, b, *, problem, **_):
    return (jnp.zeros((problem.batch, problem.m, problem.n), a.dtype),)

  monkeypatch.setattr(launch, "dense", traced)
  monkeypatch.setattr(trial, "compiled", fake)
  monkeypatch.setattr(
    autotuning, "compiled_xla", lambda case, arrays: fake(case, "xla", arrays)
  )
  monkeypatch.setattr(
    measure, "seconds", lambda calls: [SECONDS[c.func.how] for c in calls]
  )
  return tampering


def case(**fields):
  given = {
    name: fields.pop(name)
    for name in ("activation", "alpha", "beta")
    if name in fields
  }
  if "activation" in given:
    fields["activation"] = "named"
  return trial.Case(PROBLEM.changed(**fields), **given)


def test_its_classes_are_where_users_import_them_from():
  module = importlib.import_module("pallas_gemm.tuning.autotune")
  assert module is tuning.autotune is autotuning


# What is remembered.


def test_the_fastest_is_remembered(kernel):
  before = tuning.generation()
  found = autotuning.tune(case())
  assert found.config == tuning.resolve(PROBLEM) == CONFIGS[1]
  assert found.seconds == SECONDS[CONFIGS[1]]
  assert found.model_config == CONFIGS[0]
  assert found.model_seconds == SECONDS[CONFIGS[0]]
  assert found.tried == tuple((c, SECONDS[c], None) for c in CONFIGS)
  assert found.xla_seconds == SECONDS["xla"]
  assert tuning.generation() > before


@pytest.fixture
def fast_xla(kernel, monkeypatch):
  """XLA's product is the fastest."""
  monkeypatch.setitem(SECONDS, "xla", 5e-5)


def test_xlas_product_may_win(fast_xla):
  found = autotuning.tune(case())
  assert found.entry == Entry(CONFIGS[1], 1e-4, 5e-5)
  assert "XLA's product: 50.0 us; it is left to XLA" in str(found)
  first, second, *_ = tuning.ranked(PROBLEM)
  assert (first.how, first.seconds, first.source) == ("xla", 5e-5, "measured")
  assert first.why == "it takes 100.0 us, XLA's product 50.0 (measured)"
  # Where XLA is not asked for, the fastest config is still the best.
  assert second.how == tuning.resolve(PROBLEM) == CONFIGS[1]


def run_out_of_memory(*_):
  raise RuntimeError("RESOURCE_EXHAUSTED: so many bytes")


def test_xlas_product_may_fail(fast_xla, monkeypatch):
  monkeypatch.setattr(autotuning, "compiled_xla", run_out_of_memory)
  found = autotuning.tune(case())
  assert found.entry == Entry(CONFIGS[1], 1e-4, None)
  assert "failed: xla: RuntimeError: RESOURCE_EXHAUSTED" in str(found)
  assert "XLA's product" not in str(found)


@pytest.fixture
def h200(monkeypatch):
  """Pretends that there is an H200."""
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  monkeypatch.setattr(hardware, "current", lambda: hardware.lookup("H200"))


def test_times_of_a_gpu_go_to_disk_and_interpreted_ones_do_not(kernel, request):
  autotuning.tune(case())
  assert not cache.folder().exists()
  request.getfixturevalue("h200")
  autotuning.tune(case())
  cache.clear()
  assert cache.lookup(PROBLEM) == Entry(CONFIGS[1], 1e-4, 5e-4)


ILLEGAL = dataclasses.replace(CONFIGS[0], stages=1)


@pytest.mark.parametrize(
  ("ranked", "remembered", "top", "tried"),
  (
    (CONFIGS, None, 2, CONFIGS[:2]),
    (CONFIGS, CONFIGS[2], 1, (CONFIGS[0], CONFIGS[2])),
    ((ILLEGAL, *CONFIGS[1:]), ILLEGAL, 2, CONFIGS[:2]),
  ),
  ids=("the model decides", "and what was remembered", "nothing illegal"),
)
def test_what_is_tried(kernel, monkeypatch, ranked, remembered, top, tried):
  monkeypatch.setattr(model, "candidates", lambda problem, **_: ranked)
  if remembered:
    cache.store(PROBLEM, Entry(remembered, 1e-9), persist=False)
  found = autotuning.tune(case(), top=top).tried
  assert tuple(config for config, *_ in found) == tried
  assert tuning.resolve(PROBLEM) == min(tried, key=SECONDS.get)


def fails(outs):
  raise ValueError("no such instruction\nand more lines")


WRONG = {
  "one element": lambda o: (o[0].at[0, -1, -1].add(1.0),),
  "not a number": lambda o: (o[0].at[0, 7, 11].set(jnp.nan),),
  "not written": lambda o: (o[0].at[:, 64:].set(0),),
  "shifted": lambda o: (jnp.roll(o[0], 1, axis=1),),
  "does not compile": fails,
}


@pytest.mark.parametrize("tamper", WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_never_remembered(kernel, monkeypatch, tamper):
  logged = []
  monkeypatch.setattr(
    autotuning.logging, "warning", lambda m, *args: logged.append(m % args)
  )
  kernel[CONFIGS[1]] = tamper
  found = autotuning.tune(case())
  assert tuning.resolve(PROBLEM) == found.config == CONFIGS[0]
  (_, _, reason) = found.tried[1]
  assert found.tried[1] == (CONFIGS[1], None, reason)
  want = "no such instruction" if tamper is fails else "wrong result"
  assert want in reason and "more lines" not in reason
  assert len(logged) == 1 and reason in logged[0]
  assert reason in str(found)


def test_none_works(kernel, monkeypatch):
  kernel.update(dict.fromkeys(CONFIGS, fails))
  found = autotuning.tune(case())
  assert found.config is found.seconds is found.model_seconds is None
  assert all(reason for *_, reason in found.tried)
  assert "no config worked" in str(found)
  assert cache.lookup(PROBLEM) == Entry(None, None, SECONDS["xla"])
  assert next(tuning.ranked(PROBLEM)).how == "xla"
  cache.clear()
  monkeypatch.setattr(autotuning, "compiled_xla", run_out_of_memory)
  assert autotuning.tune(case()).entry is cache.lookup(PROBLEM) is None


def test_a_remembered_config_that_became_wrong_is_replaced(kernel):
  cache.store(PROBLEM, Entry(CONFIGS[1], 1e-9), persist=False)
  kernel[CONFIGS[1]] = WRONG["shifted"]
  autotuning.tune(case())
  assert cache.lookup(PROBLEM).config == CONFIGS[0]


# What counts as right, with everything that a kernel may do to a product.

SILU = {"activation": jax.nn.silu}
CASES = {
  "transposed": {"transpose_a": True, "transpose_b": True},
  "alpha": {"alpha": -0.5},
  "bias": {"bias": "n"},
  "bias along m": {"bias": "m"},
  "residual": {"c_dtype": "bfloat16", "beta": 0.25, "alpha": 2.0},
  "residual and bias": {"c_dtype": "float32", "bias": "n"},
  "relu": {"activation": jax.nn.relu},
  "gelu": {"activation": jax.nn.gelu, "bias": "n"},
  "tanh": {"activation": jnp.tanh},
  "saved": SILU | {"bias": "n", "save_preactivation": True},
  "gated": SILU | {"gated": True},
  "gated and saved": SILU | {"gated": True, "save_preactivation": True},
  "batch": {"batch": 3, "batched_a": True},
  "batch of both": {"batch": 2, "batched_a": True, "batched_b": True},
  "large": {"m": 600, "n": 520},
}
ROUNDED = [(name, "bfloat16") for name in CASES]
ROUNDED += [
  (name, dtype)
  for name in ("residual and bias", "gated and saved")
  for dtype in ("float16", "float32")
]


def results(attempt):
  return attempt.call(autotuning.compiled_xla(attempt.case, attempt.operands))()


@pytest.mark.parametrize("name, out_dtype", ROUNDED)
def test_right_results_pass_and_wrong_ones_do_not(name, out_dtype):
  dtype = "bfloat16" if out_dtype == "bfloat16" else "float16"
  fields = CASES[name] | {"dtype": dtype, "out_dtype": out_dtype}
  attempt = trial.Trial(case(**fields))
  outs = results(attempt)
  assert attempt.error(outs) is None
  for i, out in enumerate(outs):
    changed = [*outs]
    # relu and its like forget what is below zero, so upwards.
    changed[i] = out.at[-1, -1, -1].add(2.0)
    assert "wrong result" in attempt.error(tuple(changed))


def test_xlas_product_takes_operands_by_name():
  """Not those it was compiled for: operands are drawn anew to be timed."""
  arrays = trial.operands(PROBLEM)
  by_xla = autotuning.compiled_xla(trial.Case(PROBLEM), arrays)
  (one,), (other,) = by_xla(**arrays), by_xla(a=-arrays["a"], b=arrays["b"])
  assert (one == -other).all() and one.any()


@pytest.mark.parametrize(
  ("name", "fields"),
  (
    ("bias", {"bias": "n", "activation": jax.nn.gelu}),
    ("c", {"c_dtype": "bfloat16"}),
    ("b_up", SILU | {"gated": True}),
  ),
)
def test_an_operand_that_is_not_read_is_seen(name, fields):
  attempt = trial.Trial(case(**fields))
  attempt.operands[name] = jnp.zeros_like(attempt.operands[name])
  assert "wrong result" in attempt.error(results(attempt))


# Which products of a function count.


def product(a, b, *, batch_invariant=False, **fields):
  """[M, N] of [M, K] and [K, N]."""
  fields = {"implementation": ("sm90",)} | fields
  if not batch_invariant:
    return pallas_gemm.matmul(a, b, **fields)
  with pallas_gemm.batch_invariant():
    return pallas_gemm.matmul(a, b, **fields)


def but(**fields):
  return functools.partial(product, **fields)


def array(*shape, dtype="bfloat16"):
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


A, B = array(48, 72), array(72, 40)


def names(fn, *args, **kwargs):
  return [
    autotuning.describe(found.problem)
    for found in autotuning.find(fn, *args, **kwargs)
  ]


def loss(a, b):
  return product(a, b).astype(jnp.float32).sum()


FUNCTIONS = {
  "itself": product,
  "twice": lambda a, b: product(a, b) + product(a, 2 * b),
  "scan": lambda a, b: lax.scan(
    lambda c, _: (c + product(a, b), None),
    jnp.zeros((48, 40), a.dtype),
    None,
    3,
  ),
  "while": lambda a, b: lax.while_loop(
    lambda c: product(c, b)[0, 0] < 0, lambda c: 2 * c, a
  ),
  "cond": lambda a, b: lax.cond(
    a[0, 0] > 0, product, lambda a, b: jnp.zeros((48, 40), a.dtype), a, b
  ),
  "custom_jvp": jax.custom_jvp(product),
  "custom_vjp": jax.custom_vjp(product),
  "nested": jax.jit(lambda a, b: jax.checkpoint(jax.jit(product))(a, b)),
}
FUNCTIONS["custom_jvp"].defjvp(lambda p, t: (product(*p), product(*t)))
FUNCTIONS["custom_vjp"].defvjp(
  lambda a, b: (product(a, b), (a, b)), lambda saved, ct: saved
)


PLAIN, OF_A, OF_B = (
  "48x40x72 bfloat16",
  "48x72x40 bfloat16 transpose_b",
  "72x40x48 bfloat16 transpose_a",
)
BATCH = array(3, 48, 72), array(3, 72, 40)
FOUND = {name: (fn, (A, B), [PLAIN]) for name, fn in FUNCTIONS.items()} | {
  # Nobody reads the product itself.
  "gradients": (jax.grad(loss, (0, 1)), (A, B), [OF_A, OF_B]),
  "gradient": (jax.grad(loss), (A, B), [OF_A]),
  "batch": (jax.vmap(product), BATCH, [f"{PLAIN} batch=3 batched_a batched_b"]),
}


@pytest.mark.parametrize("fn, args, want", FOUND.values(), ids=FOUND)
def test_products_are_found(kernel, fn, args, want):
  assert sorted(names(fn, *args)) == want


def test_what_is_no_array_is_not_traced(kernel):
  def fn(arrays, sizes, *, activation, out_dtype, extra=None):
    assert type(sizes[0]) is int and extra is None
    return product(**arrays, activation=activation, out_dtype=out_dtype)

  arrays = {"a": np.ones((48, 72), "float16"), "b": array(72, 40, dtype="f2")}
  (found,) = autotuning.find(
    fn, arrays, (1, 2), activation=jax.nn.relu, out_dtype=np.float32
  )
  assert found.activation is jax.nn.relu
  name = autotuning.describe(found.problem)
  assert name.startswith("48x40x72 float16 out_dtype=float32 activation=")


def test_what_a_case_needs_is_found(kernel):
  (found,) = autotuning.find(but(alpha=0.5, activation=jnp.tanh), A, B)
  assert (found.alpha, found.beta, found.activation) == (0.5, 1.0, jnp.tanh)


def test_ops_on_a_gpu_ask_for_the_kernel_by_themselves(kernel, h200):
  plain = "64x64x128 bfloat16"
  a, b = (jax.ShapeDtypeStruct(x, A.dtype) for x in ((64, 128), (128, 64)))
  assert names(pallas_gemm.matmul, a, b) == [plain]
  dimensions = (((1,), (0,)), ((), ()))
  assert names(pallas_gemm.dot_general, a, b, dimensions) == [plain]
  (gated,) = names(pallas_gemm.gated_matmul, a, b, w_up=b)
  assert gated.startswith(plain) and gated.endswith("gated")


def test_what_the_model_leaves_to_xla_is_tuned(kernel, h200):
  a = jax.ShapeDtypeStruct((64, 64), A.dtype)
  (found,) = autotuning.find(pallas_gemm.matmul, a, a)
  assert next(tuning.ranked(found.problem)).how == "xla"
  autotuning.tune(found)
  first = next(tuning.ranked(found.problem))
  assert (first.how, first.source) == (CONFIGS[1], "measured")
  assert cache.path_of().exists()


def test_the_ops_use_what_was_found(kernel, monkeypatch):
  used, traced = [], launch.dense

  def dense(*operands, config, **how):
    used.append(config)
    return traced(*operands, **how)

  monkeypatch.setattr(launch, "dense", dense)
  a, b = (jnp.ones(x.shape, x.dtype) for x in (A, B))
  op = functools.partial(pallas_gemm.matmul, implementation="sm90")
  op(a, b)
  assert set(used) == {CONFIGS[0]}
  autotuning.autotune(op, a, b)
  used.clear()
  op(a, b)
  assert set(used) == {CONFIGS[1]}


def wide(a, b):
  return product(a.astype("float32"), b.astype("float32"))


NOTHING = {
  "no product": (jnp.matmul, "no product of this package"),
  "float32": (wide, "float32 is XLA's"),
  "another way": (but(implementation=("xla",)), "runs on"),
  "explicit": (but(config=Config()), "explicit config"),
  "invariant": (but(batch_invariant=True), "batch-invariant"),
  "empty": (lambda a, b: product(a[:0], b), "empty"),
  "times zero": (but(alpha=0.0), "no product"),
}


@pytest.mark.parametrize("fn, reason", NOTHING.values(), ids=NOTHING)
def test_nothing_to_tune(kernel, fn, reason):
  with pytest.raises(ValueError, match=reason):
    autotuning.autotune(fn, A, B)


def test_needs_a_hopper_gpu(kernel):
  with pytest.raises(RuntimeError, match="needs a Hopper GPU"):
    autotuning.autotune(but(implementation=None), A, B)
  a100 = hardware.assume("A100-SXM4-80GB")
  with a100, pytest.raises(RuntimeError, match=r"capability 9\.0.*A100"):
    autotuning.autotune(product, A, B)


@pytest.mark.parametrize("top", [0, -1, 2.0, True, "8", None])
def test_top_is_a_positive_integer(top):
  with pytest.raises(ValueError, match="top must be a positive integer"):
    autotuning.autotune(product, A, B, top=top)


def test_not_while_tracing(kernel):
  with pytest.raises(TypeError, match="outside of jit"):
    jax.jit(lambda a: autotuning.autotune(product, a, a))(jnp.ones((8, 8)))


def test_result(kernel):
  def fn(a, b):
    return product(a, b), product(a, b, out_dtype=jnp.float32)

  result = autotuning.autotune(fn, A, B, top=2)
  assert [t.config for t in result.problems] == [CONFIGS[1]] * 2
  with pytest.raises(dataclasses.FrozenInstanceError):
    result.problems = ()
  text = str(result)
  assert "48x40x72 bfloat16 out_dtype=float32\n" in text
  assert "100.0 us, 2.00x as fast as the model's choice" in text
  assert "epilogue_n=32" in text


# The kernel itself.


def test_the_interpreted_kernel():
  fn = but(activation=jax.nn.gelu)
  (found,) = autotuning.autotune(fn, A, B, top=2).problems
  assert [reason for *_, reason in found.tried] == [None, None]
  assert found.entry == cache.lookup(found.problem)
  assert found.seconds > 0


@pytest.mark.gpu
def test_on_the_gpu():
  (found,) = autotuning.autotune(
    product, array(512, 256), array(256, 384)
  ).problems
  assert [reason for *_, reason in found.tried] == [None] * len(CONFIGS)
  assert found.seconds == min(seconds for _, seconds, _ in found.tried)
  assert 1e-6 < found.seconds < 1e-3
  cache.clear()
  assert cache.lookup(found.problem) == found.entry  # from disk
