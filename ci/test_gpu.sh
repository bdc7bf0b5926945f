#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests an installed wheel on this machine's GPU: pytest, compute-sanitizer, a short benchmark.
# Needs Python, and an index for the packages that it lacks; no Bazel and no CUDA toolkit.
# usage: [PYTHON=python3.12] [OUT=FOLDER] ci/test_gpu.sh [WHEEL]
#   WHEEL   default: the one in dist/ for this Python
#   OUT     logs and results go there (default: out)
#   PYTEST_ARGS, SANITIZER_ARGS, BENCH_ARGS   words added to each step's command
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-out}
mkdir -p "$out"
out=$(cd "$out" && pwd)

say() { echo "test_gpu: $*"; }
die() {
  echo "test_gpu: error: $*" >&2
  exit 2
}

tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') ||
  die "$python does not run: PYTHON names another"
wheel=${1:-$(compgen -G "dist/tiercel-*-$tag-$tag-*.whl" | tail -n 1 || true)}
[[ -n $wheel ]] || die "dist/ has no wheel for $tag: build it (ci/build.sh) or name one"
[[ -e $wheel || $wheel == /* ]] || wheel=$invoked_from/$wheel
[[ -f $wheel ]] || die "$wheel is no file"

# A virtual environment that sees the packages of $python, also when that is in one itself.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv --without-pip --system-site-packages "$scratch/venv"
venv=$scratch/venv/bin/python
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$venv" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
# The tests' own settings only: the current folder is not on the path.
export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
install() { "$venv" -m pip --disable-pip-version-check install --quiet "$@"; }
say "installing ${wheel##*/}"
install --no-index --no-deps --ignore-installed "$wheel"
need() { # need MODULE PACKAGE
  if ! "$venv" -c "import $1" 2>/dev/null; then
    say "installing $2"
    install "$2"
  fi
}
need torch torch
need pytest pytest
need yaml pyyaml || say "no PyYAML: the benchmark will be left out"

machine=$("$venv" - <<'PYTHON'
import tiercel
import torch

if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU")
name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"{name} (sm_{major}{minor}), torch {torch.__version__}, tiercel {tiercel.__version__}")
PYTHON
) || die "the GPU cannot be used, see above"
say "$machine"

failures=0
summary=("machine:    $machine")
note() {
  summary+=("$(printf '%-11s %s' "$1:" "$2")")
  say "$1: $2"
}

# The last line of pytest's output, without its frame.
last_line() { tail -n 1 "$1" | sed -E 's/^=+ *| *=+$//g'; }

run_pytest() {
  "$@" "$venv" -m pytest -c tests/pytest.ini --rootdir tests --import-mode=importlib \
    -p no:cacheprovider --ignore=tests/build --ignore=tests/cute --ignore=tests/packaging \
    "${pytest_args[@]}" tests
}

read -ra extra <<<"${PYTEST_ARGS:-}"
pytest_args=(-m gpu "--junitxml=$out/gpu_tests.xml" "${extra[@]}")
if run_pytest env 2>&1 | tee "$out/gpu_tests.log"; then
  note tests "$(last_line "$out/gpu_tests.log")"
else
  note tests "FAILED: $(last_line "$out/gpu_tests.log")"
  failures=$((failures + 1))
fi

sanitizer=$(type -P compute-sanitizer ||
  compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | tail -n 1 || true)
read -ra extra <<<"${SANITIZER_ARGS:-}"
pytest_args=(-m "gpu and sanitize" "${extra[@]}")
if [[ -z $sanitizer ]]; then
  note memcheck "skipped: compute-sanitizer was not found"
else
  say "memcheck, with $sanitizer; this takes a while"
  # PyTorch's cache of blocks would hide an overrun: without it each tensor has its own allocation.
  if PYTORCH_NO_CUDA_MEMORY_CACHING=1 run_pytest "$sanitizer" --tool memcheck --error-exitcode 86 \
    >"$out/memcheck.log" 2>&1; then
    note memcheck "$(grep -oE 'ERROR SUMMARY.*' "$out/memcheck.log" | tail -n 1)"
  elif grep -q 'Device not supported' "$out/memcheck.log"; then
    note memcheck "skipped: compute-sanitizer does not support this machine"
  else
    tail -n 40 "$out/memcheck.log"
    note memcheck "FAILED, see $out/memcheck.log"
    failures=$((failures + 1))
  fi
fi

read -ra extra <<<"${BENCH_ARGS:-}"
if ! "$venv" -c 'import yaml' 2>/dev/null; then
  note benchmark "skipped: PyYAML is not installed"
elif "$venv" -m tiercel bench --out "$out/bench.jsonl" "${extra[@]}" 2>&1 |
  tee "$out/bench.log"; then
  note benchmark "$(wc -l <"$out/bench.jsonl") records in $out/bench.jsonl"
else
  note benchmark "FAILED, see $out/bench.log"
  failures=$((failures + 1))
fi

printf '\n'
printf '%s\n' "${summary[@]}"
((failures == 0)) || exit 1
