# SPDX-License-Identifier: Apache-2.0
"""Tests that run kernels on the CPU."""

load("//tools/python:pytest.bzl", "wheel_tests")

_LIBRARIES = [
    "//tools/emulator:libcuda_emulator.so",
    "//tools/emulator:libtiercel_emulated.so",
]

_ENV = {
    "OMP_NUM_THREADS": "1",
    "TIERCEL_EMULATED_MODULE": "$(rootpath //tools/emulator:libtiercel_emulated.so)",
    "TIERCEL_LIBCUDA": "$(rootpath //tools/emulator:libcuda_emulator.so)",
}

def emulator_tests(name, ptx = [], files = None, size = "medium", data = [], env = {}, **kwargs):
    """Tests on the emulator.

    Args:
      name: Target name.
      ptx: Targets with the PTX of the kernels that run, read from below the runfiles' kernels folder.
        Without any, the tests bring their own.
      files: The tests; without, the one file of that name.
      size: Bazel's size.
      data: Other files that they read.
      env: More environment.
      **kwargs: As of wheel_tests.
    """
    wheel_tests(
        name = name,
        size = size,
        srcs = (files or [name + ".py"]) + ["//tests:support"],
        data = _LIBRARIES + ptx + data,
        env = _ENV | ({"TIERCEL_EMULATOR_PTX": "kernels"} if ptx else {}) | env,
        torch = True,
        **kwargs
    )
