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
# else is left alone.
set -eu

if [ $# -lt 2 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
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
if command -v uv >/dev/null 2>&1; then
  uv pip install --quiet --python "$venv/bin/python" -e ".[$extras]" "$@"
else
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e ".[$extras]" "$@"
fi
echo "$request" >>"$stamp"
