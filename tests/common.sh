# Sourced by the scripts beside it: what they share.

say() { printf '== [%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Print the first Python that the checks can use.
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

# Copy what the tests read from the checkout $1 to $2, away from the source tree: `python -m` puts the working directory
# before installed packages.
copy_tests() {
    mkdir "$2"
    (cd "$1" && cp -a .ci tests examples notebooks benchmarks docs pyproject.toml setup.cfg LICENSE ./*.md "$2")
    mkdir -p "$2/serving/engine"  # its kernels are compiled for another CPU by a test
    cp -a "$1/serving/engine/native" "$2/serving/engine"
    rm -f "$2"/serving/engine/native/*.so
}

# Copy what the wheel is built from in the checkout $1 to $2, where nothing else lies.
copy_source() {
    mkdir "$2"
    (cd "$1" && cp -a mlflow_llm plugin flavors serving setup.cfg setup.py pyproject.toml README.md LICENSE "$2")
    find "$2" -name __pycache__ -prune -exec rm -rf {} +
}

# The tests that start no server.
quick_tests=(tests/serving/dialects tests/serving/tasks tests/serving/engine tests/serving/modes tests/flavors
    tests/real/test_generate_smollm2.py)
