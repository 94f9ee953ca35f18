"""Runs the cells of a page, one after the other, in a process of their own."""

from collections.abc import Sequence
import os
import re

import nbclient
import nbformat

from docs.extensions import lookup

_TIMEOUT_S = 180
_INSTALL = '%pip install -q pallas-gemm "jax[cuda13]"'
# The code of a cell in a page, and what stands around it.
_CELL = re.compile(
  r"^<!-- cell[a-z ]* -->\n\n```python\n(.*?)^```\n.*?^<!-- end -->$",
  re.M | re.S,
)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.S)


def run(code: Sequence[str]) -> list[str]:
  """What each cell prints, as Markdown; "" of one that prints nothing."""
  cells = [nbformat.v4.new_code_cell(x) for x in code]
  notebook = nbformat.v4.new_notebook(cells=cells)
  at_root = {"metadata": {"path": str(lookup.ROOT)}}
  client = nbclient.NotebookClient(
    notebook, timeout=_TIMEOUT_S, resources=at_root
  )
  # Kernels are interpreted on the CPU.
  client.execute(env=os.environ | {"JAX_PLATFORMS": "cpu"})
  return [_printed(cell.outputs) for cell in notebook.cells]


def _printed(outputs) -> str:
  parts = []
  for output in outputs:
    if output.output_type == "stream":
      # Other logs differ from machine to machine.
      ours = output.name == "stdout" or output.text.startswith("WARNING:absl:")
      parts.append(output.text if ours else "")
    else:
      parts.append(output.data["text/plain"] + "\n")
  text = "".join(parts).strip("\n")
  return f"\n```text\n{text}\n```\n" if text else ""


def notebook(text: str) -> nbformat.NotebookNode:
  """A page as a notebook, without outputs; its first cell installs."""
  cells = [nbformat.v4.new_code_cell(_INSTALL)]
  for i, part in enumerate(_CELL.split(text)):
    part = part.strip("\n")
    if i % 2:
      cells.append(nbformat.v4.new_code_cell(part))
    elif part := _COMMENT.sub("", part):
      cells.append(nbformat.v4.new_markdown_cell(part))
  return nbformat.v4.new_notebook(cells=cells)
