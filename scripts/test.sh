#!/usr/bin/env bash
# Installs what the tests need, builds and runs them (`make test`). The last line is `N passed, N failed, N skipped`; the exit
# status is 0 only when nothing failed.
#
#   bash scripts/test.sh [make target]      default: test; `test-long` for the full matrices; `test-cuda` (needs nvcc) for the GPU build
#
# DRY_RUN=1 prints which packages it would install, and stops.
# shellcheck disable=SC2317  # the has_... functions are called through need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

target=${1:-test}
logs=build/test-logs

has_venv() { python3 -c 'import ensurepip, venv' >/dev/null 2>&1; }
has_gtest() { has_header gtest/gtest.h; }
has_benchmark() { has_header benchmark/benchmark.h; }
clang_has_sanitizers() { echo 'int main() {}' | clang++ -x c++ -fsanitize=address -o /dev/null - >/dev/null 2>&1; }

say "system packages"
install_build_packages
need libgtest-dev "unit tests" has_gtest
need libbenchmark-dev "kernel benchmarks" has_benchmark
need clang "the second compiler the code must build with" has_program clang++
need python3-venv "a Python environment of the tests' own" has_venv
need shellcheck "checks the shell scripts" has_program shellcheck
install_packages
[ -z "${DRY_RUN:-}" ] || exit 0
# Debian ships clang's sanitizers in a package of their own, named by version; Ubuntu 22.04 does not.
clang_version=$(clang++ -dumpversion)
clang_runtime=libclang-rt-${clang_version%%.*}-dev
if ! clang_has_sanitizers && apt-cache show "$clang_runtime" >/dev/null 2>&1; then
    need "$clang_runtime" "clang's sanitizers" clang_has_sanitizers
    install_packages
fi

say "Python packages (.venv, dev/requirements-test.txt)"
if ! cmp -s dev/requirements-test.txt .venv/installed-requirements.txt; then
    python3 -m venv --clear .venv || die "python3 -m venv .venv failed (see above)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r dev/requirements-test.txt </dev/null ||
        die "pip could not install dev/requirements-test.txt (see above); is there a network?"
    cp dev/requirements-test.txt .venv/installed-requirements.txt
fi
.venv/bin/python --version

say "make $target"
rm -f "$logs/summary.txt"
status=0
make "$target" PYTHON="$PWD/.venv/bin/python" </dev/null || status=$?

# make's own message comes after the tests' summary; the summary belongs last.
if [ ! -s "$logs/summary.txt" ]; then
    echo "the build failed or no test ran (make exited with $status)" >&2
    echo "0 passed, 1 failed"
    exit 1
fi
if [ "$status" -ne 0 ]; then
    echo
    cat "$logs/summary.txt"
fi
exit "$status"
