# SPDX-License-Identifier: Apache-2.0
"""What a release reads, for its commands and their tests."""

load("//tools/audit:policy.bzl", "AUDIT_DATA", "AUDIT_ENV", "AUDIT_PACKAGES", "AUDIT_SRCS")
load("//tools/python:interpreters.bzl", "INTERPRETERS")

RELEASE_SRCS = AUDIT_SRCS + ["//tools/release:sources"]

RELEASE_DATA = AUDIT_DATA + INTERPRETERS + ["@test_packages//:wheels"]

RELEASE_ENV = AUDIT_ENV | {
    "AUDIT": "tools/audit/main.py",
    "PYTHONS": " ".join(["$(rootpath {})".format(python) for python in INTERPRETERS]),
    "TEST_WHEELS": "$(rootpaths @test_packages//:wheels)",
}

RELEASE_PACKAGES = AUDIT_PACKAGES
