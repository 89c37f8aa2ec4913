#!/usr/bin/env bash
# An ARM Python with ONNX Runtime, and musl, in a folder of its own, to be run by qemu-aarch64: packages of Debian and
# wheels of PyPI, unpacked and not installed.
#
#   tests/native/arm64.sh FOLDER [PYTHON]        PYTHON: one that has pip, of any version
set -euo pipefail
folder=$(realpath -m "$1") python=${2:-python3}
packages=$(realpath "$(dirname "$0")/../../deploy/locks/arm64.txt")
[ -e "$folder/.complete" ] && exit 0
rm -rf "$folder"
mkdir -p "$folder"/{apt/lists/partial,apt/cache/archives/partial,site,proc}

: >"$folder/apt/status" # nothing is installed there yet, so that all that Python needs is fetched
apt() {
  apt-get --quiet --quiet -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
    -o Dir::State::status="$folder/apt/status" -o Dir::State::Lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache" "$@"
}
apt update
apt install --yes --download-only --no-install-recommends python3-minimal libpython3-stdlib libstdc++6 musl >/dev/null
for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb --extract "$package" "$folder"; done
rm -rf "$folder/apt"

version=$(basename "$folder"/usr/bin/python3.*)
"$python" -m pip install --quiet --disable-pip-version-check --target "$folder/site" --require-hashes --no-deps \
  --implementation cp --python-version "${version#python}" --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
  --requirement "$packages"

# ONNX Runtime reads the processors from /proc/cpuinfo and crashes on those of the machine that emulates; qemu looks
# into this folder first
for ((i = 0; i < $(getconf _NPROCESSORS_CONF); ++i)); do
  printf '%s\n' "processor : $i" 'Features : fp asimd atomics fphp asimdhp asimdrdm asimddp' 'CPU implementer : 0x41' \
    'CPU architecture: 8' 'CPU variant : 0x3' 'CPU part : 0xd0c' 'CPU revision : 1' ''
done >"$folder/proc/cpuinfo"
touch "$folder/.complete"
