"""Rows as the programs write them, made up."""

from typing import Any

from experiments.harness import rows

_BASE = {
  "experiment": "ladder",
  "kernel": "naive",
  "number": 1,
  "m": 48,
  "n": 40,
  "k": 24,
  "dtype": "float32",
  "alpha": 1.0,
  "beta": 0.0,
  "config": {"block_m": 32},
  "ms_median": 1.0,
  "ms_p25": 0.9,
  "ms_p75": 1.1,
  "tflops": 1.0,
  "gbytes_per_s": 1.0,
  "baseline_ms_median": 1.0,
  "ratio_to_jnp_dot": 1.0,
  "max_error": 1e-6,
  "error_bound": 1e-5,
  "passed": True,
  "repeats": 25,
  "warmup": 5,
  "distribution": "normal(0,1)",
  "seed": 0,
  "device": "Test GPU",
  "driver": None,
  "cuda": None,
  "jax": "0.0",
  "jaxlib": "0.0",
  "sm_clock_mhz": None,
  "power_w": None,
  "temperature_c": None,
  "kernel_names": ["naive"],
  "baseline_kernel_names": ["gemm"],
  "commit": None,
  "utc": "2026-01-01T00:00:00Z",
}
_OP = {"number": None, "dtype": "bfloat16", "suite": "square"}


def row(**fields: Any) -> dict[str, Any]:
  """A row of the ladder with every field; `fields` replace some."""
  known = {name: x for name, x in fields.items() if name in rows.FIELDS}
  made = rows.as_dict(rows.Row(**_BASE | known))
  return made | {name: x for name, x in fields.items() if name not in known}


def dense(ratio: float | None, **fields: Any) -> dict[str, Any]:
  """A row of a dense op that is `ratio` times as fast as its baseline."""
  case = {"epilogue": "none", "layout": "NN", "batch": 1}
  found = _OP | case | {"out_dtype": "bfloat16", "ratio_to_jnp_dot": ratio}
  found |= {"experiment": "dense", "kernel": "matmul"}
  return row(**found | fields)


def ragged(ms: float | None, **fields: Any) -> dict[str, Any]:
  """A row of a grouped product that takes so long; jnp.dot takes 1 ms."""
  arms = {
    "pallas_gemm": {"ms_median": ms, "tflops": ms and 1 / ms},
    "jnp.dot": {"ms_median": 1.0, "tflops": 1.0},
  }
  case = {"pass": "forward", "groups": 8, "group_sizes": "even"}
  found = _OP | case | {"arms": {} if ms is None else arms, "skipped": {}}
  found |= {"experiment": "ragged", "kernel": "ragged_dot", "suite": "mixtral"}
  found |= {"ms_median": ms, "tflops": ms and 1 / ms}
  return row(**found | fields)


def sizes(**fields: Any) -> list[dict[str, Any]]:
  """Rows of the suite "sizes": the share grows with rows a group."""
  return [
    ragged(
      1.0,
      suite="sizes",
      **{"group_sizes": how, "pass": pass_, "m": 32 * a_group, "groups": 32},
      n=2048,
      k=4096,
      tflops=80.0 * i,
      gbytes_per_s=1.0,
      copy_gbytes_per_s=4000.0,
      **fields,
    )
    for i, a_group in enumerate((8, 96, 1024), start=1)
    for how in ("even", "zipf")
    for pass_ in ("forward", "dx", "dw")
  ]


def ladder(size: int = 4096, device: str = "NVIDIA H200") -> list[dict]:
  """Two fp32 rungs, one of 16 bits and a variant of it, with baselines."""
  found = []
  for kernel, number, tflops, dtype in (
    ("jnp.dot HIGHEST", None, 50.0, "float32"),
    ("jnp.dot DEFAULT", None, 400.0, "float32"),
    ("naive", 1, 0.5, "float32"),
    ("coalesced", 2, 5.0, "float32"),
    ("jnp.dot", None, 800.0, "bfloat16"),
    ("tensor_cores", 9, 320.0, "bfloat16"),
    ("tensor_cores_pipelined", 9, 640.0, "bfloat16"),
  ):
    baseline = 50.0 if dtype == "float32" else 800.0
    times = {"tflops": tflops, "ms_median": 100 / tflops}
    times["ratio_to_jnp_dot"] = tflops / baseline
    size_of = dict.fromkeys("mnk", size)
    what = {"kernel": kernel, "number": number, "dtype": dtype}
    found.append(row(**what, **size_of, **times, device=device))
  found[1]["config"] = {"precision": "DEFAULT"}
  found[-1]["variant"] = "b"
  return found


def counters(**fields: Any) -> dict[str, Any]:
  """A row of experiments.counters, of rung 1."""
  product = {"m": 4096, "n": 4096, "k": 4096, "dtype": "float32"}
  return {
    "experiment": "counters",
    "kernel": "naive",
    "number": 1,
    **product,
    "measured": {"dram_read_bytes": 2.5e9, "fma_pipe_percent": 61.25},
    "stalls": {"wait": 2.0, "selected": 1.0},
    "occupancy": {"registers": 168, "threads": 384.0, "limit": "registers"},
    "device": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "jax": "0.11.2",
    "commit": "b" * 40,
    "utc": "2026-01-02T03:04:05Z",
  } | fields
