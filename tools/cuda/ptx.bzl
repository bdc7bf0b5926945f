# SPDX-License-Identifier: Apache-2.0
"""The PTX of a library's kernels, for the emulator: what nvcc makes on its way to machine code."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//tools/python:transitions.bzl", "ALLOWLIST", "any_python_transition")

def _kernel_ptx_impl(ctx):
    cc_toolchain = find_cc_toolchain(ctx)
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    includes = depset(transitive = [context.includes, context.quote_includes, context.system_includes])
    nvcc = [file for file in ctx.files._compiler if file.path.endswith("/bin/nvcc")][0]
    outputs = []
    for source in ctx.files.srcs:
        if source.extension != "cu":
            continue
        ptx = ctx.actions.declare_file("{}/{}.ptx".format(ctx.label.name, source.basename.removesuffix(".cu")))
        outputs.append(ptx)
        args = ctx.actions.args()
        args.add("-ccbin", cc_toolchain.compiler_executable)
        args.add("-arch", ctx.attr.arch)
        if ctx.var["COMPILATION_MODE"] == "opt":
            args.add("-DNDEBUG")
        args.add_all(["-I", "."])
        args.add_all(includes, before_each = "-I")
        args.add_all(ctx.attr.copts)
        args.add("-ptx", source)
        args.add("-o", ptx)
        ctx.actions.run(
            executable = nvcc,
            arguments = [args],
            inputs = depset(
                [source] + ctx.files.hdrs,
                transitive = [context.headers, cc_toolchain.all_files, ctx.attr._compiler.files],
            ),
            outputs = [ptx],
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            mnemonic = "CudaPtx",
            toolchain = None,
            progress_message = "Compiling {} to PTX".format(source.path),
        )
    files = depset(outputs)
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(outputs))]

kernel_ptx = rule(
    doc = "NAME/<source>.ptx for each .cu file of srcs; the kernels' names are those of the library.",
    implementation = _kernel_ptx_impl,
    cfg = any_python_transition,
    attrs = ALLOWLIST | {
        "arch": attr.string(mandatory = True),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "srcs": attr.label_list(allow_files = True),
        "_compiler": attr.label(default = "@cuda//:compiler_deps"),
    },
    toolchains = use_cc_toolchain(),
)
