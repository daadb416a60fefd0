#!/usr/bin/env bash
# Resolve what the checks and the demo install, and write it down with the hashes of all its files:
#     bash tests/lock.sh [options of `uv pip compile`, e.g. --upgrade, --upgrade-package mlflow]
# Versions that a lockfile already has stay as long as setup.cfg and tests/requirements.txt allow them.
#
# torch and the CUDA libraries that some of its builds ask for are left out: which build it is (2.13.0, 2.13.0+cpu, a
# CUDA one) is the machine's choice, and each has hashes of its own. They are installed behind the lockfile, torch pinned
# to a version, and everything else that they need is in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -a mlflow_llm plugin flavors serving setup.cfg setup.py pyproject.toml README.md LICENSE "$scratch"
echo "torch==2.13.0" > "$scratch/torch.txt"
printf 'setuptools>=77\npip>=26\n' > "$scratch/build.txt"  # what builds the project itself, and installs it

lock() {
    local target=$1
    shift
    local from=("$scratch/setup.cfg" --extra gguf "$scratch/torch.txt" "$scratch/build.txt" "$@")
    local options=(--quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-package torch)
    [ ! -f "$target" ] || cp "$target" "$scratch/versions"
    : >> "$scratch/versions"
    uv pip compile "${options[@]}" "${from[@]}" -o "$scratch/versions"
    local name
    for name in $(grep -oE '^(nvidia-[a-z0-9-]+|cuda-[a-z-]+|triton)' "$scratch/versions"); do
        options+=(--no-emit-package "$name")
    done
    uv pip compile "${options[@]}" --generate-hashes "${from[@]}" -o "$scratch/versions"
    {
        echo "# Made by tests/lock.sh; see there why torch is not in it."
        cat "$scratch/versions"
    } > "$target"
    rm "$scratch/versions"
}

upgrade=("$@")
lock examples/quickstart/requirements.lock ${upgrade[@]+"${upgrade[@]}"}
lock tests/requirements.lock tests/requirements.txt --extra docs ${upgrade[@]+"${upgrade[@]}"}
