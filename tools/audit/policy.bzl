# SPDX-License-Identifier: Apache-2.0
"""What the audit reads, for its command and its tests."""

load("@python_versions//:versions.bzl", "PYTHON_VERSIONS")

_LOCKS = ["//tools/python/locks:{}.lock".format(name) for name in ["build", "cuda", "cute"]]

AUDIT_SRCS = [
    "//tools/audit:checks.py",
    "//tools/audit:main.py",
    "//tools/audit:module_checks.py",
    "//tools/audit:policy.py",
    "//tools/audit:sbom.py",
    "//tools/audit:wheel_file.py",
]

AUDIT_DATA = _LOCKS + [
    "//tests/packaging:budget.json",
    "//tools/audit:components.json",
    "//tools/audit:sizes.json",
    "@cuda_toolkit//:binutils",
]

AUDIT_ENV = {
    "BINUTILS": "$(rootpaths @cuda_toolkit//:binutils)",
    "BUDGET": "$(rootpath //tests/packaging:budget.json)",
    "COMPONENTS": "$(rootpath //tools/audit:components.json)",
    "LOCKS": " ".join(["$(rootpath {})".format(lock) for lock in _LOCKS]),
    "SIZES": "$(rootpath //tools/audit:sizes.json)",
    "SUPPORTED_PYTHONS": " ".join(PYTHON_VERSIONS),
}

AUDIT_PACKAGES = [
    "//tools/python:build_site",
    "//tools/python:release_site",
]
