#!/usr/bin/env bash
# Makes .venv with everything the project needs. Usage: scripts/setup.sh [EXTRAS], default extras: test,notebooks.
# A second run finds its stamp and ends at once; a run after an interrupted one completes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-test,notebooks}
venv=.venv
stamp=$venv/setup-stamp
wanted=$( (echo "$extras"; pwd; cat pyproject.toml constraints.txt scripts/setup.sh) | sha256sum)

if [[ -f $stamp && $(<"$stamp") == "$wanted" && -x $venv/bin/jaxinfer ]]; then
  exit 0
fi

say() { printf '== %s\n' "$*" >&2; }

# Whether $1 runs, is 3.12 or newer, and can make virtual environments (Debian's python3 may lack ensurepip).
fits() { "$1" -c 'import sys; assert sys.version_info >= (3, 12); import ensurepip, venv' >/dev/null 2>&1; }

# Versions that the pinned packages were tested with come first.
on_path() {
  local name
  for name in python3.12 python3.13 python3.14 python3 python; do
    if fits "$name"; then command -v "$name"; return 0; fi
  done
  return 1
}

in_pyenv() {
  local root candidate
  root=$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")
  for candidate in "$root"/versions/3.12*/bin/python "$root"/versions/3.*/bin/python; do
    if [[ -x $candidate ]] && fits "$candidate"; then echo "$candidate"; return 0; fi
  done
  return 1
}

by_uv() {
  local uv=uv found
  if ! command -v uv >/dev/null 2>&1; then
    command -v python3 >/dev/null 2>&1 || return 1
    say "no Python 3.12 or newer here; getting one with uv"
    python3 -m venv .venv-uv >&2 && .venv-uv/bin/pip install --quiet uv >&2 || return 1
    uv=.venv-uv/bin/uv
  fi
  "$uv" python install 3.12 >&2 || return 1
  found=$("$uv" python find 3.12) && fits "$found" && echo "$found"
}

if [[ -x $venv/bin/python ]] && fits "$venv/bin/python"; then
  say "using the Python that is in $venv: $("$venv/bin/python" --version)"
else
  if ! python=$(on_path || in_pyenv || by_uv); then
    cat >&2 <<'END'
setup: error: no Python 3.12 or newer was found on PATH or in pyenv, and uv could not download one.
Install one (Debian: apt-get install python3.12 python3.12-venv; pyenv install 3.12; https://docs.astral.sh/uv), then run `make setup` again.
END
    exit 1
  fi
  say "making $venv with $python ($("$python" --version))"
  "$python" -m venv --clear "$venv"
fi

# An interrupted run may have left an environment without pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --upgrade >&2

say "installing the packages pinned in constraints.txt (a minute or two the first time)"
"$venv/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[$extras]"

if command -v nvidia-smi >/dev/null 2>&1 && [[ $extras != *cuda* ]]; then
  say "an NVIDIA GPU seems to be here; for it: make setup EXTRAS=test,notebooks,cuda13 (or cuda12)"
fi
echo "$wanted" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
say "ready: $venv/bin/jaxinfer"
