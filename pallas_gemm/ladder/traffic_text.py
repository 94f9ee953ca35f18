"""The numbers of `traffic`, for a terminal, and the formulas they come from."""

from pallas_gemm import hardware
from pallas_gemm import ladder as ladder_lib
from pallas_gemm.ladder import contract, traffic


def explain(
  rung: contract.Rung | int | str,
  config: contract.Config,
  problem: contract.Gemm,
  gpu: hardware.Gpu | None = None,
) -> str:
  """The model's numbers with the formulas they come from, for a terminal.

  Args:
    rung: as for `traffic.model`.
    config: as for `traffic.model`.
    problem: as for `traffic.model`.
    gpu: as for `traffic.model`.

  Returns:
    Lines of at most 80 columns, without a newline at the end.
  """
  rung = ladder_lib.find(rung)
  t = traffic.model(rung, config, problem, gpu)
  p = problem
  gpu_name = f"{t.gpu.name} ({t.gpu.sm_count} SMs)"
  if t.gpu.modelled_on:
    gpu_name += f", rates scaled from {t.gpu.modelled_on}"
  header = [
    f"rung {rung.label}, {rung.name}, on {gpu_name}",
    f"  M x N x K = {p.m} x {p.n} x {p.k}, {p.dtype}",
    f"  {_tiles(t)}",
  ]
  if not t.blocks:
    return "\n".join([*header, "  no product to compute, nothing to launch"])
  rows = [
    ("blocks of the result", f"{t.blocks:,}", "ceil(M / BM) ceil(N / BN)"),
    ("work", f"{_si(t.flops)}FLOP", "2 M N K"),
    *_explain_global(t),
    *_explain_shared(t),
    *_explain_floor(t),
  ]
  label = max(len(row[0]) for row in rows)
  value = max(len(row[1]) for row in rows)
  lines = [f"  {a:<{label}}  {b:<{value}}  {c}".rstrip() for a, b, c in rows]
  return "\n".join([*header, *lines])


def _tiles(t: traffic.Traffic) -> str:
  c = t.config
  text = f"BM x BN x BK = {c.block_m} x {c.block_n} x {c.block_k}"
  if isinstance(c, contract.SimtConfig):
    return f"{text}, TM x TN = {c.thread_m} x {c.thread_n}"
  return f"{text}, clusters of {c.cluster_m} x {c.cluster_n}"


def _explain_global(t: traffic.Traffic) -> list[tuple[str, str, str]]:
  reads = "(BM + BN) K"
  if not t.slabs:
    reads = "BM BN (TM + TN) K / (TM TN)"
  elif t.block_reads < t.block_unique_reads:
    c = t.config
    reads = f"(BM / {c.cluster_n} + BN / {c.cluster_m}) K by multicast"
  per_result = t.global_accesses_per_result
  rows = [
    ("global reads of a block", f"{t.block_reads:,}", reads),
    (
      "global reads per result",
      f"{per_result:,.6g}",
      f"{_in_terms_of_k(per_result, t.problem.k)}, reads / (BM BN)",
    ),
    ("global bytes read", f"{_si(t.global_load_bytes)}B", "by all blocks"),
    ("global bytes written", f"{_si(t.global_store_bytes)}B", ""),
    ("compulsory bytes", f"{_si(t.compulsory_bytes)}B", "each operand once"),
    (
      "arithmetic intensity",
      f"{t.intensity:.4g} FLOP/byte",
      "work / global bytes read",
    ),
  ]
  if t.sectors:
    a, b = t.sectors
    rows.insert(
      1, ("  different ones", f"{t.block_unique_reads:,}", "(BM + BN) K")
    )
    rows.append(
      (
        "sectors a warp touches",
        f"{a} of A, {b} of B",
        "of 32 bytes, in a step of k",
      )
    )
  return rows


def _explain_shared(t: traffic.Traffic) -> list[tuple[str, str, str]]:
  if not t.shared_load_bytes:
    return []
  per_result = t.shared_accesses_per_result
  in_k = _in_terms_of_k(per_result, t.problem.k)
  if isinstance(t.config, contract.SimtConfig):
    reads = f"{in_k} = (TM + TN) K / (TM TN)"
    ratio, by = "TM TN / (TM + TN)", "by all threads"
  else:
    m, n = traffic.multiplied_together(t.config, t.threads_load)
    reads, ratio = f"K / {m} + K / {n} ({m} x {n})", f"{m} x {n} / ({m} + {n})"
    by = "by all warps, for mma" if t.threads_load else "by wgmma and epilogue"
  rows = [
    ("shared reads per result", f"{per_result:,.6g}", reads),
    ("FMAs per shared read", f"{t.compute_to_load:.4g}", ratio),
    ("shared bytes read", f"{_si(t.shared_load_bytes)}B", by),
    ("shared bytes written", f"{_si(t.shared_store_bytes)}B", ""),
  ]
  if t.loads_per_fma:
    rows.append(
      (
        "issue slots for FMAs",
        f"{t.fma_issue_share:.1%}",
        f"{t.config.vector}-word loads, {1 / t.loads_per_fma:.4g} FMAs each",
      )
    )
  return rows


def _explain_floor(t: traffic.Traffic) -> list[tuple[str, str, str]]:
  f = t.floor
  floors = (
    ("compute", f.compute_seconds, "padded FLOP"),
    ("dram", f.memory_seconds, "compulsory"),
    ("l2", f.l2_seconds, "global bytes"),
    ("l1", f.l1_seconds, "cache lines"),
    ("shared memory", f.shared_seconds, "bank bytes"),
  )
  rows = []
  for name, seconds, what in floors:
    if seconds:
      what += " / peak rate" + (" <- binds" if name == f.binds else "")
      rows.append((f"floor of {name}", _time(seconds), what))
  rows.append(
    (
      "so at most",
      f"{_si(t.flops / f.seconds)}FLOP/s",
      f"work / floor of {f.binds}",
    )
  )
  return rows


def _in_terms_of_k(per_result: float, k: int) -> str:
  """A count per result as a multiple or a fraction of K."""
  times = per_result / k
  return f"{times:.4g} K" if times >= 1 else f"K / {1 / times:.4g}"


def _si(value: float) -> str:
  """A count with a decimal prefix and the space before its unit."""
  for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
    if value >= scale:
      return f"{value / scale:.4g} {prefix}"
  return f"{value:,.0f} "


def _time(seconds: float) -> str:
  for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
    if seconds >= scale:
      return f"{seconds / scale:.4g} {unit}"
  return f"{seconds / 1e-9:.3g} ns"
