#!/bin/sh
# Makes a virtual environment that holds this project and some of its extras.
#
#   tools/setup_env.sh DIRECTORY EXTRAS [CONSTRAINT...]
#
#   tools/setup_env.sh .venv test,aot
#   tools/setup_env.sh .venv-oldest test jax==0.11.2
#
# Needs python3 (3.12 or newer) or uv. A second call with the same arguments
# does nothing until pyproject.toml changes. A directory that holds something
# else is left alone. JAX's CUDA plugin, which the extra `aot` compiles with,
# goes to DIRECTORY/cuda-plugin: without the CUDA libraries JAX complains of it
# in every program that finds it.
set -eu

if [ $# -lt 2 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
venv=$1
extras=$2
shift 2

# What this script made has the stamp, with a line for each call that was
# carried out to its end.
stamp=$venv/.pallas-gemm-setup
request="$(cksum <pyproject.toml) [$extras] $*"
if [ -x "$venv/bin/python" ] && grep -qxF "$request" "$stamp" 2>/dev/null; then
  exit 0
fi

new_enough='import sys; sys.exit(sys.version_info < (3, 12))'

# The interpreter: `.python-version` steers uv and pyenv to a right one.
find_python() {
  for candidate in python3 python3.14 python3.13 python3.12 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c "$new_enough" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: needs Python 3.12 or newer (or uv, which fetches one);" \
    "python3 is $(python3 --version 2>&1)" >&2
  exit 1
}

is_ours() { [ -f "$venv/pyvenv.cfg" ] && [ -f "$stamp" ]; }
is_empty() {
  [ ! -e "$venv" ] || { [ -d "$venv" ] && [ -z "$(ls -A "$venv")" ]; }
}
if ! is_ours && ! is_empty; then
  echo "setup: $venv exists and is no environment of this project" >&2
  exit 2
fi

echo "setup: $venv with extras [$extras] $*"
# An environment whose interpreter is gone, or too old, is made anew.
if ! "$venv/bin/python" -c "$new_enough" >/dev/null 2>&1; then
  # What it is made with is found before anything is removed.
  if command -v uv >/dev/null 2>&1; then
    make_venv="uv venv --quiet"
  else
    python=$(find_python)
    make_venv="$python -m venv"
  fi
  rm -rf "$venv"
  $make_venv "$venv"
  : >"$stamp"
fi
pip() {
  command=$1
  shift
  if command -v uv >/dev/null 2>&1; then
    uv pip "$command" --quiet --python "$venv/bin/python" "$@"
  else
    case $command in uninstall) set -- --yes "$@" ;; esac
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check \
      "$command" "$@"
  fi
}
pip install -e ".[$extras]" "$@"

# A plugin in the environment itself stays where its CUDA libraries are found.
"$venv/bin/python" 2>/dev/null - <<'PYTHON' ||
import importlib.util

if importlib.util.find_spec("jax_cuda13_plugin"):
  from jax_plugins import xla_cuda13

  xla_cuda13.initialize()
PYTHON
  pip uninstall jax-cuda13-plugin jax-cuda13-pjrt
case ",$extras," in
*,aot,*)
  version=$("$venv/bin/python" -c \
    'from importlib import metadata; print(metadata.version("jaxlib"))')
  rm -rf "$venv/cuda-plugin"
  pip install --no-deps --target "$venv/cuda-plugin" \
    "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"
  ;;
esac
echo "$request" >>"$stamp"
