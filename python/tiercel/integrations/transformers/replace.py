# SPDX-License-Identifier: Apache-2.0
"""Replaces parts of a loaded Hugging Face model by Tiercel's ops, and back.

A module's class or attribute names only suggest what it computes: its own forward is run on small
tensors and compared before anything is replaced. Forwards are replaced per instance, so that other
models of the same classes stay as they are.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tiercel
from tiercel.core import invariance
from tiercel.integrations.transformers.attention import ONE_SEQUENCE
from tiercel.integrations.transformers.embedding import embedding_forward, why_not_embedding
from tiercel.integrations.transformers.experts import is_experts, why_not
from tiercel.integrations.transformers.forwards import is_replaced
from tiercel.integrations.transformers.layers import EPSILON, layer_forward
from tiercel.integrations.transformers.linear import linear_forward, why_not_linear
from tiercel.integrations.transformers.loss import use_linear_loss
from tiercel.integrations.transformers.masks import know_one_sequence_each
from tiercel.integrations.transformers.mlp import Activation, trained
from tiercel.integrations.transformers.rotary import pairs_share_angles, rotary_forward
from tiercel.integrations.transformers.routers import router_forward

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Forward = Callable[..., Any]


@dataclasses.dataclass
class Report:
    """The result of `apply`: `replaced` lists module names by op, `kept` gives reasons by name."""

    replaced: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    _undo: list[Callable[[], object]] = dataclasses.field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restores the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"{op}: {len(names)} modules" for op, names in self.replaced.items()]
        reasons = collections.Counter(self.kept.values())
        return "\n".join(lines + [f"kept: {n} modules: {why}" for why, n in reasons.items()])


def apply(model: nn.Module) -> Report:
    """Makes a loaded Hugging Face model use Tiercel's ops.

    Replaces attention (``attn_implementation="tiercel"``), experts
    (``experts_implementation="tiercel"``) and their routers, RMS norms, the activations of gated
    MLPs, rotary embeddings, linear layers for up to 64 tokens in 16 bits without gradients, and in
    training the loss of causal language models, each only if the module's results are the same up
    to rounding. Weights stay in place, and gradients flow. A training step with labels does not
    compute logits, and its output has none.

    Returns:
        A report of the replaced modules and of the others, with reasons. Its ``undo()`` restores
        the model.

    Example:
        >>> report = tiercel.integrations.transformers.apply(model)
        >>> print(report)
    """
    report = Report()
    turns = pairs_share_angles(model.modules())
    for name, module in model.named_modules():
        for op, find in _KINDS:
            found = find(module)
            if op == "rotary_embedding" and found is not None and not turns:
                found = "its rotary embedding gives the elements of a pair different angles"
            if found is None:
                continue
            if isinstance(found, str):
                report.kept[name] = f"{type(module).__name__}: {found}"
            else:
                module.forward = types.MethodType(found, module)
                report._undo.append(lambda module=module: vars(module).pop("forward", None))
                report.replaced.setdefault(op, []).append(name)
            break
    _use_attention(model, report)
    _use_experts(model, report)
    _use_loss(model, report)
    _use_plain(model, report, "linear_act", why_not_linear, linear_forward)
    _use_plain(model, report, "embedding", why_not_embedding, embedding_forward)
    return report


def _use_plain(
    model: nn.Module,
    report: Report,
    op: str,
    why_not: Callable[[nn.Module], str | None],
    found: Forward,
) -> None:
    """Linear layers and embeddings. The output layer, whose forward the loss has replaced, calls
    ours there."""
    for name, module in model.named_modules():
        why = why_not(module)
        if why is None:
            module.forward = types.MethodType(found, module)
            report._undo.append(lambda module=module: vars(module).pop("forward", None))
            report.replaced.setdefault(op, []).append(name)
        elif why:
            report.kept[name] = f"{type(module).__name__}: {why}"


def _use_loss(model: nn.Module, report: Report) -> None:
    for name, submodel in model.named_modules():
        if not isinstance(submodel, PreTrainedModel) or submodel.get_output_embeddings() is None:
            continue
        done = use_linear_loss(submodel)
        if isinstance(done, str):
            at = f"{name}.loss_function".removeprefix(".")
            report.kept[at] = f"{type(submodel).__name__}: {done}"
        else:
            report._undo.append(done)
            report.replaced.setdefault("linear_cross_entropy", []).append(name)


def _use_attention(model: nn.Module, report: Report) -> None:
    if not isinstance(model, PreTrainedModel):
        report.kept[""] = "attention: the model is no PreTrainedModel"
        return
    configs = list({id(m.config): m.config for m in _submodels(model)}.values())
    before = [(config, config._attn_implementation) for config in configs]
    is_new = any(was != "tiercel" for _, was in before)

    def undo() -> None:
        for config, was in before:
            config._attn_implementation_internal = was

    if is_new:
        model.set_attn_implementation("tiercel")
        report._undo.append(undo)
    for name, submodel in model.named_modules():
        if not isinstance(submodel, PreTrainedModel):
            continue
        if submodel.config._attn_implementation != "tiercel":
            report.kept[name] = f"{type(submodel).__name__}: its attention cannot be set"
            continue
        if is_new:
            report.replaced.setdefault("attention", []).append(name)
        _use_one_sequence(submodel, report)


def _use_one_sequence(model: PreTrainedModel, report: Report) -> None:
    """Also of a model that has our attention already, unless it has these hooks, too."""
    if not _takes_position_ids(model) or sum(map(_takes_position_ids, _submodels(model))) != 1:
        return
    if _say_one_sequence not in model._forward_pre_hooks.values():
        say = model.register_forward_pre_hook(_say_one_sequence, with_kwargs=True)
        forget = model.register_forward_hook(_forget_one_sequence, always_call=True)
        report._undo += [say.remove, forget.remove]


def _use_experts(model: nn.Module, report: Report) -> None:
    """Sets the experts' implementation where that of one module at least changes."""
    if not isinstance(model, PreTrainedModel):
        return
    reasons = {
        name: "its forward is replaced already" if is_replaced(m) else why_not(m)
        for name, m in model.named_modules()
        if is_experts(m)
    }
    ours = [name for name, why in reasons.items() if why is None]
    report.kept.update({name: why for name, why in reasons.items() if why is not None})
    configs = list({id(m.config): m.config for m in _submodels(model)}.values())
    before = [(config, config._experts_implementation) for config in configs]
    if not ours or all(was == "tiercel" for _, was in before):
        return
    model.set_experts_implementation("tiercel")

    def undo() -> None:
        for config, was in before:
            config._experts_implementation_internal = was

    report._undo.append(undo)
    report.replaced["fused_moe"] = ours


