# SPDX-License-Identifier: Apache-2.0
"""Run Python scripts in actions and tests, with the interpreter of the configured Python version."""

TOOLCHAIN_TYPE = "@rules_python//python:toolchain_type"

def python_runtime(ctx):
    """The Python of this configuration: a struct of path and files."""
    runtime = ctx.toolchains[TOOLCHAIN_TYPE].py3_runtime
    if runtime.interpreter:
        return struct(path = runtime.interpreter.path, short_path = runtime.interpreter.short_path, files = depset([runtime.interpreter], transitive = [runtime.files]))
    return struct(path = runtime.interpreter_path, short_path = runtime.interpreter_path, files = depset())
