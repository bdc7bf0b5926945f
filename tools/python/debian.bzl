# SPDX-License-Identifier: Apache-2.0
"""A program from a Debian package, unpacked and not installed, for tests that need the real one."""

def _debian_program_impl(rctx):
    missing = ""
    archive = "{}_{}_amd64.deb".format(rctx.attr.package, rctx.attr.version)
    if not rctx.which("apt-get") or not rctx.which("dpkg-deb"):
        missing = "this is no Debian"
    else:
        wanted = "{}={}".format(rctx.attr.package, rctx.attr.version)
        result = rctx.execute(["apt-get", "-q", "download", wanted], timeout = 120)
        if result.return_code != 0 or not rctx.path(archive).exists:
            missing = "apt has no {}".format(wanted)
    if not missing:
        digest = rctx.execute(["sha256sum", archive]).stdout.split(" ")[0]
        if digest != rctx.attr.sha256:
            fail("{} has sha256 {}, expected {}".format(archive, digest, rctx.attr.sha256))
        rctx.execute(["dpkg-deb", "-x", archive, "unpacked"])
        rctx.delete(archive)
        libraries = rctx.execute(["ldd", "unpacked/" + rctx.attr.program]).stdout
        absent = [line.split("=>")[0].strip() for line in libraries.split("\n") if "not found" in line]
        if absent:
            missing = "this machine lacks " + ", ".join(absent)
    if missing:
        rctx.file("program", "#!/bin/sh\necho '{} was not run: {}' >&2\nexit 77\n".format(rctx.attr.package, missing))
    else:
        rctx.symlink("unpacked/" + rctx.attr.program, "program")
    rctx.file("BUILD.bazel", 'exports_files(["program"], visibility = ["//visibility:public"])\n')

debian_program = repository_rule(
    doc = "Where the package cannot be had, a program that says why and exits with 77.",
    implementation = _debian_program_impl,
    attrs = {
        "package": attr.string(mandatory = True),
        "program": attr.string(mandatory = True),
        "sha256": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
    },
    environ = ["PATH"],
)
