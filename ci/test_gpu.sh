#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests an installed wheel on this machine's GPU: pytest, `tiercel smoke`, compute-sanitizer, a short
# benchmark. Needs Python, and an index for the packages that it lacks; no Bazel, no CUDA toolkit.
# usage: [PYTHON=python3.12] [OUT=FOLDER] ci/test_gpu.sh [OPTION...] [WHEEL]
#   WHEEL            default: the one in dist/ for this Python
#   --sanitize       all four tools of compute-sanitizer, which then has to be there; without it
#                    memcheck alone, where it is found
#   --collect-only   installs the wheel and collects the tests, for which no GPU is needed
#   --no-tests, --no-smoke, --no-sanitizers, --no-bench   leave this step out
# Variables:
#   OUT                 logs and results go there (default: out)
#   TESTS               files and folders of tests (default: tests)
#   PYTEST_ARGS, SMOKE_ARGS, SANITIZER_ARGS, BENCH_ARGS   words added to each step's command
#   SANITIZER_TOOLS     of memcheck, racecheck, synccheck and initcheck
#   SANITIZER_SECONDS   the most that one tool may take (default: 3600); what is left then fails
#   SANITIZER_JOBS      processes at a time (default: 4)
#   SANITIZER_PART      K/N: only the K-th of N parts of the tests
# Findings that are excepted, and why: tools/sanitizer/exceptions.json.
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

read -ra tests <<<"${TESTS:-tests}"
tools=${SANITIZER_TOOLS:-memcheck}
collect_only="" required="" wheel=""
steps=" tests smoke sanitizers bench "
while (($#)); do
  case $1 in
    --sanitize)
      required=yes
      tools=${SANITIZER_TOOLS:-memcheck racecheck synccheck initcheck}
      ;;
    --collect-only) collect_only=yes ;;
    --no-tests | --no-smoke | --no-sanitizers | --no-bench) steps=${steps/ ${1#--no-} / } ;;
    -*) die "no such option: $1 (--help)" ;;
    *)
      [[ -z $wheel ]] || die "one wheel, not both $wheel and $1"
      wheel=$1
      ;;
  esac
  shift
done
wants() { [[ $steps == *" $1 "* ]]; }

tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') ||
  die "$python does not run: PYTHON names another"
[[ -n $wheel ]] || wheel=$(compgen -G "dist/tiercel-*-$tag-$tag-*.whl" | tail -n 1 || true)
[[ -n $wheel ]] || die "dist/ has no wheel for $tag: build it (ci/build.sh) or name one"
[[ -e $wheel || $wheel == /* ]] || wheel=$invoked_from/$wheel
[[ -f $wheel ]] || die "$wheel is no file"

# A virtual environment that sees the packages of $python, also when that is in one itself.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv --without-pip --system-site-packages "$scratch/venv"
venv=$scratch/venv/bin/python
"$python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
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

run_pytest() {
  "$venv" -m pytest -c tests/pytest.ini --rootdir tests -p no:cacheprovider "$@"
}

if [[ -n $collect_only ]]; then
  say "collecting the GPU tests"
  run_pytest --collect-only -q -m gpu "${tests[@]}"
  exit
fi

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

if wants tests; then
  read -ra extra <<<"${PYTEST_ARGS:-}"
  if run_pytest -m gpu "--junitxml=$out/gpu_tests.xml" "${extra[@]}" "${tests[@]}" 2>&1 |
    tee "$out/gpu_tests.log"; then
    note tests "$(last_line "$out/gpu_tests.log")"
  else
    note tests "FAILED: $(last_line "$out/gpu_tests.log")"
    failures=$((failures + 1))
  fi
fi

if wants smoke; then
  read -ra extra <<<"${SMOKE_ARGS:-}"
  if "$venv" -m tiercel smoke "${extra[@]}" 2>&1 | tee "$out/smoke.log"; then
    note smoke "$(last_line "$out/smoke.log")"
  else
    note smoke "FAILED: $(last_line "$out/smoke.log")"
    failures=$((failures + 1))
  fi
fi

sanitizer=$(type -P compute-sanitizer ||
  compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | tail -n 1 || true)
if ! wants sanitizers; then
  :
elif [[ -z $sanitizer && -n $required ]]; then
  note sanitizers "FAILED: compute-sanitizer was not found; it comes with the CUDA toolkit"
  failures=$((failures + 1))
elif [[ -z $sanitizer ]]; then
  note sanitizers "skipped: compute-sanitizer was not found"
else
  say "$tools, with $sanitizer; this takes a while"
  read -ra extra <<<"${SANITIZER_ARGS:-}"
  read -ra tools <<<"$tools"
  kernels=$("$venv" -c 'import tiercel, os; print(os.path.dirname(tiercel.__file__))')/_kernels.json
  status=0
  "$venv" tools/sanitizer/run.py --sanitizer "$sanitizer" --out "$out/sanitizers" \
    --tools "${tools[@]}" --seconds "${SANITIZER_SECONDS:-3600}" --jobs "${SANITIZER_JOBS:-4}" \
    --part "${SANITIZER_PART:-1/1}" --kernels "$kernels" --paths "${tests[@]}" -- \
    "$venv" -m pytest -c tests/pytest.ini --rootdir tests -p no:cacheprovider \
    -m "gpu and sanitize" "${extra[@]}" > >(tee "$out/sanitizers.log") 2>&1 || status=$?
  if ((status == 3)) && [[ -z $required ]]; then
    note sanitizers "skipped: compute-sanitizer does not support this machine"
  else
    ((status == 0)) || failures=$((failures + 1))
    if [[ -e $out/sanitizers/result.txt ]]; then
      while IFS=: read -r tool result; do
        note "$tool" "${result# }"
      done <"$out/sanitizers/result.txt"
    else
      note sanitizers "FAILED, see $out/sanitizers.log"
    fi
  fi
fi

read -ra extra <<<"${BENCH_ARGS:-}"
if ! wants bench; then
  :
elif ! "$venv" -c 'import yaml' 2>/dev/null; then
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
