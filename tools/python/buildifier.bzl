# SPDX-License-Identifier: Apache-2.0
"""buildifier, from its npm package."""

_VERSION = "8.2.1"
_SHA256 = "b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee"

def _buildifier_repository_impl(rctx):
    npm = rctx.which("npm")
    if npm:
        result = rctx.execute([npm, "pack", "--silent", "@bazel/buildifier@" + _VERSION], timeout = 300)
        if result.return_code != 0:
            fail("npm could not fetch @bazel/buildifier {}: {}".format(_VERSION, result.stderr))
        archive = "bazel-buildifier-{}.tgz".format(_VERSION)
        digest = rctx.execute(["sha256sum", archive]).stdout.split(" ")[0]
        if digest != _SHA256:
            fail("@bazel/buildifier {} has sha256 {}, expected {}".format(_VERSION, digest, _SHA256))
        rctx.extract(archive, "unpacked")
        rctx.delete(archive)
        rctx.symlink("unpacked/package/buildifier-linux_amd64", "buildifier")
    else:
        rctx.file("buildifier", "#!/bin/sh\necho 'buildifier was not run: npm is not installed' >&2\n")
    rctx.file("BUILD.bazel", 'exports_files(["buildifier"])\n')

buildifier_repository = repository_rule(
    implementation = _buildifier_repository_impl,
    environ = ["PATH"],
)
