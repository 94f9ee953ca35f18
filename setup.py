"""The description on a package index: README without links into a checkout."""

import pathlib
import re

import setuptools

readme = (pathlib.Path(__file__).parent / "README.md").read_text()
# A picture or a link whose address is no URL leads nowhere there.
readme = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", readme)
readme = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)
readme = re.sub(r"<!--.*?-->\n*", "", readme)
setuptools.setup(
  long_description=readme, long_description_content_type="text/markdown"
)
