# SPDX-License-Identifier: Apache-2.0
"""The bill of materials of a wheel, as an action."""

load("//tools/python:run.bzl", "TOOLCHAIN_TYPE", "python_runtime")

def _wheel_sbom_impl(ctx):
    python = python_runtime(ctx)
    out = ctx.actions.declare_file(ctx.label.name + ".json")
    args = ctx.actions.args()
    args.add_all([ctx.file._script, ctx.attr.version, ctx.file.module, ctx.file._components, out])
    args.add_all(ctx.files._locks)
    ctx.actions.run(
        executable = python.path,
        arguments = [args],
        inputs = depset(
            [ctx.file._script, ctx.file.module, ctx.file._components] + ctx.files._locks + ctx.files._packages,
            transitive = [python.files],
        ),
        outputs = [out],
        env = {"PYTHONPATH": ":".join([folder.path for folder in ctx.files._packages])},
        mnemonic = "WheelSbom",
    )
    return [DefaultInfo(files = depset([out]))]

wheel_sbom = rule(
    doc = "CycloneDX JSON of what a wheel with this module holds.",
    implementation = _wheel_sbom_impl,
    attrs = {
        "module": attr.label(
            mandatory = True,
            allow_single_file = True,
        ),
        "version": attr.string(mandatory = True),
        "_components": attr.label(
            default = ":components.json",
            allow_single_file = True,
        ),
        "_locks": attr.label_list(
            default = [
                "//tools/python/locks:build.lock",
                "//tools/python/locks:cuda.lock",
                "//tools/python/locks:cute.lock",
            ],
            allow_files = True,
        ),
        "_packages": attr.label_list(default = [
            "//tools/python:build_site",
            "//tools/python:release_site",
        ]),
        "_script": attr.label(
            default = ":sbom.py",
            allow_single_file = True,
        ),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
