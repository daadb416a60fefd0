#!/usr/bin/env bash
# Everything that is measured on a machine with a GPU, offline, in under six minutes: what is missing here, the tests of
# the CUDA path with kernels compiled for real, texts of all architectures, speeds beside the floor, HTTP, and peers.
#
#     bash benchmarks/gpu.sh [--wheels DIR] [PART...] [--size 1b|3b|8b] [--weights DIR] [--profile] [--json FILE]
#
# --wheels: what of this folder is not installed is installed for this run alone, without an index and without
# dependencies. All other arguments are those of benchmarks/gpu.py.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels='' device=cuda arguments=()
while (($#)); do
  case $1 in
    --wheels) wheels=${2:?--wheels takes a folder}; shift ;;
    --wheels=*) wheels=${1#*=} ;;
    --device) device=${2:?--device takes cuda or cpu}; arguments+=("$1" "$2"); shift ;;
    --device=*) device=${1#*=}; arguments+=("$1") ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
export TRITON_DEFAULT_FP_FUSION=${TRITON_DEFAULT_FP_FUSION:-1}  # Triton 3.9 warns where it is not said
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[[ $device == cpu ]] || unset TRITON_INTERPRET
if [[ -n $wheels ]]; then
  site=$(mktemp -d -t mlflow-llm-wheels-XXXXXX)
  trap 'rm -rf "$site"' EXIT
  "$python" benchmarks/gpu_parts/wheels.py "$wheels" "$site" || { echo "the wheels were not installed"; exit 2; }
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

echo "## Here"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no nvidia-smi: no NVIDIA driver"
nproc | sed 's/$/ processors/'
"$python" benchmarks/gpu_parts/here.py "$device" || exit
compiler=$(command -v gcc || command -v cc || command -v clang) || true
echo "C compiler, which Triton needs: ${compiler:-missing}"

echo
# A signal that ends this script ends the run, which then shows what it has: bash waits for it.
"$python" benchmarks/gpu.py --seconds $((350 - SECONDS)) ${arguments[@]+"${arguments[@]}"} &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM INT
wait "$run"
status=$?
while kill -0 "$run" 2>/dev/null; do
  wait "$run"
  status=$?
done
exit "$status"
