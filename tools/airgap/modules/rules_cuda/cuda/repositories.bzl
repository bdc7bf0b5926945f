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
    # Without a path, rules_cuda makes a repository without a toolkit where it finds none, and so
    # does this one: an output base from before an override_repo() still asks for it by name.
    if not rctx.attr.toolkit_path:
        rctx.file("BUILD.bazel")
        return
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
