# SPDX-License-Identifier: Apache-2.0
"""The pinned CUDA toolkit, laid out as one folder from its Python wheels."""

load(":python_packages.bzl", "fetch_wheels", "list_wheels", "unpack_wheels")

_BUILD_FILE = """
package(default_visibility = ["//visibility:public"])

filegroup(
    name = "binutils",
    srcs = ["toolkit/bin/cuobjdump", "toolkit/bin/nvdisasm"],
)

filegroup(
    name = "runtime_license",
    srcs = ["licenses/nvidia_cuda_runtime.txt"],
)
"""

def _cuda_toolkit_repository_impl(rctx):
    error = fetch_wheels(rctx, rctx.attr.lock, rctx.attr.python_version)
    if error:
        fail("\n" + error)
    unpack_wheels(rctx, "unpacked")
    version = None
    for wheel in list_wheels(rctx):
        name, wheel_version = wheel.basename.split("-")[:2]
        if name == "nvidia_cuda_nvcc":
            version = wheel_version
        info = rctx.path("unpacked/{}-{}.dist-info".format(name, wheel_version))
        for license in ["License.txt", "licenses/License.txt", "LICENSE.txt", "licenses/LICENSE.txt"]:
            if info.get_child(license).exists:
                rctx.symlink(info.get_child(license), "licenses/" + name + ".txt")
                break
    rctx.delete("wheels")
    rctx.symlink("unpacked/nvidia/cu13", "toolkit")

    # nvcc.profile and rules_cuda look for lib64; executables come without their bit from some wheels.
    rctx.symlink("unpacked/nvidia/cu13/lib", "unpacked/nvidia/cu13/lib64")
    rctx.execute(["chmod", "-R", "+x", "toolkit/bin", "toolkit/nvvm/bin"])
    rctx.file("version.bzl", "CUDA_VERSION = {}\n".format(repr(version)))
    rctx.file("BUILD.bazel", _BUILD_FILE)

cuda_toolkit_repository = repository_rule(
    doc = "nvcc, its libraries and its disassemblers at one version; nothing of the machine's CUDA.",
    implementation = _cuda_toolkit_repository_impl,
    attrs = {
        "lock": attr.label(mandatory = True),
        "python_version": attr.string(mandatory = True),
    },
)
