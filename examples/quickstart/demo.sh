#!/usr/bin/env bash
# The quickstart on a machine with Python 3.11 or later and nothing else:
#     bash examples/quickstart/demo.sh
# It creates its own environment (.venv-demo), fetches real weights, trains two small LoRA adapters, logs and registers
# everything in a local MLflow store (.demo), serves it with `mlflow models serve`, sends requests, and stops it all.
# If you run it again, it keeps the environment, the weights and the adapters, and creates a new store.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { printf '== %4d s  %s\n' "$SECONDS" "$*"; }  # a step, and the time since the start

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or later with venv is needed; name one with PYTHON=/path/to/python" >&2
    exit 1
}

export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
export TQDM_DISABLE=1 PYTHONWARNINGS=ignore
venv=.venv-demo
stamp="$venv/installed"
if [ ! -f "$stamp" ] || [ -n "$(find setup.cfg plugin flavors serving -newer "$stamp" \( -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name setup.cfg \) -print -quit)" ]; then
    say "installing into $venv (a few minutes the first time)"
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    # Every file except torch's is checked against its hash (tests/lock.sh). The project does not prescribe a build of
    # torch, so an installed CPU or CUDA build is kept. If pip is offered a CPU build of this version (2.13.0+cpu), it
    # takes that one, because it sorts above the plain version.
    say "libraries: $(grep -c '==' examples/quickstart/requirements.lock) packages"
    "$venv/bin/pip" install --quiet --require-hashes --no-deps -r examples/quickstart/requirements.lock
    say "torch, the largest one"
    "$venv/bin/pip" install --quiet "torch==2.13.0"
    say "mlflow-llm, with its kernels compiled"
    rm -rf build  # otherwise setuptools would include modules that no longer exist
    "$venv/bin/pip" install --quiet --force-reinstall --no-deps --no-build-isolation .
    rm -rf build
    touch "$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"

say "weights"
python examples/quickstart/fetch_weights.py
say "adapters (about two minutes the first time)"
python examples/quickstart/train_adapters.py
python examples/quickstart/demo.py
say "done; everything is stopped"
