"""The timer, and attribution of kernels to calls: CUPTI is a list here."""

import contextlib

import pytest

from experiments.harness import timing
from pallas_gemm import compat, hardware, measure


class FakeGpu:
  """Records what runs, as CUPTI does; a kernel is (name, ms)."""

  def __init__(self):
    self.sessions = 0
    self.calls = []
    self._open = None

  @contextlib.contextmanager
  def session(self):
    """Stands in for compat.cupti_session: filled at exit."""
    self.sessions += 1
    self._open, events = [], []
    try:
      yield events
    finally:
      events.extend(self._open)
      self._open = None

  def arm(self, name, *kernels):
    """An arm that launches these kernels; a callable gives them per call."""

    def fn():
      self.calls.append(name)
      launched = kernels[0]() if callable(kernels[0]) else kernels
      if self._open is not None:
        self._open.extend(launched)

    return timing.Arm(name, fn)


@pytest.fixture
def gpu(monkeypatch):
  """A GPU and its profiler, played."""
  fake = FakeGpu()
  monkeypatch.setattr(compat, "targets_gpu", lambda: True)
  monkeypatch.setattr(compat, "cupti_session", fake.session)
  monkeypatch.setattr(hardware, "current", lambda: hardware.lookup("H200"))
  flush = fake.arm("flush", ("f", 7.0), ("g", 9.0))
  monkeypatch.setattr(measure, "l2_flush", lambda l2_bytes: flush.call)
  return fake


def test_sums_all_kernels_of_a_call_and_leaves_the_flush_out(gpu):
  arms = [
    gpu.arm("mine", ("gemm", 2.0), ("reduce", 0.5)),
    gpu.arm("theirs", ("pad", 1.0), ("gemm", 3.0), ("slice", 1.0)),
  ]
  found = timing.measure(
    arms,
    warmup=2,
    repeats=4,
    flush=gpu.arm("flush", ("reduce", 9.0)),
  )
  assert found["mine"].ms == (2.5,) * 4
  assert found["theirs"].ms == (5.0,) * 4
  assert found["mine"].kernel_names == ("gemm", "reduce")
  assert found["theirs"].kernel_names == ("pad", "gemm", "slice")
  assert (found["mine"].repeats, found["mine"].warmup) == (4, 2)
  assert set(found) == {"mine", "theirs"}


def test_arms_are_interleaved_with_a_flush_before_each(gpu):
  timing.measure(
    [gpu.arm("a", ("k", 1.0)), gpu.arm("b", ("k", 1.0))],
    warmup=1,
    repeats=2,
    flush=gpu.arm("flush", ("f", 1.0)),
  )
  warm, counting = ["flush", "a", "b"], ["flush", "a", "b"]
  assert gpu.calls == warm + counting + ["flush", "a", "flush", "b"] * 2
  # One session for each count, one for all timed calls.
  assert gpu.sessions == 3 + 1


def test_statistics_are_of_the_calls(gpu):
  times = iter([0.0, 0.0, 5.0, 1.0, 2.0, 3.0, 4.0])
  arm = gpu.arm("a", lambda: [("k", next(times))])
  found = timing.measure([arm], warmup=1, repeats=5)["a"]
  assert found.ms == (5.0, 1.0, 2.0, 3.0, 4.0)
  assert (found.p25, found.median, found.p75) == (2.0, 3.0, 4.0)


def test_wall_time_stands_beside_short_calls_only(gpu):
  short = gpu.arm("short", ("k", 0.004))
  slow = gpu.arm("slow", ("k", 4.0))
  found = timing.measure([slow], repeats=3)
  assert found["slow"].wall_ms == () and found["slow"].wall_median is None
  found = timing.measure([short, slow], repeats=3)
  # Of both, so that they can be compared.
  assert len(found["short"].wall_ms) == len(found["slow"].wall_ms) == 3
  assert found["short"].wall_median >= 0


def test_kernels_of_one_call_may_come_in_either_order(gpu):
  orders = iter([[("x", 1.0), ("y", 2.0)], [("y", 2.0), ("x", 1.0)]] * 9)
  found = timing.measure([gpu.arm("a", lambda: next(orders))], repeats=5)
  assert set(found["a"].ms) == {3.0}


