# SPDX-License-Identifier: Apache-2.0
"""Python packages, installed into one folder by pip."""

load(":run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load(":transitions.bzl", "ALLOWLIST", "one_python_transition")

_INSTALL = """
set -eu
python=$1 folder=$2
shift 2
"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \\
  --disable-pip-version-check --root-user-action=ignore --target "$folder" "$@"
"""

# Every file that stays costs a link in each test's sandbox.
_LEAVE_OUT = """
(cd "$folder" && rm -rf {})
"""

# From source an import takes several times as long, in every process of every test. By hash, since
# links have other times. A few files are templates, or of a newer Python.
_COMPILE = """
"$python" -m compileall -qq -s "$folder" --invalidation-mode unchecked-hash "$folder" || true
"""

def _installed_packages_impl(ctx):
    python = python_runtime(ctx)
    folder = ctx.actions.declare_directory(ctx.label.name)
    pip = [file for file in ctx.files._pip if file.basename.startswith("pip-")]
    args = ctx.actions.args()

    # pip writes down where the wheels and the interpreter are: the same for each sandbox and machine, so
    # that what reads the folder comes from a cache.
    here = "/proc/self/cwd/"
    args.add_all([python.path if python.path.startswith("/") else here + python.path, folder.path])
    args.add_all(ctx.files.wheels, format_each = here + "%s")
    ctx.actions.run_shell(
        command = "".join([
            _INSTALL,
            _LEAVE_OUT.format(" ".join(ctx.attr.leave_out)) if ctx.attr.leave_out else "",
            _COMPILE if ctx.attr.compile else "",
        ]),
        arguments = [args],
        inputs = depset(pip + ctx.files.wheels, transitive = [python.files]),
        outputs = [folder],
        env = {
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": pip[0].path,
        },
        mnemonic = "PipInstall",
        progress_message = "Installing %{label}",
    )
    return [DefaultInfo(files = depset([folder]))]

installed_packages = rule(
    doc = "A folder for PYTHONPATH with the given wheels installed.",
    implementation = _installed_packages_impl,
    cfg = one_python_transition,
    attrs = ALLOWLIST | {
        "compile": attr.bool(doc = "Compile the modules too, for this Python."),
        "leave_out": attr.string_list(doc = "Shell patterns of files and folders that nothing uses."),
        "python_version": attr.string(doc = "The Python that they are for; by default the configured one."),
        "wheels": attr.label_list(
            mandatory = True,
            allow_files = [".whl"],
        ),
        "_pip": attr.label(default = "@test_packages//:wheels"),
    },
    toolchains = [TOOLCHAIN_TYPE],
)
