"""Sphinx's settings; `make docs` builds the site."""

import hashlib
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "docs" / "_build"

# For this process and for the cells of pages: the checkout is importable, and
# kernels are interpreted on the CPU.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(
  filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)
os.environ["JAX_PLATFORMS"] = "cpu"


def _sources_digest() -> str:
  """Of all code that cells run: what they printed is of that code alone."""
  digest = hashlib.sha256()
  for folder in ("pallas_gemm", "experiments", "examples"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


project = "pallas_gemm"
author = "The pallas_gemm authors"
copyright = author

extensions = [
  "docs.extensions",
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
]
exclude_patterns = ["_build", "_generated", "extensions", "figures", "sass"]
nitpicky = True
# Names of other projects: their sites are not asked while this one is built.
nitpick_ignore_regex = [(r"py:.*", r"(?!pallas_gemm\.).*")]

myst_enable_extensions = [
  "attrs_block",
  "attrs_inline",
  "colon_fence",
  "deflist",
  "dollarmath",
]
myst_heading_anchors = 4
myst_dmath_double_inline = True

# Cells run once for each state of the code; an error in one fails the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILD / "cells" / _sources_digest())
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True

# Of arguments, as the code has them.
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
# Styles in which a diff is red and green.
pygments_style = "tango"
pygments_dark_style = "monokai"
html_title = "pallas_gemm"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