@pytest.mark.parametrize(
  "late",
  [
    [("k", 1.0), ("extra", 1.0)],  # one more than counted
    [],  # one less
  ],
)
def test_a_call_of_another_length_is_refused(gpu, late):
  calls = iter([[("k", 1.0)]] * 3 + [late] + [[("k", 1.0)]] * 9)
  arm = gpu.arm("a", lambda: next(calls))
  with pytest.raises(RuntimeError, match=r"CUPTI saw .* can't be attributed"):
    timing.measure([arm], warmup=1, repeats=5)


def test_a_kernel_that_was_not_counted_is_refused(gpu):
  names = iter("kkkzkkkk")
  arm = gpu.arm("a", lambda: [(next(names), 1.0)])
  with pytest.raises(RuntimeError, match=r"a call of a launched \['z'\]"):
    timing.measure([arm], warmup=1, repeats=5)


def test_an_arm_without_kernels_is_refused(gpu):
  with pytest.raises(RuntimeError, match="idle launched no GPU kernel"):
    timing.measure([gpu.arm("idle", list)])


@pytest.mark.parametrize(
  "arms, kwargs, message",
  [
    ([], {}, "different names, got \\[\\]"),
    (["a", "a"], {}, "different names, got \\['a', 'a'\\]"),
    (["a"], {"warmup": -1}, "want warmup >= 0 .*, got -1 and 25"),
    (["a"], {"repeats": 0}, "want .* repeats >= 1, got 5 and 0"),
  ],
)
def test_bad_arguments(gpu, arms, kwargs, message):
  with pytest.raises(ValueError, match=message):
    timing.measure([gpu.arm(name, ("k", 1.0)) for name in arms], **kwargs)


def test_flush_reads_several_times_the_cache():
  arm = timing.l2_flush(1 << 16)
  assert arm.fn.args[0].nbytes == measure.FLUSH_MULTIPLE << 16
  arm.call()
  with pytest.raises(ValueError, match="l2_bytes must be positive, got 0"):
    timing.l2_flush(0)


# Seconds, as autotune takes them.


def test_seconds_are_of_all_kernels_of_a_call_but_the_flush(gpu):
  calls = [gpu.arm("a", ("k", 1.0)), gpu.arm("b", ("k", 0.5), ("l", 0.25))]
  assert measure.seconds([x.call for x in calls]) == [1e-3, 0.75e-3]
  assert gpu.calls[-4:] == ["flush", "a", "flush", "b"]
  measure.seconds([x.call for x in calls], cold=False)
  assert gpu.calls[-4:] == ["a", "b", "a", "b"]


def test_seconds_are_medians(gpu):
  times = iter([0.0] * 3 + [1.0, 2.0, 90.0] * measure._REPEATS)
  arm = gpu.arm("a", lambda: [("k", next(times))])
  assert measure.seconds([arm.call]) == [2e-3]


def test_kernels_of_something_else_are_noticed(gpu):
  counts = iter(range(100))
  arm = gpu.arm("a", lambda: [("k", 1.0)] * (2 if next(counts) == 5 else 1))
  with pytest.raises(RuntimeError, match="something else"):
    measure.seconds([arm.call])


def test_without_cupti_the_hosts_clock(gpu, monkeypatch):
  def none():
    raise RuntimeError("CUPTI needs the jax CUDA plugin")

  monkeypatch.setattr(compat, "cupti_session", none)
  calls = [gpu.arm("a", ("k", 1.0)).call, gpu.arm("b", ("k", 1.0)).call]
  found = measure.seconds(calls)
  assert len(found) == 2 and min(found) > 0
  assert gpu.calls[-4:] == ["flush", "a", "flush", "b"]


def test_interpreted_calls_run_once():
  calls = []
  found = measure.seconds(
    [lambda: calls.append("a"), lambda: calls.append("b")]
  )
  assert calls == ["a", "b"] and min(found) > 0
