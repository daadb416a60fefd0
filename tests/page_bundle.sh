#!/usr/bin/env bash
# Build the page from its source and compare the result with the committed bundle, byte for byte:
#     bash tests/page_bundle.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../serving/http/page"
if ! command -v npm > /dev/null; then
    echo "skipped: npm is not installed, so the page is not built again"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -a index.html package.json package-lock.json .npmrc tsconfig.json vite.config.js public source "$scratch"
cd "$scratch"
if ! npm ci --no-fund --no-audit > install.log 2>&1; then
    tail -n 5 install.log
    echo "npm could not install what the lockfile of the page names" >&2
    exit 1
fi
npm run --silent build > build.log 2>&1 || { cat build.log; exit 1; }
if ! diff -r bundle "$OLDPWD/bundle"; then
    echo "serving/http/page/bundle is not what its source builds to: run npm ci && npm run build there" >&2
    exit 1
fi
echo "the bundle of the page is what its source builds to"
