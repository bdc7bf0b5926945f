# SPDX-License-Identifier: Apache-2.0
"""How this repository compiles CUDA C++."""

# Loading the toolkit's version makes sure that it is there before rules_cuda looks for it.
load("@cuda_toolkit//:version.bzl", "CUDA_VERSION")
load("@rules_cuda//cuda:defs.bzl", "cuda_library")
load(":archs.bzl", "ARCHS")

def sm90_cuda_library(name, copts = [], **kwargs):
    """A cuda_library for the architecture that //tools:arch names.

    Args:
      name: the target's name.
      copts: more options for nvcc.
      **kwargs: as for cuda_library.
    """
    if not CUDA_VERSION.startswith("13.0."):
        fail("kernels are built with CUDA 13.0, @cuda_toolkit has " + CUDA_VERSION)
    cuda_library(
        name = name,
        archs = select({
            "//tools:arch_is_" + arch: [spec]
            for arch, spec in ARCHS.items()
        }),
        copts = [
            "-std=c++17",
            "--expt-relaxed-constexpr",
            # nvcc makes names of anonymous namespaces from the source file's absolute path: say another.
            "-Xcudafe=--orig_src_path_name=tiercel",
        ] + select({
            "//tools/cuda:with_device_debug": ["-G"],
            "//conditions:default": ["-O3"],
        }) + select({
            "//tools/cuda:with_lineinfo": ["-lineinfo"],
            "//conditions:default": [],
        }) + copts,
        host_copts = ["-fvisibility=hidden"],
        **kwargs
    )
