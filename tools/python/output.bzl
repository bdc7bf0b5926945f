# SPDX-License-Identifier: Apache-2.0
"""A file that a Python script writes, with nothing but the standard library."""

load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")

def _python_output_impl(ctx):
    python = python_runtime(ctx)
    args = ctx.actions.args()
    args.add(ctx.file.main)
    args.add_all(ctx.files.srcs)
    args.add(ctx.outputs.out)
    ctx.actions.run(
        executable = python.path,
        arguments = [args],
        inputs = depset(ctx.files.srcs + [ctx.file.main], transitive = [python.files]),
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
        "srcs": attr.label_list(allow_files = True),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
