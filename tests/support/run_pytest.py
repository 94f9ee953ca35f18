"""Runs pytest on the files named as arguments; the main of Bazel's tests."""

import sys

import pytest

if __name__ == "__main__":
  sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
