#!/usr/bin/env bash
# Runs the GPU tests on an imitated GPU (tests/imitated_gpu): torch's own CUDA build with a replaced runtime library.
# Arguments go to pytest; without arguments, one process per core runs tests.
# "--run" runs Python with the arguments that follow instead, on the imitated GPU.
#
# Takes some 6 minutes of processor time, and 14 to 17 minutes on two busy cores; the first run also downloads.
#
# Makes a virtual environment with that torch in build/imitated-gpu, some 4 GB. The environment chooses the GPU:
#
#   IMITATED_GPU_QUEUES         1 to 8 in-order hardware queues; by default drawn from the seed
#   IMITATED_GPU_SEED           draws the queue of streams and graph nodes, and the next queue to run
#   IMITATED_GPU_TIMEOUT_S      time without progress that counts as a deadlock
#   IMITATED_GPU_CAPABILITY, IMITATED_GPU_SMS, IMITATED_GPU_GIB
#   IMITATED_GPU_FAIL, IMITATED_GPU_HANG, IMITATED_GPU_DELAY_US     see tests/imitated_gpu/failures.cpp
#   IMITATED_GPU_SPOIL          comma-separated Triton kernels with wrong results
#
# Skips two tests whose kernel reads its multiprocessor's number, which cannot be imitated, and large matmuls, which
# take minutes on a CPU.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
home="$PWD/build/imitated-gpu"
if [ ! -x "$home/bin/pip" ]; then
    "$(find_python)" -m venv "$home"
fi
packages=('torch==2.11.0' 'triton==3.6.0' 'numpy<2.4' 'nvidia-cuda-crt==13.0.*' transformers networkx hypothesis jsonschema
    pytest pytest-timeout pytest-xdist)
wanted=$(installed_from "${packages[@]}")
if [ "$(cat "$home/installed" 2>/dev/null)" != "$wanted" ]; then
    "$home/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" -e '.[server]'
    mkdir -p "$home/work"
    echo "$wanted" > "$home/installed"
fi
"$home/bin/python" tests/imitated_gpu/build.py "$home/work"
export LD_LIBRARY_PATH="$home/work" PYTHONPATH="$PWD/tests/imitated_gpu:$PWD/tests/support"
[ "${1:-}" != --run ] || exec "$home/bin/python" "${@:2}"
mapfile -t files < <(grep -rlE 'mark\.gpu|needs_imitated_gpu' tests --include='test_*.py')
possible="not see_no_other and not stays_there and not test_products"
[ $# -gt 0 ] || set -- -n auto
"$home/bin/python" -m pytest -p imitated_gpu -p no:cacheprovider -m gpu --timeout 600 "${files[@]}" -k "$possible" "$@"
