# SPDX-License-Identifier: Apache-2.0
"""`apply`: what it replaces, by what a module computes; what it leaves; and `undo`."""

import copy
import functools
import pickle
import types
import warnings
import weakref

import pytest
import torch
from support.tiny_models import MODELS, make, tokens
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

import tiercel
import tiercel.integrations.transformers as door
from tiercel.integrations.transformers.linear import linear_forward

pytestmark = pytest.mark.torch

# op -> modules of two layers
EXPECTED = {
    "Llama": {"rms_norm": 5, "gated activation": 2, "rotary_embedding": 2},
    "Qwen3": {"rms_norm": 9, "gated activation": 2, "rotary_embedding": 2},
    "Qwen3Moe": {"rms_norm": 9, "rotary_embedding": 2, "topk_softmax": 2, "fused_moe": 2},
    "Mistral": {"rms_norm": 5, "gated activation": 2, "rotary_embedding": 2},
    "Gemma2": {"rms_norm": 9, "gated activation": 2, "rotary_embedding": 2},
    "Gemma3": {"rms_norm": 13, "gated activation": 2, "rotary_embedding": 2},
    "GptOss": {"rms_norm": 5, "rotary_embedding": 2, "topk_softmax": 2},
    "Phi3": {"rms_norm": 5, "gated activation": 2, "rotary_embedding": 2},
    "DeepseekV3": {
        "rms_norm": 9,
        "gated activation": 2,
        "rotary_embedding": 2,
        "topk_softmax": 1,
        "fused_moe": 1,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_replaced_and_undone(name):
    model, other = make(name), make(name)
    with torch.no_grad():
        before = model(tokens()).logits
    report = door.apply(model)
    found = {op: len(names) for op, names in report.replaced.items()}
    linear = sum(type(module) is nn.Linear for module in other.modules()) - 1  # the output layer
    due = {**EXPECTED[name], "attention": 2, "linear_cross_entropy": 1, "linear_act": linear}
    # Gemma's subclass scales rows.
    plain = sum(type(module) is nn.Embedding for module in other.modules())
    due |= {"embedding": plain} if plain else {}
    due |= {} if name in ("Gemma2", "Gemma3", "GptOss", "Phi3") else {"decoder layer": 2}
    assert found == due and linear > 0
    assert set(report.kept.values()) == ({"experts with biases"} if name == "GptOss" else set())
    for op, count in found.items():
        assert f"{op}: {count} modules" in str(report)
    assert not any("forward" in vars(module) for module in other.modules())
    assert other.config._attn_implementation == "eager"
    with torch.no_grad():
        after = model(tokens()).logits
        assert not torch.equal(after, before)  # ours round less often
        assert door.apply(model).replaced == {}
        report.undo()
        report.undo()
        assert not any("forward" in vars(module) for module in model.modules())
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_looks_at_position_ids_that_are_not_given(fails, monkeypatch):
    """The look, which waits for the GPU, ends with a call of `is_tracing`."""
    model = make("Llama")
    door.apply(model)
    looks = []
    look = masking_utils.is_tracing
    monkeypatch.setattr(masking_utils, "is_tracing", lambda x: looks.append(1) or look(x))
    ids = tokens()
    at = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        if fails:
            with pytest.raises(IndexError):
                model(ids + 1000, use_cache=False)
        else:
            found = model(ids, use_cache=False).logits
            assert not looks
            assert torch.equal(model(ids, position_ids=at, use_cache=False).logits, found)
        looks.clear()
        other = make("Llama", attention="sdpa")
        other(ids, use_cache=False)
        assert looks


def test_a_copy_of_the_model_has_weights_of_its_own():
    model = make("Llama")
    door.apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        right = model(tokens()).logits
        for weight in model.parameters():
            weight.zero_()
        assert torch.equal(twin(tokens()).logits, right)


def norm(formula, eps=1e-5, **more):
    class StrangeRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(16)), eps
            for name, value in more.items():
                setattr(self, name, value)

        def forward(self, x):
            return formula(self, x)

    return StrangeRMSNorm()


def normal(x, eps=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


STRANGE = [
    (norm(lambda m, x: normal(x) * m.weight), None),
    (norm(lambda m, x: normal(x) * (1 + m.weight)), None),
    (norm(lambda m, x: normal(x) * (2 + m.weight)), "something else"),
    (norm(lambda m, x: normal(x, 1e-6) * m.weight), "something else"),
    (norm(lambda m, x: normal(x - x.mean(-1, keepdim=True)) * m.weight), "something else"),
    (
        norm(lambda m, x: normal(x) * m.weight + m.bias, bias=nn.Parameter(torch.ones(16))),
        "one weight",
    ),
    (norm(lambda m, x: normal(x).missing), "not that of a norm"),
    (nn.RMSNorm(16, eps=1e-5), None),
]


@pytest.mark.parametrize(("module", "why"), STRANGE)
def test_norms_are_tried(module, why):
    x = torch.randn(4, 16)
    before = None if why and "not that" in why else module(x)
    report = door.apply(nn.Sequential(module))
    if why is None:
        assert report.replaced["rms_norm"] == ["0"]
    else:
        assert why in report.kept["0"] and "rms_norm" not in report.replaced
    if before is not None:
        torch.testing.assert_close(module(x), before)


def test_weights_of_another_dtype_keep_the_modules_own_result():
    model = make("Llama").model.norm
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    model.weight.data = model.weight.data.float()
    before = model(x)
    report = door.apply(nn.Sequential(model))
    assert report.replaced["rms_norm"]
    assert before.dtype == torch.float32 and torch.equal(model(x), before)


class GatedMLP(nn.Module):
    def __init__(self, formula, act=nn.functional.silu, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias), nn.Linear(16, 24, bias)
        self.down_proj, self.act_fn, self.formula = nn.Linear(24, 16, bias), act, formula

    def forward(self, x):
        return self.formula(self, x)


def usual(m, x):
    return m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (GatedMLP(usual), None),
        (GatedMLP(usual, nn.functional.relu), None),
        (GatedMLP(usual, nn.functional.gelu), None),
        (GatedMLP(usual, lambda x: nn.functional.gelu(x, approximate="tanh")), None),
        (GatedMLP(usual, torch.tanh), "activation"),
        (GatedMLP(usual, lambda x: nn.functional.silu(1.702 * x)), "activation"),
        (GatedMLP(lambda m, x: m.down_proj(m.act_fn(m.up_proj(x)) * m.gate_proj(x))), "something"),
        (GatedMLP(lambda m, x: usual(m, x) + x), "something"),
    ],
)
def test_gated_mlps_are_tried(module, why):
    x = torch.randn(4, 16)
    before = module(x)
    report = door.apply(nn.Sequential(module))
    assert ("gated activation" in report.replaced) == (why is None)
    assert why is None or why in report.kept["0"]
    torch.testing.assert_close(module(x), before)


