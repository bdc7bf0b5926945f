# SPDX-License-Identifier: Apache-2.0
"""The transitions that make four wheels of one graph, and keep kernels out of them."""

load("@python_versions//:versions.bzl", "DEFAULT_PYTHON_VERSION", "PYTHON_VERSIONS")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_PYTHON_VERSION = "@rules_python//python/config_settings:python_version"

# Below this edge nothing depends on the Python version, so it is built once for all of them.
any_python_transition = transition(
    implementation = lambda settings, attr: {_PYTHON_VERSION: DEFAULT_PYTHON_VERSION},
    inputs = [],
    outputs = [_PYTHON_VERSION],
)

# One branch for each supported Python.
all_pythons_transition = transition(
    implementation = lambda settings, attr: {
        version: {_PYTHON_VERSION: version}
        for version in PYTHON_VERSIONS
    },
    inputs = [],
    outputs = [_PYTHON_VERSION],
)

# The Python that the rule's python_version attribute names; without one, the Python is kept.
one_python_transition = transition(
    implementation = lambda settings, attr: {_PYTHON_VERSION: attr.python_version or settings[_PYTHON_VERSION]},
    inputs = [_PYTHON_VERSION],
    outputs = [_PYTHON_VERSION],
)

# Rules that use a transition list this attribute.
ALLOWLIST = {
    "_allowlist_function_transition": attr.label(
        default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
    ),
}

def _once_for_all_pythons_impl(ctx):
    library = ctx.attr.library[0]
    return [library[CcInfo], DefaultInfo(files = library[DefaultInfo].files)]

once_for_all_pythons = rule(
    doc = "A C++ library that does not depend on Python, built once however many Pythons use it.",
    implementation = _once_for_all_pythons_impl,
    attrs = ALLOWLIST | {
        "library": attr.label(
            mandatory = True,
            cfg = any_python_transition,
            providers = [CcInfo],
        ),
    },
    # Without this, rules that link shared libraries would drop the library and say nothing.
    provides = [CcInfo],
)
