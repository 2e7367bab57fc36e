#!/usr/bin/env bash
# Runs the tests that need a GPU without one, on an imitated one (tests/imitated_gpu): torch's own CUDA build, whose
# runtime library is replaced. Arguments go to pytest.
#
# Makes a virtual environment with that torch in build/imitated-gpu, some 4 GB. IMITATED_GPU_CAPABILITY, _SMS, _GIB and
# _SEED (the order in which streams go on) choose the GPU. Left out are two tests whose kernel reads the number of its
# multiprocessor, which cannot be imitated, and large products, which take minutes on a CPU.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
home="$PWD/build/imitated-gpu"
if [ ! -x "$home/bin/pytest" ]; then
    "$(find_python)" -m venv "$home"
    "$home/bin/pip" install --quiet 'torch==2.11.0' 'triton==3.6.0' 'numpy<2.4' 'nvidia-cuda-crt==13.0.*' \
        transformers hypothesis jsonschema pytest pytest-timeout
fi
"$home/bin/pip" install --quiet . 'numpy<2.4'
mkdir -p "$home/work"
"$home/bin/python" tests/imitated_gpu/build.py "$home/work"
export LD_LIBRARY_PATH="$home/work" PYTHONPATH="$PWD/tests/imitated_gpu:$PWD/tests/support"
exec "$home/bin/python" -m pytest -p imitated_gpu -p no:cacheprovider -m gpu tests/engine tests/graphs \
    -k "not see_no_other and not stays_there and not test_products" "$@"
