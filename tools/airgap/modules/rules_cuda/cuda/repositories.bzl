# SPDX-License-Identifier: Apache-2.0
"""@cuda as cuda_toolkit(toolkit_path) makes it."""

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

def _cuda_toolkit_impl(rctx):
    toolkit = rctx.path(rctx.attr.toolkit_path)
    if not toolkit.get_child("bin/nvcc").exists:
        fail("no CUDA toolkit at {}".format(toolkit))
    rctx.symlink(toolkit, "cuda")
    rctx.file("BUILD.bazel", _BUILD_FILE)

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    attrs = {"toolkit_path": attr.string()},
    local = True,
)
