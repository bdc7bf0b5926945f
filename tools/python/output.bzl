# SPDX-License-Identifier: Apache-2.0
"""A file that a Python script writes, with nothing but the standard library."""

load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")

def _python_output_impl(ctx):
    python = python_runtime(ctx)
    executable, args = python.path, ctx.actions.args()
    if ctx.files.preload:
        # Not in the action's environment, in which the sandbox runs, too. Python keeps its memory
        # until it ends: leaks say nothing.
        preload = ":".join([file.path for file in ctx.files.preload])
        executable = "/usr/bin/env"
        args.add_all(["LD_PRELOAD=" + preload, "ASAN_OPTIONS=detect_leaks=0", python.path])
    args.add(ctx.file.main)
    args.add_all(ctx.files.srcs)
    args.add(ctx.outputs.out)
    ctx.actions.run(
        executable = executable,
        arguments = [args],
        inputs = depset(
            ctx.files.srcs + ctx.files.preload + [ctx.file.main],
            transitive = [python.files],
        ),
        outputs = [ctx.outputs.out],
        mnemonic = "PythonOutput",
        progress_message = "Writing %{output}",
    )

python_output = rule(
    doc = "Runs main with the paths of srcs and of out.",
    implementation = _python_output_impl,
    attrs = {
        "main": attr.label(
            mandatory = True,
            allow_single_file = [".py"],
        ),
        "out": attr.output(mandatory = True),
        "preload": attr.label_list(
            doc = "Shared libraries that Python is started with.",
            allow_files = True,
        ),
        "srcs": attr.label_list(allow_files = True),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
