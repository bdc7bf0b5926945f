# SPDX-License-Identifier: Apache-2.0
"""@cuda, from the pinned toolkit."""

load("@rules_cuda//cuda:repositories.bzl", "cuda_toolkit")

def _pinned_cuda_impl(mctx):
    toolkit = mctx.path(Label("@cuda_toolkit//:BUILD.bazel")).dirname.get_child("toolkit")
    cuda_toolkit(name = "pinned_cuda", toolkit_path = str(toolkit))
    return mctx.extension_metadata(reproducible = True)

pinned_cuda = module_extension(implementation = _pinned_cuda_impl)
