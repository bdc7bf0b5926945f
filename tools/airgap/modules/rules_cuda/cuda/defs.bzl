# SPDX-License-Identifier: Apache-2.0
"""cuda_library: .cu files compiled by nvcc into a static library that cc_* rules link."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "ACTION_NAMES")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")

_HEADERS = [".h", ".hh", ".hpp", ".cuh", ".inl"]

def _gencode(spec):
    virtual, _, real = spec.partition(":")
    return "-gencode=arch={},code={}".format(virtual, real)

# The real toolchain adds them. nvcc's -O is of host code alone.
_ALWAYS = ["--expt-relaxed-constexpr", "--extended-lambda"]
_OPTIMISED = ["-O2", "-DNDEBUG"]

def _host_flags(features, cc_toolchain):
    """The C++ toolchain's own options, for the host half, but the language: copts say it."""
    variables = cc_common.create_compile_variables(
        cc_toolchain = cc_toolchain,
        feature_configuration = features,
        user_compile_flags = [],
    )
    flags = cc_common.get_memory_inefficient_command_line(
        action_name = ACTION_NAMES.cpp_compile,
        feature_configuration = features,
        variables = variables,
    )
    return [flag for flag in flags if flag != "-c" and not flag.startswith("-std=")]

def _cuda_library_impl(ctx):
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._runtime]])
    headers = depset(
        [file for file in ctx.files.srcs + ctx.files.hdrs if "." + file.extension in _HEADERS],
        transitive = [deps.compilation_context.headers],
    )
    includes = depset(transitive = [
        deps.compilation_context.includes,
        deps.compilation_context.quote_includes,
        deps.compilation_context.system_includes,
    ])

    objects = []
    for source in ctx.files.srcs:
        if source.extension != "cu":
            continue
        name = source.basename.removesuffix(".cu") + ".pic.o"
        object = ctx.actions.declare_file("_objs/{}/{}".format(ctx.label.name, name))
        objects.append(object)
        args = ctx.actions.args()
        args.add("-ccbin", cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = ACTION_NAMES.cpp_compile,
        ))
        args.add("-x", "cu")
        args.add_all([_gencode(spec) for spec in ctx.attr.archs])
        args.add_all(["-Xcompiler", "-fPIC"])
        if ctx.var["COMPILATION_MODE"] == "opt":
            args.add_all(_OPTIMISED)
        args.add_all(["-I", "."])
        args.add_all(includes, before_each = "-I")
        args.add_all(ctx.attr.copts)
        args.add_all(ctx.attr.host_copts, before_each = "-Xcompiler")
        args.add_all(_host_flags(features, cc_toolchain), before_each = "-Xcompiler")
        args.add_all(_ALWAYS)
        args.add(object, format = "--frandom-seed=%s")
        args.add("-c", source)
        args.add("-o", object)
        ctx.actions.run(
            executable = ctx.executable._nvcc,
            arguments = [args],
            inputs = depset([source], transitive = [headers, cc_toolchain.all_files, ctx.attr._compiler_deps.files]),
            outputs = [object],
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            mnemonic = "CudaCompile",
            progress_message = "Compiling " + source.path,
        )

    linking_context, outputs = cc_common.create_linking_context_from_compilation_outputs(
        name = ctx.label.name,
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(pic_objects = depset(objects)),
        linking_contexts = [deps.linking_context],
        disallow_dynamic_library = True,
    )
    compilation_context = cc_common.create_compilation_context(headers = headers)
    library = outputs.library_to_link.pic_static_library
    return [
        DefaultInfo(files = depset([library])),
        OutputGroupInfo(pic_objects = depset(objects)),
        cc_common.merge_cc_infos(
            direct_cc_infos = [CcInfo(compilation_context = compilation_context, linking_context = linking_context)],
            cc_infos = [deps],
        ),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "archs": attr.string_list(),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = _HEADERS),
        "host_copts": attr.string_list(),
        "srcs": attr.label_list(allow_files = [".cu"] + _HEADERS),
        "_compiler_deps": attr.label(default = "@cuda//:compiler_deps"),
        "_nvcc": attr.label(
            default = "@cuda//:nvcc",
            executable = True,
            allow_single_file = True,
            cfg = "exec",
        ),
        "_runtime": attr.label(default = "//cuda:runtime"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = use_cpp_toolchain(),
)
