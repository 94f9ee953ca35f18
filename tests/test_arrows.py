"""Imports go downwards, names name one thing each, and functions are short."""

import ast
import pathlib

import pytest

from docs.extensions.arrows import arrows
import pallas_gemm

# From the top: each part imports only from what stands after it.
ORDERS = {
  ".": """
    __init__ qwix autotuning serving explanation tracing ops tuning check ladder
    splitting kernels measure report numerics sums roofline sampling blas
    problem quantization meshes dtypes mosaic ptx hardware gpus compat jaxprs
    version
  """,
  "kernels": """
    activations sm90 triton_dense triton_kernel triton_config epilogues
    function_key
  """,
  "ptx": """
    __init__ casts clusters maxima stores shifts copies loads threads mlir
  """,
  "kernels/sm90": """
    launch quantizing quantized_tile scales tables legal producer splitter
    by_threads consumer reduction stores epilogue mainloops block groups
    schedule plan memory matrices loaders tiling layout config planes
  """,
}

PACKAGE = pathlib.Path(pallas_gemm.__file__).parent
FILES = [str(x.relative_to(PACKAGE)) for x in sorted(PACKAGE.rglob("*.py"))]
# The ladder's kernels are read in one piece.
SHORT = [x for x in FILES if x.startswith(("kernels", "ops", "tuning", "ptx"))]


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


def test_classes_of_two_modules_have_two_names():
  found = {}
  for file in FILES:
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
      if isinstance(node, ast.ClassDef):
        found.setdefault(node.name, []).append(file)
  # Which users write, and by its module.
  assert len(found.pop("Config")) == 2
  assert not {name: files for name, files in found.items() if len(files) > 1}


@pytest.mark.parametrize("file", SHORT)
def test_functions_have_at_most_60_lines(file):
  """Besides what their docstrings say."""
  for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
    if isinstance(node, ast.FunctionDef):
      said = node.body[0] if ast.get_docstring(node) is not None else None
      lines = node.end_lineno - node.lineno + 1
      lines -= said.end_lineno - said.lineno + 1 if said else 0
      assert lines <= 60, node.name
