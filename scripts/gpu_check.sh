#!/usr/bin/env bash
# Checks neo-desktop on a machine with a CUDA GPU: runs its doctor and the tests that need a GPU, compares the GPU path
# with the CPU path and measures it. Ends with one page: working parts, fallbacks, speeds, targets.
#
# Installs into .venv like scripts/start. Arguments go to gpu_check.py ("--only PART" runs one part, "--device cpu" tries
# the script without a GPU).
#
# With PYTHON it works offline: that interpreter needs torch, Triton, numpy, safetensors, tokenizers, gguf, jinja2, psutil,
# nvidia-ml-py, rich, pybind11 and scikit-build-core; with pytest, hypothesis, jsonschema, llguidance and transformers it
# also runs the tests.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --target "$scratch" .
else
    prepare_environment "[all]"
    PYTHON=.venv/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check pytest pytest-timeout pytest-xdist hypothesis jsonschema
fi
export NEO_DESKTOP_CACHE="$scratch/cache"  # every start measures this machine anew
PYTHONPATH="$scratch:$PWD" "$PYTHON" scripts/gpu_check.py "$@"
