# SPDX-License-Identifier: Apache-2.0
"""A test of what the compiler made of a family's kernels."""

load("//tools/python:pytest.bzl", "pytest_test")

def kernel_contract_test(name, library, contract, output_group = "pic_objects", **kwargs):
    """Holds compiled kernels to their contract: see tests/build/test_kernel_contract.py.

    Args:
      name: the test's name.
      library: the sm90_cuda_library with the kernels.
      contract: a JSON file that says what each kernel's code promises.
      output_group: of the library; "cubins" for the NAME_compiled of a cute_kernels.
      **kwargs: as for pytest_test.
    """
    native.filegroup(
        name = name + "_objects",
        srcs = [library],
        output_group = output_group,
        tags = ["manual"],
        visibility = ["//visibility:private"],
    )
    pytest_test(
        name = name,
        srcs = [
            "//tests/build:cubin.py",
            "//tests/build:test_kernel_contract.py",
        ],
        data = [
            contract,
            name + "_objects",
            "@cuda_toolkit//:binutils",
        ],
        env = {
            "BINUTILS": "$(rootpaths @cuda_toolkit//:binutils)",
            "CONTRACT": "$(rootpath {})".format(contract),
            "OBJECTS": "$(rootpaths {}_objects)".format(name),
        },
        **kwargs
    )
