"""Imports go downwards: between the package's rooms, and in its kernels."""

import pathlib

import pytest

from docs.extensions.arrows import arrows
import pallas_gemm

# From the top: each part imports only from what stands after it.
ORDERS = {
  ".": """
    __init__ autotuning serving explanation tracing ops tuning check ladder
    kernels measure report numerics roofline sampling blas problem dtypes
    mosaic ptx hardware compat jaxprs version
  """,
  "kernels": """
    activations sm90 triton_dense triton_kernel triton_config epilogues
    function_key
  """,
  "ptx": "__init__ clusters stores shifts copies threads mlir",
  "kernels/sm90": """
    launch tables legal producer by_threads consumer reduction stores epilogue
    mainloops block groups schedule plan matrices loaders tiling layout config
  """,
}

PACKAGE = pathlib.Path(pallas_gemm.__file__).parent


@pytest.mark.parametrize("folder", ORDERS)
def test_imports_go_downwards(folder):
  order = ORDERS[folder].split()
  upwards = {
    (source, target): files
    for source, targets in arrows(PACKAGE / folder).items()
    for target, files in targets.items()
    if order.index(source) > order.index(target)
  }
  assert not upwards


def test_an_arrow_upwards_is_seen(tmp_path):
  for name, text in {
    "__init__": "",
    "a": "from pallas.b import c",
    "b": "def f():\n  import pallas.a.x\n  from pallas import b, version",
  }.items():
    (tmp_path / "pallas").mkdir(exist_ok=True)
    (tmp_path / "pallas" / f"{name}.py").write_text(text)
  found = arrows(tmp_path / "pallas")
  assert found == {
    "a": {"b": {"a.py"}},
    "b": {"a": {"b.py"}, "__init__": {"b.py"}},
  }
