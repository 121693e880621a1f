#!/usr/bin/env bash
# Everything about this engine on one GPU, in eight minutes: see README.md beside this. Needs no network and no setup.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
[[ -x "$python" || -n "${PYTHON:-}" ]] || python=python3
exec "$python" -m benchmarks.gpu.run "$@"
