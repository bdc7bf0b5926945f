# SPDX-License-Identifier: Apache-2.0
"""A repository of locked Python packages, fetched by the machine's own pip."""

def fetch_wheels(rctx, lock, python_version):
    """Downloads what a lock file names into wheels/, checked against its hashes.

    Args:
      rctx: the repository context.
      lock: label of the lock file.
      python_version: the Python that the wheels are for.

    Returns:
      None, or pip's last words where it failed.
    """
    python = rctx.which("python3")
    if not python:
        fail("python3 not found: install the package python3")
    rctx.report_progress("fetching " + lock.name)
    result = rctx.execute(
        [python, rctx.path(Label("//tools/python:fetch_wheels.py")), rctx.path(lock), "wheels", python_version],
        quiet = False,
        timeout = 3600,
    )
    return None if result.return_code == 0 else result.stderr.strip().split("\n")[-1]

def list_wheels(rctx):
    """The fetched wheels, as paths."""
    return [path for path in rctx.path("wheels").readdir() if path.basename.endswith(".whl")]

def unpack_wheels(rctx, folder):
    """Unpacks all fetched wheels into one folder."""
    for wheel in list_wheels(rctx):
        rctx.report_progress("unpacking " + wheel.basename)
        rctx.symlink(wheel, "wheel.zip")  # extract() goes by the file's ending
        rctx.extract("wheel.zip", folder)
        rctx.delete("wheel.zip")

def _python_packages_impl(rctx):
    errors = []
    for lock in rctx.attr.locks:
        error = fetch_wheels(rctx, lock, rctx.attr.python_version)
        if not error:
            break
        errors.append(error)
    if len(errors) == len(rctx.attr.locks):
        fail("\n" + "\n".join(errors))
    if rctx.attr.extract:
        unpack_wheels(rctx, "site")
    rctx.file("BUILD.bazel", _BUILD_FILE)

_BUILD_FILE = """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# The wheels as they came, for pip --no-index.
filegroup(name = "wheels", srcs = glob(["wheels/*.whl"]))

cc_library(
    name = "pybind11",
    hdrs = glob(["site/pybind11/include/**/*.h"], allow_empty = True),
    includes = ["site/pybind11/include"],
)

filegroup(
    name = "pybind11_license",
    srcs = glob(["site/pybind11-*.dist-info/**/LICENSE"], allow_empty = True),
)
"""

python_packages = repository_rule(
    doc = "Python packages by exact version and hash; the first lock file that can be had is taken.",
    implementation = _python_packages_impl,
    attrs = {
        "extract": attr.bool(doc = "Also unpack the wheels into one folder."),
        "locks": attr.label_list(mandatory = True),
        "python_version": attr.string(mandatory = True),
    },
)
