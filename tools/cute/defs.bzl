# SPDX-License-Identifier: Apache-2.0
"""How this repository compiles kernels of the CuTe DSL: ahead of time, without a GPU."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cpp_toolchain", "use_cc_toolchain")
load("//tools/python:run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load("//tools/python:transitions.bzl", "ALLOWLIST", "any_python_transition")

def _compiled_kernels_impl(ctx):
    python = python_runtime(ctx)
    cc = find_cpp_toolchain(ctx)
    folders = []
    for part in range(ctx.attr.parts):
        folder = ctx.actions.declare_directory("{}_part{}".format(ctx.label.name, part))
        folders.append(folder)
        args = ctx.actions.args()
        args.add("-B")
        args.add(ctx.file._compile)
        args.add_all(ctx.files._packages, before_each = "--packages", expand_directories = False)
        args.add("--arch", ctx.attr._arch[BuildSettingInfo].value)
        args.add("--main", ctx.file.main)
        args.add_all([f.dirname for f in ctx.files.srcs], before_each = "--path", uniquify = True)
        args.add("--cc", cc.compiler_executable)
        if ctx.attr.arguments:
            args.add("--arguments", ctx.attr.arguments)
        args.add("--part", "{}/{}".format(part, ctx.attr.parts))
        args.add("--output", folder.path)
        ctx.actions.run(
            executable = python.path,
            arguments = [args],
            inputs = depset(
                [ctx.file.main] + ctx.files.srcs + ctx.files._tools + ctx.files._packages,
                transitive = [python.files, cc.all_files],
            ),
            outputs = [folder],
            env = {"PATH": "/usr/bin:/bin"},
            mnemonic = "CuteCompile",
            progress_message = "Compiling CuTe DSL kernels %{label}",
        )

    source = ctx.actions.declare_file(ctx.label.name + ".cc")
    manifest = ctx.actions.declare_file(ctx.label.name + ".json")
    cubins = ctx.actions.declare_directory(ctx.label.name + "_cubins")
    ptx = ctx.actions.declare_directory(ctx.label.name + "_ptx")
    args = ctx.actions.args()
    args.add("-B")
    args.add(ctx.file._join)
    args.add_all(folders, before_each = "--part", expand_directories = False)
    args.add("--header", ctx.attr.header)
    args.add("--variant", ctx.attr.variant)
    args.add("--table", ctx.attr.table)
    args.add("--source", source)
    args.add("--manifest", manifest)
    args.add("--cubins", cubins.path)
    args.add("--ptx", ptx.path)
    ctx.actions.run(
        executable = python.path,
        arguments = [args],
        inputs = depset(folders + [ctx.file._join], transitive = [python.files]),
        outputs = [source, manifest, cubins, ptx],
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "CuteJoin",
        progress_message = "Embedding CuTe DSL kernels %{label}",
    )
    return [
        DefaultInfo(files = depset([source])),
        OutputGroupInfo(
            cubins = depset([cubins]),
            manifest = depset([manifest]),
            ptx = depset([ptx]),
        ),
    ]

_compiled_kernels = rule(
    doc = "The C++ source that embeds a family's cubins; groups: manifest, cubins, ptx.",
    implementation = _compiled_kernels_impl,
    # The DSL runs on one Python; its kernels know of none.
    cfg = any_python_transition,
    attrs = ALLOWLIST | {
        "arguments": attr.string(),
        "header": attr.string(mandatory = True),
        "main": attr.label(
            mandatory = True,
            allow_single_file = [".py"],
        ),
        "parts": attr.int(mandatory = True),
        "srcs": attr.label_list(allow_files = [".py"]),
        "table": attr.string(mandatory = True),
        "variant": attr.string(mandatory = True),
        "_arch": attr.label(default = "//tools:arch"),
        "_compile": attr.label(
            default = "//tools/cute:compile.py",
            allow_single_file = True,
        ),
        "_join": attr.label(
            default = "//tools/cute:join.py",
            allow_single_file = True,
        ),
        "_packages": attr.label(default = "//tools/cute:site"),
        "_tools": attr.label(default = "//tools/cute:tools"),
    },
    toolchains = [TOOLCHAIN_TYPE] + use_cc_toolchain(),
)

def cute_kernels(name, main, header, variant, table, arguments = "", parts = 1, srcs = [], deps = [], **kwargs):
    """A family's CuTe DSL kernels as a C++ library, compiled and checked.

    Args:
      name: the library; NAME_compiled has the manifest, the cubins and their PTX as output groups.
      main: the Python file whose functions() says what to compile (python/tiercel/jit/dsl/declaration.py).
      header: what the generated source includes; it declares `table` and `variant`.
      variant: the struct of a kernel's attributes.
      table: the generated function that returns all kernels.
      arguments: a struct with a member for each kernel parameter's name (a map's ends in _map), which
        CubinKernel::launch takes; without it the host code lists parameters in order.
      parts: actions that share the compiling; each takes seconds before its first kernel.
      srcs: Python files that it imports, beside `main` or of another family.
      deps: C++ libraries with `header` and kernels/sm90.
      **kwargs: as for cc_library.
    """
    _compiled_kernels(
        name = name + "_compiled",
        arguments = arguments,
        header = header,
        main = main,
        parts = parts,
        srcs = srcs,
        table = table,
        variant = variant,
    )
    cc_library(
        name = name,
        srcs = [name + "_compiled"],
        copts = ["-fvisibility=hidden"],
        deps = deps,
        **kwargs
    )
