# SPDX-License-Identifier: Apache-2.0
"""Tests of a family of ops, by the endings of their file names, and tests that need a GPU."""

load(":pytest.bzl", "OLDEST_AND_NEWEST", "wheel_tests")

def gpu_test(name, srcs, size = "large", **kwargs):
    """The tests marked `gpu`. A machine runs one at a time: .bazelrc, ci/test_gpus.sh.

    Args:
      name: the target's name.
      srcs: test files.
      size: as for pytest_test.
      **kwargs: as for wheel_tests.
    """
    wheel_tests(
        name = name,
        size = size,
        srcs = srcs,
        pytest_args = [
            "-m",
            "gpu",
        ],
        tags = [
            "external",
            "gpu",
        ],
        torch = True,
        **kwargs
    )

# buildifier: disable=unnamed-macro
def family_tests(medium = [], exclude = []):
    """Targets of the package's test_*.py.

    test_X_cpu.py runs with PyTorch; test_X_gpu.py needs a GPU, and test_X_gpu_*.py join its target.
    The other files test host code without PyTorch and are one target, test_host, with the package's
    *.json. That code is compiled once for all Pythons.

    Args:
      medium: targets that take longer than half a minute on two slow cores.
      exclude: files whose targets the package declares itself.
    """
    native.exports_files(
        ["declarations.txt"],
        visibility = ["//kernels:__pkg__"],
    )
    gpu, host = {}, []
    for file in native.glob(["test_*.py"], exclude = exclude):
        name = file.removesuffix(".py")
        size = "medium" if name in medium else "small"
        srcs = [file, "//tests:support"]
        if "_gpu" in name:
            gpu.setdefault(name.partition("_gpu")[0] + "_gpu", []).append(file)
        elif name.endswith("_cpu"):
            wheel_tests(name = name, size = size, srcs = srcs, torch = True)
        else:
            host.append(file)
    if host:
        wheel_tests(
            name = "test_host",
            size = "medium",
            srcs = host + ["//tests:support"],
            data = native.glob(["*.json"], allow_empty = True),
            pythons = OLDEST_AND_NEWEST,
        )
    for name, files in gpu.items():
        gpu_test(name = name, srcs = files + ["//tests:support"])
