"""On a GPU that is no Hopper every answer is a result or a reason.

A device is pretended, of which JAX tells what it tells of a real one. XLA's
products run on the CPU; rungs are traced, and `make bench` goes up to the first
launch. That they compile is shown by tests/test_ladder_compile.py.
"""

import re
import types

import jax
import jax.numpy as jnp
import pytest

from experiments import ladder as program
from experiments.harness import ladder_cases
import pallas_gemm
from pallas_gemm import compat, hardware, ladder, report
from pallas_gemm.ladder import contract
from tests.support import pages, programs

# Compute capability by name; the last three are in no table.
GPUS = {
  "Tesla T4": "7.5",
  "NVIDIA L4": "8.9",
  "NVIDIA GeForce RTX 3090": "8.6",
  "NVIDIA GeForce RTX 4090": "8.9",
  "NVIDIA GeForce RTX 5090": "12.0",
  "NVIDIA A100-SXM4-80GB": "8.0",
  "NVIDIA B200": "10.0",
  "NVIDIA GB300": "10.3",
  "NVIDIA RTX 2000 Ada Generation": "8.9",
  "Tesla V100-SXM2-16GB": "7.0",
  "AMD Instinct MI300X": "gfx942",
}
SNIPPETS = re.findall(
  r"(?ms)^```python\n(.*?)^```", (pages.ROOT / "README.md").read_text()
)


@pytest.fixture(params=GPUS, autouse=True)
def gpu(request, monkeypatch):
  """The name of the GPU that JAX is said to see."""
  device = types.SimpleNamespace(
    platform="gpu",
    device_kind=request.param,
    compute_capability=GPUS[request.param],
  )
  monkeypatch.setattr(compat, "target_device", lambda: device)
  return request.param


def test_snippets_of_the_readme():
  """A rung of Hopper's says why not; the ops run."""
  *ops, rung = SNIPPETS
  names = {}
  for code in ops:
    exec(code, names)
  with pytest.raises(ValueError, match="rung 12 needs "):
    exec(rung, {})


def test_explain(gpu, caplog):
  """A warning, once, of a GPU of which nothing is known."""
  report.reset()
  x = jnp.ones((64, 64), jnp.bfloat16)
  pallas_gemm.explain(pallas_gemm.matmul, x, x)
  found = pallas_gemm.explain(pallas_gemm.matmul, x, x)
  [product] = found.products
  assert product.implementation == "xla"
  assert "needs" in product.why and gpu in product.why
  said = [x for x in caplog.messages if x.startswith("products are XLA's: ")]
  unknown = "V100" in gpu or "AMD" in gpu
  assert len(said) == unknown and (not said or gpu in said[0])


def test_the_kernel_on_demand_says_why_not(gpu):
  x = jnp.ones((64, 64), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match=f"the kernel needs .*{gpu}"):
    pallas_gemm.matmul(x, x, implementation="sm90")


def test_each_rung_is_traced_or_refused():
  for rung in ladder.with_variants(ladder.LADDER + ladder.BLACKWELL):
    x = jax.ShapeDtypeStruct((200, 200), rung.dtypes[0])
    reason = rung.lacks()
    if reason is None:
      assert jax.eval_shape(rung.gemm, x, x).shape == (200, 200)
      continue
    assert reason.startswith(f"rung {rung.label} needs ") and "\n" not in reason
    with pytest.raises(ValueError, match=re.escape(reason)):
      rung.gemm(jnp.ones((8, 8), x.dtype), jnp.ones((8, 8), x.dtype))


def test_the_programs_up_to_the_first_launch(
  gpu, monkeypatch, tmp_path, capsys
):
  launched = []

  def measure(bench, case):
    del bench
    launched.append(case.kernel)
    raise NotImplementedError("a launch")

  monkeypatch.setattr(program, "measure", measure)
  programs.pretend_times(monkeypatch)
  programs.call(program.main, [f"--output_dir={tmp_path}"])
  out = capsys.readouterr().out
  fit = [x for x in ladder.with_variants() if x.lacks() is None]
  assert {x.name for x in fit} <= {*launched}
  assert out.count("  skipped: rung ") == len(ladder.with_variants()) - len(fit)
  for name in ladder_cases.PEERS:
    try:
      ladder_cases.peer(name, contract.Problem(64, 64, 64, "bfloat16")).arm()
    except NotImplementedError as error:
      assert str(error)


def test_explain_of_the_runner(gpu, capsys):
  """Of a GPU by name, whatever is in this machine."""
  status = programs.call(program.main, ["--explain=12", "--gpu=L4"])
  out = capsys.readouterr().out
  assert status == 0
  assert "machine code: none; rung 12 needs wgmma" in out
  assert hardware.lookup("L4").name in out
