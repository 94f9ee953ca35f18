#!/bin/sh
# Makes a virtual environment that holds this project and some of its extras.
#
#   tools/setup_env.sh DIRECTORY EXTRAS [CONSTRAINT...]
#
#   tools/setup_env.sh .venv test,aot
#   tools/setup_env.sh .venv-oldest test jax==0.11.2
#
# Needs python3 (3.12 or newer) or uv. A second call with the same arguments
# does nothing until pyproject.toml changes.
set -eu

if [ $# -lt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
venv=$1
extras=$2
shift 2

# One line of the stamp for each call that was carried out to its end.
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

echo "setup: $venv with extras [$extras] $*"
# An environment whose interpreter is gone, or too old, is made anew.
fresh=no
if ! "$venv/bin/python" -c "$new_enough" >/dev/null 2>&1; then
  rm -rf "$venv"
  fresh=yes
fi
if command -v uv >/dev/null 2>&1; then
  [ "$fresh" = no ] || uv venv --quiet "$venv"
  uv pip install --quiet --python "$venv/bin/python" -e ".[$extras]" "$@"
else
  if [ "$fresh" = yes ]; then
    python=$(find_python)
    "$python" -m venv "$venv"
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e ".[$extras]" "$@"
fi
echo "$request" >>"$stamp"
