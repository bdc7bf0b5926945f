# SPDX-License-Identifier: Apache-2.0
"""How this repository compiles CUDA C++."""

load("@cuda_toolkit//:version.bzl", "CUDA_VERSION")
load("@rules_cuda//cuda:defs.bzl", "cuda_library")
load(":archs.bzl", "ARCHS")
load(":ptx.bzl", "kernel_ptx")

def sm90_cuda_library(name, srcs, hdrs = [], deps = [], copts = [], **kwargs):
    """A cuda_library for the architecture that //tools:arch names, and NAME_ptx for the emulator.

    Args:
      name: the target's name.
      srcs: as for cuda_library.
      hdrs: as for cuda_library.
      deps: as for cuda_library.
      copts: more options for nvcc.
      **kwargs: as for cuda_library.
    """
    if not CUDA_VERSION.startswith("13.0."):
        fail("kernels are built with CUDA 13.0, @cuda_toolkit has " + CUDA_VERSION)
    copts = [
        "-std=c++17",
        "--expt-relaxed-constexpr",
        # nvcc makes names of anonymous namespaces from the source file's absolute path: say another.
        "-Xcudafe=--orig_src_path_name=tiercel",
        # A warning of the pinned compiler is an error, ptxas's below too.
        "-Xcudafe=--promote_warnings",
        # A fifth of the wheel; a family's first call takes 1 to 3 ms longer (H200, R580).
        "--compress-mode=size",
    ] + select({
        "//tools/cuda:with_device_debug": ["-G"],
        "//conditions:default": ["-Xptxas=-Werror"],
    }) + select({
        "//tools/cuda:with_lineinfo": ["-lineinfo"],
        "//conditions:default": [],
    }) + copts
    cuda_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        archs = select({
            "//tools:arch_is_" + arch: [spec]
            for arch, spec in ARCHS.items()
        }),
        copts = copts,
        host_copts = ["-fvisibility=hidden"],
        # Wheels and tests ask for it with one Python set; `//...`, which sets none, would compile it again.
        tags = ["manual"],
        deps = deps,
        **kwargs
    )
    kernel_ptx(
        name = name + "_ptx",
        srcs = srcs,
        hdrs = hdrs,
        arch = select({
            "//tools:arch_is_" + arch: spec.partition(":")[0]
            for arch, spec in ARCHS.items()
        }),
        copts = copts,
        tags = ["manual"],
        deps = deps,
    )
