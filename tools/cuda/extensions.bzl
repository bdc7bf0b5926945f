# SPDX-License-Identifier: Apache-2.0
"""@cuda, from the pinned toolkit."""

load("@rules_cuda//cuda:repositories.bzl", "cuda_toolkit")

def _pinned_cuda_impl(mctx):
    # rules_cuda tells every compile of this path, so it is one that all machines have: from the
    # repository's folder to its neighbour.
    repository = mctx.path(Label("@cuda_toolkit//:BUILD.bazel")).dirname.basename
    cuda_toolkit(name = "pinned_cuda", toolkit_path = "../{}/toolkit".format(repository))
    return mctx.extension_metadata(reproducible = True)

pinned_cuda = module_extension(implementation = _pinned_cuda_impl)
