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
    say "installing into $venv"
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    "$venv/bin/python" examples/quickstart/install.py
    touch "$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"

say "weights"
python examples/quickstart/fetch_weights.py
say "adapters"
python examples/quickstart/train_adapters.py
say "log, serve and ask"
python examples/quickstart/demo.py
say "done: everything is stopped, and the store is in .demo"
