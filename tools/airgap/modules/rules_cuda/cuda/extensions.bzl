# SPDX-License-Identifier: Apache-2.0
"""The root module's toolkit(name, toolkit_path) as a repository."""

load(":repositories.bzl", "cuda_toolkit")

def _toolchain_impl(mctx):
    for module in mctx.modules:
        for toolkit in module.tags.toolkit:
            cuda_toolkit(name = toolkit.name, toolkit_path = toolkit.toolkit_path)

toolchain = module_extension(
    implementation = _toolchain_impl,
    tag_classes = {
        "toolkit": tag_class(attrs = {
            "name": attr.string(mandatory = True),
            "toolkit_path": attr.string(),
        }),
    },
)
