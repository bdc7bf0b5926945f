#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels in a root folder of Debian 13 with Python, pip, venv and certificates, no compiler,
# and compares them with the wheels that this machine builds from the same files.
# usage: ci/debian13.sh FOLDER [BAZEL_OPTION...]       FOLDER is not below /tmp and has 8 GB; it is kept
#   The options are for the build in the root, which knows no cache without them. It needs apt, the right
#   to mount (root, or user namespaces), and Pythons that are not Debian's own: of pyenv, or of uv.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
[[ $# -gt 0 && $1 != -* ]] || {
  echo "usage: ci/debian13.sh FOLDER [BAZEL_OPTION...]" >&2
  exit 2
}
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$folder/root

# The headers of a Python are input of its wheel, so both builds take the same ones.
mapfile -t prefixes < <(python3 tools/airgap/pythons.py |
  python3 -c 'import json, sys; print(*{p["base_prefix"]: 0 for p in json.load(sys.stdin).values() if p}, sep="\n")')
for prefix in "${prefixes[@]}"; do
  [[ $prefix != /usr ]] || {
    echo "debian13: error: one of pyenv's or uv's Pythons has to come before Debian's own on PATH" >&2
    exit 1
  }
done

if [[ ! -e $root/ready ]]; then
  rm -rf "$root"
  python3 -B tools/airgap/debian_root.py "$root" trixie ca-certificates python3 python3-pip python3-venv
  touch "$root/ready"
fi
rm -rf "$root/build/dist"
ci/copy.sh "$root/build/tiercel"

# inside COMMAND...: runs it in the root, with the machine's devices, Pythons and wheels folder.
inside() {
  local namespaces=(--mount) setting settings=() path=/usr/bin:/bin
  local bound=("${prefixes[@]}")
  [[ $EUID -eq 0 ]] || namespaces+=(--map-root-user)
  [[ ! -d ${PIP_FIND_LINKS:-} ]] || bound+=("$PIP_FIND_LINKS")
  while IFS= read -r -d '' setting; do
    case ${setting%%=*} in
      PIP_* | DEBIAN_MIRROR | http_proxy | https_proxy | no_proxy) settings+=("$setting") ;;
    esac
  done < <(env --null)
  for prefix in "${prefixes[@]}"; do path+=:$prefix/bin; done
  # shellcheck disable=SC2016 # another shell's variables
  unshare "${namespaces[@]}" bash -euc '
    root=$1 bound=$2
    shift 2
    mount --make-rprivate /
    mount --bind "$root" "$root"
    for path in /dev /proc /sys $bound; do
      mkdir -p "$root$path"
      mount --rbind "$path" "$root$path"
    done
    mkdir -p "$root/old"
    cd "$root"
    pivot_root . old
    umount -l /old
    cd /build/tiercel
    exec "$@"' bash "$root" "${bound[*]}" \
    env -i PATH="$path" HOME=/root LANG=C.UTF-8 "${settings[@]}" "$@"
}

inside bash -euc '
  trap "./bazelw shutdown" EXIT
  ./bazelw build "$@" //python:wheels
  ./bazelw run "$@" //python:dist -- /build/dist' bash "$@"
./bazelw build //python:wheels
./bazelw run //python:dist -- "$folder/dist"
(cd "$folder/dist" && sha256sum -- *.whl) | tee "$folder/here.sums"
(cd "$root/build/dist" && sha256sum -- *.whl) >"$folder/root.sums"
if ! cmp "$folder/here.sums" "$folder/root.sums"; then
  echo "debian13: the wheels differ: see $folder/dist and $root/build/dist" >&2
  exit 1
fi
echo "debian13: the same bytes on both"