def _submodels(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (m for m in model.modules() if isinstance(m, PreTrainedModel))


def _takes_position_ids(model: PreTrainedModel) -> bool:
    parameters = inspect.signature(type(model).forward).parameters
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return others and "position_ids" in parameters


def _say_one_sequence(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tells masks and attention that no position ids pack several sequences: a graph cannot see
    that, and elsewhere the host would wait to see it."""
    one = kwargs.get("position_ids") is None and len(args) < 2
    if not torch.compiler.is_compiling():
        know_one_sequence_each(one)
    return (args, {**kwargs, ONE_SEQUENCE: True}) if one else None


def _forget_one_sequence(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        know_one_sequence_each(False)


def _compiler_joins() -> bool:
    """True in a graph without gradients: its compiler joins norms and activations with the
    additions and rotary embeddings around them, which costs fewer launches and less memory traffic
    than an op for each. Its kernels are not batch-invariant, so in that mode ours stay."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled() and not invariance.watched


# RMS norms.


def _rms_norm(module: nn.Module) -> Forward | str | None:
    """The forward of a norm over the last dimension, with a weight, 1 + weight or none."""
    epsilons = [
        value
        for name in ("variance_epsilon", "eps", "epsilon")
        if isinstance(value := getattr(module, name, None), float)
    ]
    if "Norm" not in type(module).__name__ and not epsilons:
        return None
    if not epsilons or isinstance(
        module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
    ):
        return None
    if why := _not_alone(module):
        return why
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if set(parameters) - {"weight"} or (weight is not None and weight.ndim != 1):
        return "it has other parameters than one weight"
    if any(True for _ in module.buffers()) or any(True for _ in module.children()):
        return "it has other parts than one weight"
    eps, columns = epsilons[0], 24 if weight is None else weight.numel()
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(3, 2, columns, generator=generator)
        * torch.tensor([3.0, 1e-3, 1.0])[:, None, None]
    )
    given = None if weight is None else torch.rand(columns, generator=generator) + 0.5
    try:
        with torch.no_grad():
            state = {} if given is None else {"weight": given}
            expected = torch.func.functional_call(module, state, (x,))
    except Exception as error:  # whatever a stranger's module raises
        return f"its forward is not that of a norm ({type(error).__name__})"
    for offset in (0.0,) if given is None else (0.0, 1.0):
        scaled = None if given is None else given + offset
        with tiercel.use_backend("ref"):
            ours = tiercel.rms_norm(x, scaled, eps=eps)
        if _equal(ours, expected):
            return _norm_forward(eps, offset)
    return "it computes something else than an RMS norm"


def _norm_forward(eps: float, offset: float) -> Forward:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if _compiler_joins():
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        weight = getattr(self, "weight", None)
        if weight is not None and offset:
            weight = weight.float() + offset
        elif weight is not None and weight.dtype != x.dtype:
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        if x.dtype not in _FLOATS:
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        return tiercel.rms_norm(x, weight, eps=eps)  # type: ignore[no-any-return]

    if not offset:
        setattr(forward, EPSILON, eps)
    return forward


# Gated MLPs.

_ACTIVATIONS: tuple[tuple[str, Forward, dict[str, Any]], ...] = (
    ("silu_and_mul", nn.functional.silu, {}),
    ("gelu_and_mul", nn.functional.gelu, {"approximate": "none"}),
    (
        "gelu_and_mul",
        lambda x: nn.functional.gelu(x, approximate="tanh"),
        {"approximate": "tanh"},
    ),
    ("relu_and_mul", nn.functional.relu, {}),
)
_APART = ("gate_proj", "up_proj", "down_proj")
_JOINED = ("gate_up_proj", "down_proj")


def _gated_mlp(module: nn.Module) -> Forward | str | None:
    """The forward of ``down(act(gate(x)) * up(x))``, the two matrices apart or in one."""
    children = dict(module.named_children())
    names = next((n for n in (_APART, _JOINED) if set(n) <= set(children)), None)
    if names is None:
        return None
    if why := _not_alone(module):
        return why
    others = set(children) - set(names)
    act = next((a for n in ("act_fn", "activation_fn") if (a := getattr(module, n, None))), None)
    if act is None or any(children[name] is not act for name in others):
        return "it has other parts than projections and an activation"
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    with torch.no_grad():
        known = [
            (name, more) for name, plain, more in _ACTIVATIONS if _equal(_try(act, x), plain(x))
        ]
    if not known:
        return "its activation is not SiLU, GELU or ReLU"
    name, more = known[0]
    if not _is_gated(module, names, act, training=False):
        return "it computes something else than a gated MLP"
    # Some drop a part of their results in training.
    trains = _is_gated(module, names, act, training=True)
    return _mlp_forward(Activation(name, more), joined=names is _JOINED, trains=trains)


def _is_gated(module: nn.Module, names: tuple[str, ...], act: Forward, *, training: bool) -> bool:
    """Runs the forward on a copy with small matrices, in training mode or not."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(8, 8, generator=generator) for name in names}
    if names is _JOINED:
        weights["gate_up_proj"] = torch.randn(16, 8, generator=generator)
    small = copy.copy(module)
    small.training, small._modules = training, dict(module._modules)
    for name, weight in weights.items():
        linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        linear.weight = nn.Parameter(weight)
        small._modules[name] = linear
    x = torch.randn(2, 3, 8, generator=generator)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        if names is _JOINED:
            gate, up = (x @ weights["gate_up_proj"].T).chunk(2, -1)
        else:
            gate, up = x @ weights["gate_proj"].T, x @ weights["up_proj"].T
        expected = (act(gate) * up) @ weights["down_proj"].T
        return _equal(_try(lambda x: type(module).forward(small, x), x), expected)


def _mlp_forward(activation: Activation, joined: bool, trains: bool) -> Forward:
    """`trains`: in training mode, too."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if _compiler_joins() or (self.training and not trains):
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        names = _JOINED if joined else _APART
        *before, down = (getattr(self, name) for name in names)
        result = trained(x, (*before, down), activation)
        if result is not None:
            return result
        made = [layer(x) for layer in before]
        if any(t.dtype not in _FLOATS or t.dtype != made[0].dtype for t in made):
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        return down(activation(made[0], None if joined else made[1]))  # type: ignore[no-any-return]

    return forward


def _not_alone(module: nn.Module) -> str | None:
    if is_replaced(module):
        return "its forward is replaced already"
    parameters = inspect.signature(type(module).forward).parameters.values()
    if sum(p.default is p.empty for p in parameters) != 2 or len(parameters) != 2:
        return "its forward takes other arguments than one tensor"
    return None


def _try(function: Forward, x: Tensor) -> Any:
    try:
        return function(x)
    except Exception:  # whatever a stranger's module raises
        return None


def _equal(found: Any, expected: Any) -> bool:
    return (
        isinstance(found, Tensor)
        and isinstance(expected, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-6)
    )


_KINDS: tuple[tuple[str, Callable[[nn.Module], Forward | str | None]], ...] = (
    ("rms_norm", _rms_norm),
    ("gated activation", _gated_mlp),
    ("rotary_embedding", rotary_forward),
    ("topk_softmax", router_forward),
    ("decoder layer", layer_forward),
)
