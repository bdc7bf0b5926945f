# SPDX-License-Identifier: Apache-2.0
"""The kernel compile actions behind some targets, as data that a test reads."""

load("@python_versions//:versions.bzl", "DEFAULT_PYTHON_VERSION")
load("//tools/python:transitions.bzl", "ALLOWLIST", "one_python_transition")

_ActionsInfo = provider(
    doc = "Compile actions in the targets below, and links of shared libraries.",
    fields = {"actions": "depset of JSON objects, one an action"},
)

_MNEMONICS = [
    "CppCompile",
    "CppLink",
    "CudaCompile",
    "CuteCompile",
    "PyWheel",
    "RepairWheel",
]

def _below(rule):
    targets = []
    for name in dir(rule.attr):
        value = getattr(rule.attr, name)
        if type(value) == "dict":
            targets += value.keys() + value.values()
        else:
            targets += value if type(value) == "list" else [value]
    return [target[_ActionsInfo].actions for target in targets if type(target) == "Target" and _ActionsInfo in target]

def _actions_aspect_impl(target, ctx):
    actions = []
    for action in target.actions:
        if action.mnemonic not in _MNEMONICS:
            continue
        facts = {
            "label": str(target.label),
            "mnemonic": action.mnemonic,
            "outputs": [file.path for file in action.outputs.to_list()],
            "root": action.outputs.to_list()[0].root.path,
        }
        if action.mnemonic.startswith("C"):
            facts["argv"] = action.argv
        if action.mnemonic == "CudaCompile":
            facts["env"] = action.env
            facts["inputs"] = [file.path for file in action.inputs.to_list()]
        actions.append(json.encode(facts))
    return [_ActionsInfo(actions = depset(actions, transitive = _below(ctx.rule)))]

_actions_aspect = aspect(
    implementation = _actions_aspect_impl,
    attr_aspects = ["*"],
)

def _action_graph_impl(ctx):
    file = ctx.actions.declare_file(ctx.label.name + ".json")
    actions = depset(transitive = [target[_ActionsInfo].actions for target in ctx.attr.targets])
    ctx.actions.write(file, "[\n" + ",\n".join(actions.to_list()) + "\n]\n")
    return [DefaultInfo(files = depset([file]))]

action_graph = rule(
    doc = "A JSON list of the compile, link and wheel actions that the targets need; builds nothing.",
    implementation = _action_graph_impl,
    attrs = ALLOWLIST | {
        "python_version": attr.string(default = DEFAULT_PYTHON_VERSION),
        "targets": attr.label_list(
            mandatory = True,
            aspects = [_actions_aspect],
            cfg = one_python_transition,
        ),
    },
)
