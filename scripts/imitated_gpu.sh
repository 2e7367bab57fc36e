#!/usr/bin/env bash
# Runs the tests that need a GPU without one, on an imitated one (tests/imitated_gpu): torch's own CUDA build, whose
# runtime library is replaced. Arguments go to pytest, which then runs once, with the queues that the environment says.
#
# Without arguments: all tests with queues as the seed draws them, then graphs again with 1, 2, 3 and 8 queues. Each
# of these runs is ended after half an hour.
#
# Makes a virtual environment with that torch in build/imitated-gpu, some 4 GB. The environment chooses the GPU:
#
#   IMITATED_GPU_QUEUES         1 to 8 hardware queues that go on in order; otherwise drawn from the seed
#   IMITATED_GPU_SEED           of what is drawn: which queue a stream or a graph's node is put into, which one goes on
#   IMITATED_GPU_PATIENCE_S     for how long nothing may be able to run before that is a deadlock
#   IMITATED_GPU_CAPABILITY, IMITATED_GPU_SMS, IMITATED_GPU_GIB
#   IMITATED_GPU_FAIL, IMITATED_GPU_HANG, IMITATED_GPU_DELAY_US     see tests/imitated_gpu/failures.cpp
#   IMITATED_GPU_SPOIL          names of Triton kernels, with commas between, whose results are wrong
#
# Left out are two tests whose kernel reads the number of its multiprocessor, which cannot be imitated, and large
# products, which take minutes on a CPU.
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
run() {
    timeout 1800 "$home/bin/python" -m pytest -p imitated_gpu -p no:cacheprovider -m gpu "$@"
}
possible="not see_no_other and not stays_there and not test_products"
if [ $# -gt 0 ]; then
    run tests/engine tests/graphs tests/doctor -k "$possible" "$@"
    exit
fi
for folder in engine graphs doctor; do
    run "tests/$folder" -k "$possible"
done
for queues in 1 2 3 8; do
    IMITATED_GPU_QUEUES=$queues IMITATED_GPU_SEED=$queues run tests/graphs -k "graphs_give_the_tokens or raise_flags"
done