@pytest.mark.parametrize("training", [False, True])
def test_a_gated_mlp_that_drops_results_in_training_still_does(training):
    """Whichever mode `apply` finds it in."""
    module = GatedMLP(lambda m, x: nn.functional.dropout(usual(m, x), 0.5, m.training))
    module.train(training)
    state = torch.get_rng_state()
    report = door.apply(nn.Sequential(module))
    assert torch.equal(torch.get_rng_state(), state)
    assert report.replaced["gated activation"] == ["0"]
    x = torch.randn(64, 16)
    module.train()
    assert 0.3 < (module(x) == 0).float().mean() < 0.7
    module.eval()
    torch.testing.assert_close(module(x), usual(module, x))


class TestActivationsOfTraining:
    """The result of a gated MLP's activation is not kept for the backward."""

    @pytest.fixture
    def made(self, monkeypatch):
        """Weak references to the activations that forwards make."""
        made, op = [], tiercel.silu_and_mul

        def noted(gate, up):
            out = op(gate, up)
            made.append(weakref.ref(out))
            return out

        monkeypatch.setattr(tiercel, "silu_and_mul", noted)
        return made

    @staticmethod
    def gradients(mlp, x, function=None):
        x = x.clone().requires_grad_()
        y = (function or mlp)(x)
        wanted = (x, *(p for p in mlp.parameters() if p.requires_grad))
        return torch.autograd.grad(y.square().sum(), wanted, create_graph=True)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (16,)])
    def test_it_is_made_again(self, made, shape, bias):
        mlp, x = GatedMLP(usual, bias=bias), torch.randn(shape)
        right = self.gradients(mlp, x)
        door.apply(mlp)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = mlp(x)
        parameters = {p.data_ptr() for p in mlp.parameters()}
        sizes = [t.numel() for t in kept if t.data_ptr() not in parameters]
        assert sizes == [x.numel(), *[x.numel() // 16 * 24] * 2]
        assert [make() for make in made] == [None]
        y.sum().backward()
        assert len(made) == 1  # by the kernel of its gradients
        found = self.gradients(mlp, x)
        torch.testing.assert_close(found, right)
        second, due = (
            torch.autograd.grad(sum(g.square().sum() for g in gradients), mlp.down_proj.weight)
            for gradients in (found, right)
        )
        torch.testing.assert_close(second, due)

    @pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj", "all"])
    def test_frozen_layers(self, frozen):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        layers = ("gate_proj", "up_proj", "down_proj") if frozen == "all" else (frozen,)
        for name in layers:
            getattr(mlp, name).requires_grad_(False)
        right = self.gradients(mlp, x)
        (alone,) = (
            torch.autograd.grad(mlp(x).sum(), mlp.up_proj.bias, allow_unused=True)
            if ("up_proj" not in layers)
            else (None,)
        )
        door.apply(mlp)
        torch.testing.assert_close(self.gradients(mlp, x), right)
        if alone is not None:
            (found,) = torch.autograd.grad(mlp(x).sum(), mlp.up_proj.bias)
            torch.testing.assert_close(found, alone)

    def test_one_matrix_of_gate_and_up(self):
        model = make("Phi3").float()
        mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, model.config.hidden_size)
        right = self.gradients(mlp, x)
        door.apply(model)
        torch.testing.assert_close(self.gradients(mlp, x), right)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(self, made, reentrant):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        right = self.gradients(mlp, x)
        door.apply(mlp)
        function = functools.partial(checkpoint, mlp, use_reentrant=reentrant)
        x = x.clone().requires_grad_()
        function(x).square().sum().backward()
        assert len(made) == 2  # the forward twice
        torch.testing.assert_close((x.grad, *(p.grad for p in mlp.parameters())), right)

    def test_functorch(self):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        door.apply(mlp)
        found = torch.func.grad(lambda x: mlp(x).square().sum())(x)
        torch.testing.assert_close(found, self.gradients(mlp, x)[0])

    def test_forward_mode(self):
        mlp, x, direction = GatedMLP(usual), torch.randn(3, 16), torch.randn(3, 16)

        def slope():
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(mlp(forward_ad.make_dual(x, direction))).tangent

        right = slope()
        door.apply(mlp)
        torch.testing.assert_close(slope(), right)

    def test_changes_in_place_are_errors(self):
        mlp, x = GatedMLP(usual), torch.randn(3, 16, requires_grad=True)
        door.apply(mlp)
        y = mlp(x)
        with torch.no_grad():
            mlp.down_proj.weight.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()

    def test_layers_of_another_kind_are_called(self, made):
        class Doubles(nn.Linear):
            def forward(self, x):
                return super().forward(2 * x)

        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        mlp.down_proj = Doubles(24, 16)
        right = self.gradients(mlp, x)
        door.apply(mlp)
        torch.testing.assert_close(self.gradients(mlp, x), right)

    def test_hooks_of_a_layer_run(self):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        mlp.gate_proj.register_forward_hook(lambda module, given, out: 2 * out)
        right = self.gradients(mlp, x)
        door.apply(mlp)
        torch.testing.assert_close(self.gradients(mlp, x), right)

    def test_hooks_of_all_modules_run(self):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        door.apply(mlp)
        seen = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, given, out: seen.append(module)
        )
        with handle:
            mlp(x)
        assert all(layer in seen for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def test_wrapped_forwards_run(self):
        """Accelerate wraps forwards so, after `apply`, with the names of what is wrapped."""
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        mlp.gate_proj.forward = types.MethodType(linear_forward, mlp.gate_proj)
        door.apply(mlp)
        own = mlp.gate_proj.forward
        mlp.gate_proj.forward = functools.update_wrapper(lambda x: 0 * own(x), own)
        torch.testing.assert_close(mlp(x), mlp.down_proj.bias.expand(3, -1))

    def test_under_autocast(self):
        mlp, x = GatedMLP(usual), torch.randn(3, 16)
        with torch.autocast("cpu", torch.bfloat16):
            right = self.gradients(mlp, x)
        door.apply(mlp)
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
            assert y.dtype == torch.bfloat16
            found = self.gradients(mlp, x)
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


def test_applied_models_are_pickled():
    model = make("Llama")
    door.apply(model)
    twin = pickle.loads(pickle.dumps(model.model.layers[0].mlp))
    x = torch.randn(2, 3, model.config.hidden_size, dtype=model.dtype)
    right = model.model.layers[0].mlp(x)  # rounds less often
    torch.testing.assert_close(twin(x), right, atol=2e-2, rtol=2e-2)


def test_a_pickled_model_is_applied_again():
    model = make("Llama")
    due = door.apply(model).replaced
    with torch.no_grad():
        right = model(tokens()).logits
        twin = pickle.loads(pickle.dumps(model))
        report = door.apply(twin)
        assert report.replaced == {op: names for op, names in due.items() if op != "attention"}
        assert not report.kept
        assert torch.equal(twin(tokens()).logits, right)
    report.undo()
    assert not any("forward" in vars(module) for module in twin.modules())


def test_a_model_that_has_our_attention_already(monkeypatch):
    """apply knows of position ids that are not given for such a model, too."""
    model = make("Llama", attention="tiercel")
    report = door.apply(model)
    assert "attention" not in report.replaced and not report.kept
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "attn_implementation", tiercel.FallbackWarning)
        torch.compile(model, backend="eager", fullgraph=True)(tokens(), use_cache=False)
    report.undo()
    assert model.config._attn_implementation == "tiercel"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def renames(function):
    """Like the decorator that transformers has on forwards for an argument's old name."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if "old_mask" in kwargs:
            kwargs["attention_mask"] = kwargs.pop("old_mask")
        return function(*args, **kwargs)

    return wrapped


def doubles(function):
    """A decorator that does not hold the function itself."""
    functions = [function]
    return functools.wraps(function)(lambda *args, **kwargs: functions[0](*args, **kwargs))


@pytest.mark.parametrize(("decorator", "replaced"), [(renames, True), (doubles, False)])
def test_rotary_embedding_behind_a_decorator(decorator, replaced, monkeypatch):
    model = make("Llama", torch.float32)
    attention = model.model.layers[0].self_attn
    kind = type(attention)
    monkeypatch.setattr(kind, "forward", decorator(kind.forward))
    x = torch.randn(2, 5, model.config.hidden_size)
    at = model.model.rotary_emb(x, torch.arange(5)[None])
    mask = torch.full((5, 5), -1e9).triu(1)
    name = "old_mask" if replaced else "attention_mask"
    right, _ = attention(x, position_embeddings=at, **{name: mask})
    report = door.apply(model)
    attention.config._attn_implementation = "eager"
    assert len(report.replaced.get("rotary_embedding", ())) == (2 if replaced else 0)
    if not replaced:
        assert "decorated in another way" in report.kept["model.layers.0.self_attn"]
    calls, op = [], tiercel.rotary_embedding
    monkeypatch.setattr(tiercel, "rotary_embedding", lambda *a, **k: calls.append(1) or op(*a, **k))
    found, _ = attention(x, position_embeddings=at, **{name: mask})
    assert len(calls) == replaced
    torch.testing.assert_close(found, right)


class LinearOfItsOwn(nn.Linear):
    pass


def with_forward(module):
    own = module.forward
    module.forward = lambda x: own(x)
    return module


def with_buffer(module):
    weight = module.weight.detach()
    del module.weight
    module.register_buffer("weight", weight)
    return module


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Linear(16, 24), None),
        (LinearOfItsOwn(16, 24), ""),
        (with_forward(nn.Linear(16, 24)), "its forward is replaced already"),
        (with_buffer(nn.Linear(16, 24)), "its weight is no plain parameter"),
    ],
)
def test_linear_layers(module, why):
    report = door.apply(nn.Sequential(module))
    assert ("linear_act" in report.replaced) == (why is None)
    assert why in report.kept["0"] if why else "0" not in report.kept
    report.undo()
    x = torch.randn(3, 16)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))


def test_a_forward_that_is_replaced_already_stays():
    model = make("Llama")
    mine = lambda x: x  # noqa: E731
    model.model.norm.forward = mine
    report = door.apply(model)
    assert "replaced already" in report.kept["model.norm"]
    report.undo()
    assert model.model.norm.forward is mine
