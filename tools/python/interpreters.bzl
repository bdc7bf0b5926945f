# SPDX-License-Identifier: Apache-2.0
"""The interpreter of each Python as a command, for what has to run all of them."""

load("@python_versions//:versions.bzl", "PYTHON_VERSIONS")
load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load(":transitions.bzl", "ALLOWLIST", "one_python_transition")

def _interpreter_impl(ctx):
    python = python_runtime(ctx)
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        script,
        "#!/bin/sh\n# From the runfiles folder.\nexec '{}' \"$@\"\n".format(python.short_path),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = script,
        files = depset([script]),
        runfiles = ctx.runfiles([script], transitive_files = python.files),
    )]

interpreter = rule(
    doc = "Runs the Python that python_version names.",
    implementation = _interpreter_impl,
    cfg = one_python_transition,
    executable = True,
    attrs = ALLOWLIST | {"python_version": attr.string(mandatory = True)},
    toolchains = [TOOLCHAIN_TYPE],
)

INTERPRETERS = [
    "//tools/python:python" + version
    for version in PYTHON_VERSIONS
]
