# SPDX-License-Identifier: Apache-2.0
"""What the wheels' kernels are, as data: names, registers, shared memory, size."""

load("//tools/python:run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load("//tools/python:transitions.bzl", "ALLOWLIST", "any_python_transition")

_KernelsInfo = provider(
    doc = "What the compilers of kernels made in the targets below.",
    fields = {"files": "depset of (package, object, cubin folder or manifest)"},
)

_GROUPS = ["pic_objects", "cubins", "manifest"]

def _below(rule):
    found = []
    for name in dir(rule.attr):
        value = getattr(rule.attr, name)
        for target in value if type(value) == "list" else [value]:
            if type(target) == "Target" and _KernelsInfo in target:
                found.append(target[_KernelsInfo].files)
    return found

def _kernels_aspect_impl(target, ctx):
    files = []
    if [a for a in target.actions if a.mnemonic in ("CudaCompile", "CuteCompile")]:
        for group in _GROUPS:
            if hasattr(target[OutputGroupInfo], group):
                made = getattr(target[OutputGroupInfo], group).to_list()
                files += [(target.label.package, file) for file in made]
    return [_KernelsInfo(files = depset(files, transitive = _below(ctx.rule)))]

_kernels_aspect = aspect(
    implementation = _kernels_aspect_impl,
    attr_aspects = ["*"],
)

def _kernel_list_impl(ctx):
    python = python_runtime(ctx)
    files = ctx.attr.kernels[0][_KernelsInfo].files.to_list()
    args = ctx.actions.args()
    args.add(ctx.file._list)
    args.add(ctx.outputs.out)
    args.add(ctx.files._binutils[0])
    args.add_all(
        ["{}={}".format(package, file.path) for package, file in files],
        expand_directories = False,
    )
    ctx.actions.run(
        executable = python.path,
        arguments = [args],
        inputs = depset(
            [file for _, file in files] + [ctx.file._list] + ctx.files._binutils,
            transitive = [python.files],
        ),
        outputs = [ctx.outputs.out],
        env = {"PATH": "/usr/bin:/bin"},
        mnemonic = "ListKernels",
        progress_message = "Listing kernels in %{output}",
    )
    return [DefaultInfo(files = depset([ctx.outputs.out]))]

kernel_list = rule(
    doc = "A JSON file of all compiled kernels below a target; they are not compiled again for it.",
    implementation = _kernel_list_impl,
    attrs = ALLOWLIST | {
        "kernels": attr.label(
            mandatory = True,
            aspects = [_kernels_aspect],
            cfg = any_python_transition,
        ),
        "out": attr.output(mandatory = True),
        "_binutils": attr.label(default = "@cuda_toolkit//:binutils"),
        "_list": attr.label(
            default = "//tools/cuda:list_kernels.py",
            allow_single_file = True,
        ),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
