#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tells Bazel of caches, in .bazelrc.ci (git-ignored), until the script that sourced it ends: an
# address may hold a password, which does not stay on the disk.
# usage: source ci/cache.sh
#   TIERCEL_REMOTE_CACHE   address of a remote cache: http(s)://..., grpc(s)://..., unix:/...
#   TIERCEL_DISK_CACHE     folder of a disk cache
# CI that runs a stranger's change sets TIERCEL_CACHE_READONLY=1 too.

tiercel_write_cache_rc() {
  local file part
  file=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.bazelrc.ci
  # A script that another one calls has that one's.
  [[ ${TIERCEL_CACHE_RC:-} != "$file" ]] || return 0
  export TIERCEL_CACHE_RC=$file
  part=$(mktemp "$file.XXXXXX") # only its owner can read it
  trap "rm -f '$file' '$part'" EXIT
  {
    [[ -z ${TIERCEL_DISK_CACHE:-} ]] || echo "build --disk_cache='$TIERCEL_DISK_CACHE'"
    if [[ -n ${TIERCEL_REMOTE_CACHE:-} ]]; then
      echo "build --remote_cache=$TIERCEL_REMOTE_CACHE"
      # A cache that does not answer costs time, never the build.
      echo "build --remote_local_fallback --remote_timeout=30"
      [[ -z ${TIERCEL_CACHE_READONLY:-} ]] || echo "build --noremote_upload_local_results"
    fi
  } >"$part"
  mv "$part" "$file"
}
tiercel_write_cache_rc
