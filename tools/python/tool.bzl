# SPDX-License-Identifier: Apache-2.0
"""Commands in Python for `bazel run`, with locked packages and the default Python."""

load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")

def _python_tool_impl(ctx):
    python = python_runtime(ctx)
    lines = ["#!/bin/sh", "set -eu"]
    for key, value in ctx.attr.env.items():
        lines.append("export {}='{}'".format(key, ctx.expand_location(value, ctx.attr.data)))
    folders = " ".join([folder.short_path for folder in ctx.files.packages])
    lines += [
        "PYTHONPATH=$(for folder in {}; do printf '%s:' \"$PWD/$folder\"; done)".format(folders),
        "export PYTHONPATH PYTHONDONTWRITEBYTECODE=1",
        "exec '{}' '{}' \"$@\"".format(python.short_path, ctx.file.main.short_path),
    ]
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(script, "\n".join(lines) + "\n", is_executable = True)
    files = [ctx.file.main] + ctx.files.srcs + ctx.files.data + ctx.files.packages
    runfiles = ctx.runfiles(files, transitive_files = python.files)
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = script, runfiles = runfiles)]

python_tool = rule(
    doc = "Runs main in the runfiles folder; Python files beside main are importable.",
    implementation = _python_tool_impl,
    executable = True,
    attrs = {
        "data": attr.label_list(allow_files = True),
        "env": attr.string_dict(doc = "Environment variables; $(rootpath LABEL) is expanded."),
        "main": attr.label(
            mandatory = True,
            allow_single_file = [".py"],
        ),
        "packages": attr.label_list(),
        "srcs": attr.label_list(allow_files = [".py"]),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
