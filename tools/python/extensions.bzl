# SPDX-License-Identifier: Apache-2.0
"""The repositories that package mirrors fill: locked Python packages, and what is made of them."""

load("//tools/cxx:repository.bzl", "cxx_toolchain_repository")
load(":buildifier.bzl", "buildifier_repository")
load(":cuda_toolkit.bzl", "cuda_toolkit_repository")
load(":debian.bzl", "debian_program")
load(":python_packages.bzl", "python_packages")

_LOCK = "//tools/python/locks:{}.lock"

def _versions_repository_impl(rctx):
    rctx.file("BUILD.bazel", "")
    rctx.file("versions.bzl", "PYTHON_VERSIONS = {}\nDEFAULT_PYTHON_VERSION = {}\n".format(
        repr(rctx.attr.versions),
        repr(rctx.attr.default),
    ))

_versions_repository = repository_rule(
    implementation = _versions_repository_impl,
    attrs = {
        "default": attr.string(mandatory = True),
        "versions": attr.string_list(mandatory = True),
    },
)

def _packages_impl(mctx):
    pythons = mctx.modules[0].tags.pythons[0]
    _versions_repository(
        name = "python_versions",
        default = pythons.default,
        versions = pythons.versions,
    )
    cuda_toolkit_repository(
        name = "cuda_toolkit",
        lock = Label(_LOCK.format("cuda")),
        python_version = pythons.default,
    )
    cxx_toolchain_repository(name = "cxx_toolchain")
    for name in ["build", "lint", "release", "release-test", "transformers", "kernels"]:
        python_packages(
            name = name.replace("-", "_") + "_packages",
            extract = name == "build",  # for pybind11's headers
            locks = [Label(_LOCK.format(name))],
            python_version = pythons.default,
        )
    python_packages(
        name = "test_packages",
        locks = [Label(_LOCK.format("test"))],
        python_version = pythons.versions[0],
    )
    python_packages(
        name = "cute_packages",
        locks = [Label(_LOCK.format("cute"))],
        python_version = pythons.default,
    )
    python_packages(
        name = "torch_packages",
        locks = [Label(_LOCK.format("torch")), Label(_LOCK.format("torch-cuda"))],
        python_version = pythons.default,
    )
    buildifier_repository(name = "buildifier")
    debian_program(
        name = "nginx",
        package = "nginx",
        program = "usr/sbin/nginx",
        sha256 = "4e7b52f8b31f26d77ffb5c427c41e36223e81b047242ecfa8dc1d7f939734885",
        version = "1.22.1-9+deb12u9",
    )
    return mctx.extension_metadata(reproducible = True)

packages = module_extension(
    implementation = _packages_impl,
    tag_classes = {
        "pythons": tag_class(attrs = {
            "default": attr.string(mandatory = True),
            "versions": attr.string_list(mandatory = True),
        }),
    },
)
