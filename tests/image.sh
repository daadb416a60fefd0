#!/usr/bin/env bash
# The image of examples/deploy/Containerfile, built without a registry and run as it is deployed, on a machine with
# debootstrap, buildah and iproute2 (Debian's packages) as root:
#     bash tests/image.sh MODEL [WHEELS]
# MODEL is a Hugging Face directory. WHEELS is a folder made by the `pip wheel` that the Containerfile names, with Debian
# 12's Python 3.11; without it the script makes one. The base is a Debian that debootstrap makes, and what follows has no
# network. tests/real/test_image.py runs this where it can.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
. tests/common.sh
model=$(realpath "$1")
wheels=${2:+$(realpath "$2")}
scratch=$(mktemp -d)
export CONTAINERS_STORAGE_CONF="$scratch/storage.conf" BUILDAH_ISOLATION=chroot
driver=vfs  # which copies what an overlay shares
mkdir "$scratch"/{lower,upper,work,merged}
if mount -t overlay overlay -o "lowerdir=$scratch/lower,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/merged" 2> /dev/null; then
    umount "$scratch/merged"
    driver=overlay
fi
printf '[storage]\ndriver = "'$driver'"\ngraphroot = "%s/graph"\nrunroot = "%s/run"\n' "$scratch" "$scratch" > "$scratch/storage.conf"
end() {
    buildah rm --all > /dev/null 2>&1 || true
    umount --recursive "$scratch/graph/overlay" 2> /dev/null || true
    rm -rf --one-file-system "$scratch"
}
trap end EXIT

alone() { unshare --net -- sh -c 'ip link set lo up && exec "$@"' sh "$@"; }  # with no network but its own loopback
in_image() { alone buildah run --volume "$scratch/models:/models:ro" server -- "$@" < /dev/null; }

if [ -z "$wheels" ]; then
    say "wheels"
    wheels="$scratch/wheels"
    "$(find_python)" -m venv "$scratch/venv"
    copy_source "$root" "$scratch/source"
    "$scratch/venv/bin/pip" wheel --quiet --wheel-dir "$wheels" torch==2.13.0 "$scratch/source[postgres,jwt]"
fi

say "a Debian with Python"
debootstrap --variant=minbase --include=python3-venv bookworm "$scratch/debian" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" > "$scratch/log" ||
    { tail -n 5 "$scratch/log"; exit 1; }
rm -rf "$scratch/debian/var/cache/apt/archives"
printf 'FROM scratch\nCOPY . /\n' > "$scratch/Containerfile"
alone buildah bud --quiet --file "$scratch/Containerfile" --tag localhost/python "$scratch/debian" > "$scratch/log"
rm -rf --one-file-system "$scratch/debian"

say "the image, without a network"
mkdir "$scratch/context"
cp -al "$wheels" "$scratch/context/wheels" 2> /dev/null || cp -a "$wheels" "$scratch/context/wheels"
alone buildah bud --file examples/deploy/Containerfile --build-arg BASE=localhost/python --tag localhost/mlflow-llm \
    "$scratch/context" > "$scratch/log" 2>&1 || { tail -n 20 "$scratch/log"; exit 1; }
buildah from --quiet --name server localhost/mlflow-llm > "$scratch/log"
entrypoint=$(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}' server)
mkdir "$scratch/models"
cp -rL "$model" "$scratch/models/model"
chmod -R a+rX "$scratch/models"  # the image's user is not root

say "one command to an answer"
in_image mlflow-llm run /models/model --temperature 0 --max-tokens 16 "What is the capital of France?" 2> "$scratch/log" ||
    { tail -n 5 "$scratch/log"; exit 1; }
echo

say "the server with keys: $entrypoint"
cat > "$scratch/models/session.sh" <<'SESSION'
set -eu
export MLFLOW_LLM_DATABASE=sqlite:////state/serving.db
"$@" -m /models/model=assistant 2> /state/log &
asked() { python3 -c "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())" "http://127.0.0.1:8001/$1"; }
until asked ready > /dev/null 2>&1; do
    kill -0 $! || { tail -n 20 /state/log; exit 1; }
    sleep 1
done
mlflow-llm chat "Hello" 2>&1 && exit 1
mlflow-llm keys create --tenant first > /state/key 2> /dev/null
mlflow-llm chat --key-file /state/key --temperature 0 --max-tokens 16 "What is the capital of France?"
echo
asked metrics | grep '^mlflow_llm_requests_total' | head -n 3
kill -TERM $!
wait $!
id -un
SESSION
# shellcheck disable=SC2086  # one word each
in_image sh /models/session.sh $entrypoint
say "passed"
