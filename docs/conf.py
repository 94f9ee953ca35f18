"""Sphinx's settings; `make docs` builds the site."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# For this process and for the notebook: the checkout is importable, and kernels
# are interpreted on the CPU.
sys.path.insert(0, str(ROOT))
import nbformat  # noqa: E402

from docs.extensions import cells  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join(
  filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)
os.environ["JAX_PLATFORMS"] = "cpu"


# What the sidebar lists, under its captions. It is no text of the pages, which
# read without Sphinx.
CONTENTS = {
  "Start": "start slow coming_from why_gemm cuda_to_pallas notebook",
  "The ladder": "rungs/index tensor_memory gpus change_a_kernel roofline"
  " published measuring lessons",
  "The ops": "ops/index ops/results ops/grouped ops/eight_bits ops/float32"
  " ops/precision ops/invariance ops/tuning ops/xla meshes serving recipes",
  "Reference": "api/ops api/ladder api/tuning glossary architecture"
  " contributing stability changelog",
}


def _add_contents(app, page, source):
  """Adds what pages have on the site alone: lists of pages, notebooks."""
  trees = CONTENTS if page == "index" else {}
  if page == "rungs/index":
    rungs = sorted((ROOT / "docs" / "rungs").glob("[01]*.md"))
    trees = {"Rungs": " ".join(path.stem for path in rungs)}
  for caption, names in trees.items():
    lines = "\n".join(names.split())
    tree = f"```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{lines}\n```"
    source[0] += f"\n{tree}\n"
  if page == "changelog":
    source[0] = (ROOT / "CHANGELOG.md").read_text()
  if "<!-- cell" in source[0]:
    file = f"_notebooks/{page.replace('/', '_')}.ipynb"
    (ROOT / "docs" / "_notebooks").mkdir(exist_ok=True)
    nbformat.write(cells.notebook(source[0]), ROOT / "docs" / file)
    source[0] += f"\n\n{{download}}`This page as a notebook </{file}>`\n"


def setup(app):
  """Sphinx's hook."""
  app.connect("source-read", _add_contents)


project = "pallas_gemm"
author = "The pallas_gemm authors"
copyright = author

extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["_build", "_notebooks", "extensions", "figures", "sass"]
myst_heading_anchors = 4

# Of the notebook alone: `docs.write` runs the cells of pages.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
# Styles in which a diff is red and green.
pygments_style = "tango"
pygments_dark_style = "monokai"
html_title = "pallas_gemm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
