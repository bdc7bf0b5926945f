# SPDX-License-Identifier: Apache-2.0
"""From an extension module to repaired wheels for every Python."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("//tools/python:run.bzl", "TOOLCHAIN_TYPE", "python_runtime")
load("//tools/python:transitions.bzl", "ALLOWLIST", "all_pythons_transition", "one_python_transition")

PLATFORM = "manylinux_2_34_x86_64"

def _extension_module_impl(ctx):
    version = ctx.attr._python_version[BuildSettingInfo].value
    tag = "".join(version.split(".")[:2])
    module = ctx.actions.declare_file("{}.cpython-{}-x86_64-linux-gnu.so".format(ctx.attr.module, tag))
    ctx.actions.symlink(output = module, target_file = ctx.file.library)
    return [DefaultInfo(files = depset([module]))]

extension_module = rule(
    doc = "A shared library under the file name that the configured Python imports.",
    implementation = _extension_module_impl,
    attrs = {
        "library": attr.label(
            mandatory = True,
            allow_single_file = True,
        ),
        "module": attr.string(
            doc = "Path of the module relative to this package, without the suffix.",
            mandatory = True,
        ),
        "_python_version": attr.label(default = "@rules_python//python/config_settings:python_version"),
    },
)

def _repaired_wheel_impl(ctx):
    python = python_runtime(ctx)
    wheel = ctx.actions.declare_file(ctx.file.wheel.basename.replace("linux_x86_64", PLATFORM))
    args = ctx.actions.args()
    args.add(ctx.file._repair)
    args.add(ctx.file.wheel)
    args.add(wheel)
    args.add(PLATFORM)
    args.add(ctx.files._packages[0].path)
    ctx.actions.run(
        executable = python.path,
        arguments = [args],
        inputs = depset([ctx.file.wheel, ctx.file._repair] + ctx.files._packages, transitive = [python.files]),
        outputs = [wheel],
        # The time stamps that auditwheel writes into the archive.
        env = {"SOURCE_DATE_EPOCH": "315532800"},
        mnemonic = "RepairWheel",
        progress_message = "Repairing %{input}",
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles([wheel]))]

repaired_wheel = rule(
    doc = "A wheel that auditwheel has found fit for PLATFORM and tagged so; it bundles nothing.",
    implementation = _repaired_wheel_impl,
    attrs = {
        "wheel": attr.label(
            mandatory = True,
            allow_single_file = [".whl"],
        ),
        "_packages": attr.label(default = "//tools/python:build_site"),
        "_repair": attr.label(
            default = ":repair.py",
            allow_single_file = True,
        ),
    },
    toolchains = [TOOLCHAIN_TYPE],
)

def _forward(ctx):
    files = depset(transitive = [target[DefaultInfo].files for target in ctx.attr.wheel])
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files))]

def _wheels_impl(ctx):
    files = depset(transitive = [target[DefaultInfo].files for target in ctx.split_attr.wheel.values()])
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files))]

wheels = rule(
    doc = "One wheel target, built for every supported Python.",
    implementation = _wheels_impl,
    attrs = ALLOWLIST | {
        "wheel": attr.label(
            mandatory = True,
            cfg = all_pythons_transition,
        ),
    },
)

wheel_for_python = rule(
    doc = "One wheel target, built for the Python that python_version names.",
    implementation = _forward,
    attrs = ALLOWLIST | {
        "python_version": attr.string(mandatory = True),
        "wheel": attr.label(
            mandatory = True,
            cfg = one_python_transition,
        ),
    },
)

def _dist_impl(ctx):
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(script, """#!/bin/sh
# Copies the wheels to a folder: bazel run //python:dist -- DIR
set -eu
[ $# -eq 1 ] || { echo "usage: bazel run {label} -- DIR" >&2; exit 2; }
case $1 in /*) dir=$1 ;; *) dir=$BUILD_WORKING_DIRECTORY/$1 ;; esac
mkdir -p "$dir"
for wheel in {wheels}; do
  install -m 644 "$wheel" "$dir/" && echo "$dir/${{wheel##*/}}"
done
""".replace("{{", "{").replace("}}", "}").replace("{label}", str(ctx.label).lstrip("@")).replace(
        "{wheels}",
        " ".join([file.short_path for file in ctx.files.wheels]),
    ), is_executable = True)
    return [DefaultInfo(executable = script, runfiles = ctx.runfiles(ctx.files.wheels))]

dist = rule(
    doc = "bazel run it with a folder to have the wheels copied there.",
    implementation = _dist_impl,
    attrs = {"wheels": attr.label(mandatory = True)},
    executable = True,
)
