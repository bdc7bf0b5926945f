# SPDX-License-Identifier: Apache-2.0
"""py_wheel: files and metadata packed as a wheel."""

load("//python:wheel_names.bzl", "normalize_distribution")

def _entry_points(groups):
    return "\n\n".join([
        "[{}]\n{}".format(group, "\n".join(sorted(entries)))
        for group, entries in sorted(groups.items())
    ])

def _requirement(text):
    """With its version specifiers in order."""
    for i, character in enumerate(text.elems()):
        if character in "<>=!~":
            return text[:i] + ",".join(sorted(text[i:].split(",")))
    return text

def _metadata(ctx):
    attr = ctx.attr
    lines = ["Metadata-Version: 2.1", "Name: " + attr.distribution]
    for key, value in [
        ("Author", attr.author),
        ("Author-email", attr.author_email),
        ("Home-page", attr.homepage),
        ("License", attr.license),
        ("Description-Content-Type", attr.description_content_type),
        ("Summary", attr.summary),
    ]:
        if value:
            lines.append("{}: {}".format(key, value))
    lines += ["Project-URL: {}, {}".format(*item) for item in sorted(attr.project_urls.items())]
    lines += ["Classifier: " + classifier for classifier in attr.classifiers]
    if attr.python_requires:
        lines.append("Requires-Python: " + attr.python_requires)
    lines += ["Requires-Dist: " + requirement for requirement in attr.requires]
    for extra, requirements in sorted(attr.extra_requires.items()):
        lines.append("Provides-Extra: " + extra)
        lines += ["Requires-Dist: {}; extra == '{}'".format(_requirement(requirement), extra) for requirement in requirements]
    return "\n".join(lines) + "\n"

def _py_wheel_impl(ctx):
    attr = ctx.attr
    name = "-".join([normalize_distribution(attr.distribution), attr.version, attr.python_tag, attr.abi, attr.platform])
    wheel = ctx.actions.declare_file(name + ".whl")
    metadata = ctx.actions.declare_file(ctx.label.name + ".metadata.txt")
    ctx.actions.write(metadata, _metadata(ctx))
    entry_points = ctx.actions.declare_file(ctx.label.name + ".entry_points.txt")
    ctx.actions.write(entry_points, _entry_points(attr.entry_points))

    args = ctx.actions.args()
    args.add(ctx.file._wheelmaker)
    args.add("--out", wheel)
    args.add("--metadata", metadata)
    args.add("--entry-points", entry_points)
    args.add("--description", ctx.file.description_file)
    args.add_all(attr.strip_path_prefixes, before_each = "--strip-prefix")
    for target, path in attr.extra_distinfo_files.items():
        args.add_all("--distinfo-file", [target[DefaultInfo].files.to_list()[0], path])
    for file in ctx.files.deps:
        args.add_all("--file", [file, file.short_path])
    ctx.actions.run(
        executable = ctx.toolchains["//python:toolchain_type"].py3_runtime.interpreter_path,
        arguments = [args],
        inputs = ctx.files.deps + ctx.files.extra_distinfo_files +
                 [metadata, entry_points, ctx.file.description_file, ctx.file._wheelmaker],
        outputs = [wheel],
        mnemonic = "PyWheel",
        progress_message = "Building wheel %{label}",
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles([wheel]))]

py_wheel = rule(
    implementation = _py_wheel_impl,
    attrs = {
        "abi": attr.string(default = "none"),
        "author": attr.string(),
        "author_email": attr.string(),
        "classifiers": attr.string_list(),
        "deps": attr.label_list(),
        "description_content_type": attr.string(),
        "description_file": attr.label(allow_single_file = True),
        "distribution": attr.string(mandatory = True),
        "entry_points": attr.string_list_dict(),
        "extra_distinfo_files": attr.label_keyed_string_dict(allow_files = True),
        "extra_requires": attr.string_list_dict(),
        "homepage": attr.string(),
        "license": attr.string(),
        "platform": attr.string(default = "any"),
        "project_urls": attr.string_dict(),
        "python_requires": attr.string(),
        "python_tag": attr.string(default = "py3"),
        "requires": attr.string_list(),
        "strip_path_prefixes": attr.string_list(),
        "summary": attr.string(),
        "version": attr.string(mandatory = True),
        "_wheelmaker": attr.label(
            default = "//python:wheelmaker.py",
            allow_single_file = True,
        ),
    },
    toolchains = ["//python:toolchain_type"],
)
