# SPDX-License-Identifier: Apache-2.0
"""@cuda, from the root module's toolkit(name, toolkit_path)."""

_BUILD_FILE = """
package(default_visibility = ["//visibility:public"])

filegroup(name = "compiler_deps", srcs = glob(["cuda/bin/**", "cuda/include/**", "cuda/nvvm/**"]))

filegroup(name = "nvcc", srcs = ["cuda/bin/nvcc"])

cc_library(
    name = "cuda_runtime_static",
    srcs = ["cuda/lib64/libcudart_static.a"],
    hdrs = glob(["cuda/include/**"]),
    includes = ["cuda/include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
)
"""

def _cuda_repository_impl(rctx):
    toolkit = rctx.path(rctx.attr.toolkit_path)
    if not toolkit.get_child("bin/nvcc").exists:
        fail("no CUDA toolkit at {}".format(toolkit))
    rctx.symlink(toolkit, "cuda")
    rctx.file("BUILD.bazel", _BUILD_FILE)

_cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    attrs = {"toolkit_path": attr.string()},
    local = True,
)

def _toolchain_impl(mctx):
    for module in mctx.modules:
        for toolkit in module.tags.toolkit:
            _cuda_repository(name = toolkit.name, toolkit_path = toolkit.toolkit_path)

toolchain = module_extension(
    implementation = _toolchain_impl,
    tag_classes = {
        "toolkit": tag_class(attrs = {
            "name": attr.string(mandatory = True),
            "toolkit_path": attr.string(),
        }),
    },
)
