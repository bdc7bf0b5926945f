# SPDX-License-Identifier: Apache-2.0
"""The pinned C++ compiler with its libraries and headers: Debian's packages, unpacked, not installed."""

_PROGRAMS = ["ar", "as", "cc1", "cc1plus", "collect2", "gcc", "gcov-12", "ld", "nm", "objcopy", "objdump", "strip"]

def _cxx_toolchain_repository_impl(rctx):
    python = rctx.which("python3")
    if not python:
        fail("python3 not found: install the package python3")
    rctx.report_progress("fetching the C++ compiler")
    rctx.watch(Label("//tools/cxx:packages.lock"))
    result = rctx.execute(
        [python, "-B", rctx.path(Label("//tools/airgap:compiler.py")), "root"],
        quiet = False,
        timeout = 3600,
    )
    if result.return_code != 0:
        fail("\n" + result.stderr.strip().split("\n")[-1])
    rctx.file("bin/run", rctx.read(Label("//tools/cxx:run.sh")))
    for program in _PROGRAMS:
        rctx.symlink("bin/run", "bin/" + program)
    rctx.file("BUILD.bazel", rctx.read(Label("//tools/cxx:toolchain.BUILD")))

cxx_toolchain_repository = repository_rule(
    doc = "gcc, binutils, libstdc++ and glibc at one version; nothing of the machine's.",
    implementation = _cxx_toolchain_repository_impl,
)
