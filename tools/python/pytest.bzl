# SPDX-License-Identifier: Apache-2.0
"""pytest on one Python, against the installed wheel where the test is of it."""

load("@python_versions//:versions.bzl", "DEFAULT_PYTHON_VERSION", "PYTHON_VERSIONS")
load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load(":transitions.bzl", "ALLOWLIST", "one_python_transition")

# For tests of what all Pythons share.
OLDEST_AND_NEWEST = [
    PYTHON_VERSIONS[0],
    PYTHON_VERSIONS[-1],
]

def _pytest_test_impl(ctx):
    python = python_runtime(ctx)
    arguments = [python.short_path, ctx.file._runner.short_path]
    for wheel in ctx.files.wheel:
        arguments += ["--wheel", wheel.short_path]
    for folder in ctx.files.packages:
        arguments += ["--packages", folder.short_path]
    for pip in ctx.files._pip:
        if pip.basename.startswith("pip-"):
            arguments += ["--pip", pip.short_path]
    arguments.append("--")
    arguments += [ctx.expand_location(arg, ctx.attr.data) for arg in ctx.attr.pytest_args]
    arguments += [file.short_path for file in ctx.files.srcs if file.basename.startswith("test_")]
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        script,
        "#!/bin/sh\nexec {} \"$@\"\n".format(" ".join(["'{}'".format(arg) for arg in arguments])),
        is_executable = True,
    )
    files = ctx.files.srcs + ctx.files.data + ctx.files.wheel + ctx.files.packages + ctx.files._pip
    runfiles = ctx.runfiles(files + [ctx.file._runner], transitive_files = python.files)

    # The runfiles of programs in data: an interpreter's library, for one.
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [
        DefaultInfo(executable = script, runfiles = runfiles),
        testing.TestEnvironment({
            key: ctx.expand_location(value, ctx.attr.data)
            for key, value in ctx.attr.env.items()
        }),
    ]

pytest_test = rule(
    doc = "Runs pytest on srcs in a fresh virtual environment with the wheel and packages in it.",
    implementation = _pytest_test_impl,
    cfg = one_python_transition,
    test = True,
    attrs = ALLOWLIST | {
        "data": attr.label_list(allow_files = True),
        "env": attr.string_dict(doc = "Environment variables; $(rootpath LABEL) is expanded."),
        "packages": attr.label_list(default = ["//tools/python:test_site"]),
        "pytest_args": attr.string_list(),
        "python_version": attr.string(default = DEFAULT_PYTHON_VERSION),
        "srcs": attr.label_list(
            mandatory = True,
            allow_files = [".py", ".ini"],
        ),
        "wheel": attr.label(
            doc = "A wheel for the test itself to install, where packages are not enough.",
            allow_files = [".whl"],
        ),
        "_pip": attr.label(default = "@test_packages//:wheels"),
        "_runner": attr.label(
            default = ":run_pytest.py",
            allow_single_file = True,
        ),
    },
    toolchains = [TOOLCHAIN_TYPE],
)

def wheel_tests(
        name,
        srcs,
        torch = False,
        pythons = PYTHON_VERSIONS,
        fresh_install = False,
        more_packages = [],
        tags = [],
        **kwargs):
    """Tests of the installed wheel: one target for each Python, or one with PyTorch.

    Args:
      name: with torch the target's name; else a suite of NAME_cp310, NAME_cp311, ...
      srcs: test files; conftest.py and pytest.ini are added.
      torch: add the locked PyTorch, and run on the default Python only.
      pythons: the Pythons, without torch.
      fresh_install: install the wheel in each test, which may then write into it.
      more_packages: installed packages that tests with PyTorch need too.
      tags: tags of the targets.
      **kwargs: as for pytest_test.
    """
    common = ["//tests:conftest.py", "//tests:pytest.ini"]
    packages = ["//tools/python:test_site"]
    if fresh_install:
        kwargs["wheel"] = "//python:wheel"
    else:
        packages.append("//tools/python:wheel_site")
    if torch:
        pytest_test(
            name = name,
            srcs = srcs + common,
            packages = packages + ["//tools/python:torch_site"] + more_packages,
            tags = tags + ["torch"],
            **kwargs
        )
        return
    for version in pythons:
        pytest_test(
            name = name + "_cp" + version.replace(".", ""),
            srcs = srcs + common,
            packages = packages,
            python_version = version,
            tags = tags,
            **kwargs
        )
    native.test_suite(
        name = name,
        tests = [":" + name + "_cp" + version.replace(".", "") for version in pythons],
    )
