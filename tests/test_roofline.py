"""roofline: known ridge points, floors that only rise with the work."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from pallas_gemm import hardware, roofline

A100 = hardware.lookup("A100-SXM4-80GB")
H200 = hardware.lookup("H200")
gpus = st.sampled_from(hardware.known_names()).map(hardware.lookup)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "tf32"])
amounts = st.floats(0, 1e18)


@pytest.mark.parametrize(
  ("gpu", "dtype", "ridge"),
  [
    (A100, "float32", 19500 / 2039),
    (H200, "float32", 67 / 4.8),
    (H200, "bfloat16", 989.5 / 4.8),
    (H200, "float16", 989.5 / 4.8),
    (H200, "tf32", 494.5 / 4.8),
  ],
)
def test_ridge_points(gpu, dtype, ridge):
  assert roofline.ridge_point(gpu, dtype) == pytest.approx(ridge)


@pytest.mark.parametrize("dtype", ["float64", "int16"])
def test_dtype_without_a_rate(dtype):
  with pytest.raises(ValueError, match=f"dtype must be one of .* got {dtype}"):
    roofline.peak_flops(H200, dtype)


@given(gpus, dtypes, st.floats(0, 1e6))
def test_the_roof_meets_the_slope_at_the_ridge(gpu, dtype, intensity):
  rate = roofline.attainable(intensity, gpu, dtype)
  peak = roofline.peak_flops(gpu, dtype)
  assert rate <= peak
  assert rate <= intensity * gpu.dram_bytes_per_s
  if intensity >= roofline.ridge_point(gpu, dtype) * (1 + 1e-9):
    assert rate == peak


@pytest.mark.parametrize(
  ("work", "binds"),
  [
    ({"flops": 67e12, "bytes": 0}, "compute"),
    ({"flops": 0, "bytes": 4.8e12}, "dram"),
    ({"flops": 0, "bytes": 0, "shared_bytes": 132 * 128 * 1.98e9},
     "shared memory"),
    ({"flops": 0, "bytes": 0, "l2_bytes": 132 * 64 * 1.98e9}, "l2"),
    ({"flops": 0, "bytes": 0, "l1_lines": 132 * 1.98e9}, "l1"),
  ],
)  # fmt: skip
def test_a_second_of_each_resource(work, binds):
  floor = roofline.floor(**work, gpu=H200)
  assert floor.seconds == pytest.approx(1)
  assert floor.binds == binds


@given(gpus, dtypes, amounts, amounts, amounts, amounts, amounts)
def test_floor_is_the_largest_part(gpu, dtype, flops, moved, shared, l2, l1):
  floor = roofline.floor(
    flops, moved, gpu, dtype, shared, l2_bytes=l2, l1_lines=l1
  )
  parts = {
    "compute": floor.compute_seconds,
    "dram": floor.memory_seconds,
    "shared memory": floor.shared_seconds,
    "l2": floor.l2_seconds,
    "l1": floor.l1_seconds,
  }
  assert floor.seconds == max(parts.values()) == parts[floor.binds]


works = st.tuples(amounts, amounts, amounts)


@given(gpus, dtypes, works, works)
def test_floor_rises_with_the_work(gpu, dtype, work, more):
  flops, moved, shared = work
  least = roofline.floor(flops, moved, gpu, dtype, shared).seconds
  more = [x + y for x, y in zip(work, more)]
  assert roofline.floor(more[0], more[1], gpu, dtype, more[2]).seconds >= least


@given(gpus, dtypes, st.floats(1e3, 1e15), st.floats(1e3, 1e15))
def test_floor_agrees_with_the_roofline(gpu, dtype, flops, moved):
  seconds = roofline.floor(flops, moved, gpu, dtype).seconds
  rate = roofline.attainable(flops / moved, gpu, dtype)
  assert flops / seconds == pytest.approx(rate)


@pytest.mark.parametrize(
  "amounts",
  [
    {"flops": -1, "bytes": 0},
    {"flops": 0, "bytes": float("nan")},
    {"flops": 0, "bytes": 0, "shared_bytes": -2},
    {"flops": 0, "bytes": 0, "l2_bytes": -2},
  ],
)
def test_negative_amounts(amounts):
  name = next(name for name, x in amounts.items() if not x >= 0)
  with pytest.raises(ValueError, match=f"{name} must be 0 or more"):
    roofline.floor(**amounts, gpu=H200)
  with pytest.raises(ValueError, match="intensity must be 0 or more"):
    roofline.attainable(-1, H200)
