#!/bin/sh
# Lints proto/ with buf, which comes from npm and is kept in .tools/. Without npm this is a skip that says so;
# `scripts/buf_lint.sh install` only fetches it.
set -u
version=1.75.0
cd "$(dirname "$0")/.." || exit 1
buf=.tools/node_modules/.bin/buf
stamp=.tools/buf-$version

skip() {
    echo "skipped: buf lint ($1)"
    [ -z "${TEST_SKIPPED:-}" ] || echo "buf lint: $1" >>"$TEST_SKIPPED"
    exit 0
}

if [ ! -e "$stamp" ]; then
    command -v npm >/dev/null 2>&1 || skip "npm is missing"
    mkdir -p .tools
    if ! npm install --prefix .tools --no-save --no-audit --no-fund --silent "@bufbuild/buf@$version"; then
        # In CI a tool that cannot be had is a failure; on a developer's machine it may be a missing network.
        [ -z "${CI:-}" ] || { echo "npm cannot install @bufbuild/buf@$version" >&2; exit 1; }
        skip "npm cannot install @bufbuild/buf@$version"
    fi
    touch "$stamp"
fi
[ "${1:-}" = install ] && exit 0
"$buf" lint && echo "buf lint: clean"
