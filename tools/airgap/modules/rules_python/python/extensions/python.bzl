# SPDX-License-Identifier: Apache-2.0
"""The Pythons of the machine as toolchains, one for each python.toolchain(python_version)."""

_PYTHON_BUILD_FILE = """
package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{executable}",
    python_version = "PY3",
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)
"""

def _python_repository_impl(rctx):
    version = rctx.attr.python_version
    finder = rctx.path(Label("@@//tools/airgap:pythons.py"))
    result = rctx.execute([rctx.which("python3"), finder, version])
    if result.return_code != 0:
        fail(result.stderr)
    found = json.decode(result.stdout)[version]
    if not found:
        fail("\nPython {} not found on this machine (looked in PATH, pyenv and uv): install it".format(version))
    rctx.symlink(found["include"], "include")
    rctx.file("BUILD.bazel", _PYTHON_BUILD_FILE.format(executable = found["executable"]))

_python_repository = repository_rule(
    implementation = _python_repository_impl,
    attrs = {"python_version": attr.string(mandatory = True)},
    local = True,
    configure = True,
)

_HUB_LOADS = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])
"""

_HUB_TOOLCHAIN = """
py_runtime_pair(
    name = "runtimes_{version}",
    py3_runtime = "@python_{name}//:runtime",
)

toolchain(
    name = "python_{version}",
    target_settings = ["@rules_python//python/config_settings:is_python_{version}"],
    toolchain = ":runtimes_{version}",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

_HUB_HEADERS = """
alias(
    name = "current_headers",
    actual = select({{
{branches}
    }}),
)
"""

def _hub_repository_impl(rctx):
    versions = rctx.attr.versions
    parts = [
        _HUB_TOOLCHAIN.format(version = version, name = version.replace(".", "_"))
        for version in versions
    ]
    branches = [
        '        "@rules_python//python/config_settings:is_python_{}": "@python_{}//:headers",'.format(
            version,
            version.replace(".", "_"),
        )
        for version in versions
    ]
    headers = _HUB_HEADERS.format(branches = "\n".join(branches))
    rctx.file("BUILD.bazel", _HUB_LOADS + "".join(parts) + headers)
    rctx.file("versions.bzl", "PYTHON_VERSIONS = {}\nDEFAULT_PYTHON_VERSION = {}\n".format(
        repr(versions),
        repr(rctx.attr.default),
    ))

_hub_repository = repository_rule(
    implementation = _hub_repository_impl,
    attrs = {
        "default": attr.string(mandatory = True),
        "versions": attr.string_list(mandatory = True),
    },
)

def _python_impl(mctx):
    root = mctx.modules[0]
    versions = [toolchain.python_version for toolchain in root.tags.toolchain]
    for version in versions:
        _python_repository(name = "python_" + version.replace(".", "_"), python_version = version)
    _hub_repository(
        name = "pythons_hub",
        default = root.tags.defaults[0].python_version,
        versions = versions,
    )

python = module_extension(
    implementation = _python_impl,
    tag_classes = {
        "defaults": tag_class(attrs = {"python_version": attr.string()}),
        "toolchain": tag_class(attrs = {"python_version": attr.string(mandatory = True)}),
    },
)
