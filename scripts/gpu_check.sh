#!/usr/bin/env bash
# Builds neo-desktop on a machine with a CUDA GPU, runs its doctor, checks the GPU path against the CPU path and measures
# it. Ends with one page: working parts, fallbacks, speeds, targets.
#
# Works offline, with torch, Triton, numpy, safetensors, tokenizers, jinja2, psutil, nvidia-ml-py, rich, pybind11 and
# scikit-build-core installed; with pytest, hypothesis, jsonschema, llguidance and transformers it also runs the tests
# that need a GPU.
# PYTHON chooses the interpreter; arguments go to gpu_check.py ("--device cpu" tries the script without a GPU).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
target="$(mktemp -d)"
trap 'rm -rf "$target"' EXIT
"$python" -m pip install --quiet --no-build-isolation --no-deps --no-index --target "$target" .
export NEO_DESKTOP_CACHE="$target/cache"  # every start measures this machine anew
PYTHONPATH="$target:$PWD" "$python" scripts/gpu_check.py "$@"
