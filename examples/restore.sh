#!/usr/bin/env bash
# Restores the models that docs/ was measured on from this repository's history: 50 MB into examples/{nano,nano_1k,bitnet}.
#
#     make models          # or bash examples/restore.sh
#
# They are too large for the source, so git ignores them there; the tests use pico.
set -euo pipefail

stop() {
    echo "error: $1; or train them: bash examples/nano/train.sh, then nano_1k/train.sh and bitnet/train.sh" >&2
    exit 2
}

cd "$(dirname "$0")"
examples=$PWD
top=$(git rev-parse --show-toplevel 2>/dev/null) || stop "$examples is in no git repository; take a clone"

restore() { # FOLDER TREE: its models, by the hash of the tree that FOLDER was when they lay in it
    if ! git cat-file -e "$2^{tree}" 2>/dev/null; then
        if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
            stop "the models of examples/$1 are not in this shallow clone; git fetch --unshallow brings them"
        fi
        stop "the models of examples/$1 (tree $2) are not in the history of $top; take a clone of diffbit"
    fi
    local models
    models=$(git -C "$top" ls-tree -d --name-only "$2")
    mkdir -p "$examples/$1"
    # shellcheck disable=SC2086  # names without blanks
    git -C "$top" archive "$2" $models | tar -x -C "$examples/$1"
    printf 'examples/%s: %s\n' "$1" "${models//$'\n'/, }"
}

restore nano a32db3bd6b0256db5ca7491492d5555eed9754a8
restore nano_1k 0fe4901f90f8649d2df6b4d5d32971e743345e42
# The second with the float models that they are compared with, and learned from
restore bitnet 3a570800da57f369fcbfef6fce2e28a68f6340df
restore bitnet 44b630874c16adbb73da41f71abaa20e40714811
