#!/usr/bin/env bash
# Everything there is to learn on a machine with a GPU, offline, in under nine minutes: what is missing here, the tests
# of the CUDA path with kernels compiled for real, and tokens a second in bfloat16 and fp8 beside the floor and vLLM.
#
#     bash benchmarks/gpu.sh [1b|3b|8b]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
size=${1:-1b}
ends=$((SECONDS + 530))
left() { local seconds=$((ends - SECONDS)); echo $((seconds < $1 ? (seconds > 1 ? seconds : 1) : $1)); }
unset TRITON_INTERPRET
export TRITON_DEFAULT_FP_FUSION=${TRITON_DEFAULT_FP_FUSION:-1}  # Triton 3.9 warns where it is not said
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

echo "## Here"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no nvidia-smi: no NVIDIA driver"
nproc | sed 's/$/ processors/'
"$python" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

for name in ("torch", "triton", "transformers", "msgspec", "pyzmq", "peft", "pytest", "vllm"):
    try:
        print(f"{name}: {version(name)}")
    except PackageNotFoundError:
        print(f"{name}: missing")
PYTHON
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch finds no CUDA device here: nothing can be run (a build of torch with CUDA is on https://download.pytorch.org/whl)"
  exit 2
fi
compiler=$(command -v gcc || command -v cc || command -v clang) || true
echo "C compiler, which Triton needs: ${compiler:-missing}"

echo; echo "## Tests"
timeout "$(left 240)" "$python" -m pytest -q -p no:cacheprovider -p no:randomly --timeout 120 \
  tests/serving/engine/devices/test_cuda.py tests/serving/engine/attention/paged/test_paged_decode.py tests/serving/engine/sampling/test_device_sampling.py \
  tests/serving/engine/attention/paged/test_paged_cache.py tests/serving/engine/forward/test_decode_graphs.py tests/serving/engine/attention/paged/test_paged_varlen.py \
  tests/serving/engine/models/fused tests/serving/engine/weights/test_fp8.py
tests=$?

echo; echo "## Decoding"
timeout "$(left 400)" "$python" benchmarks/gpu.py --size "$size" --seconds 100 --total "$(left 390)"
decoding=$?
echo; echo "tests: exit status $tests; decoding: exit status $decoding; $((530 - (ends - SECONDS))) s"
exit $((tests || decoding))
