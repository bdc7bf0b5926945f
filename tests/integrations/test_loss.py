# SPDX-License-Identifier: Apache-2.0
"""The loss of causal language models: the model's own value and gradients, and no logits."""

import copy
import threading

import pytest
import torch
import transformers
from support.tiny_models import MODELS, config, make, tokens
from torch import nn

import tiercel.integrations.transformers as door
from tiercel.integrations.transformers.loss import use_linear_loss

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def labelled():
    labels = tokens().clone()
    labels[0, :4] = -100
    return {"input_ids": tokens(), "labels": labels, "use_cache": False}


def gradients(model, **options):
    outputs = model(**labelled(), **options)
    grads = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
    return outputs.loss.detach(), [g for g in grads if g is not None]


@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradients_are_the_models(name):
    model = make(name, torch.float32).train()
    for options in ({}, {"num_items_in_batch": torch.tensor(11)}, {"num_items_in_batch": 11}):
        due, due_grads = gradients(model, **options)
        undo = use_linear_loss(model)
        loss, grads = gradients(model, **options)
        torch.testing.assert_close(loss, due)
        torch.testing.assert_close(grads, due_grads, rtol=1e-4, atol=1e-5)
        undo()
        assert not any("forward" in vars(m) for m in model.modules())
        assert torch.equal(gradients(model, **options)[0], due)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_threads_train_and_evaluate_one_model(name, tied):
    """Within a training step another thread runs the model: each gets its own results."""
    model = make(name, torch.bfloat16, tie_word_embeddings=tied).train()
    with torch.no_grad():
        logits = model(tokens(), use_cache=False).logits
    due = gradients(model)
    door.apply(model)
    alone = gradients(model)
    found = {}

    def others():
        with torch.no_grad():
            found["logits"] = model(tokens(), use_cache=False).logits
        found["step"] = gradients(model)

    def interrupt(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=others)
            thread.start()
            thread.join()

    model.model.layers[0].register_forward_hook(interrupt)
    for loss, grads in (gradients(model), found["step"]):
        assert torch.equal(loss, alone[0])
        torch.testing.assert_close(grads, alone[1], rtol=0, atol=0)
        torch.testing.assert_close(loss, due[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found["logits"], logits, rtol=5e-2, atol=0.2)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_no_logits_in_training_alone(name):
    model = make(name)
    due = model(**labelled())
    report = door.apply(model)
    assert report.replaced["linear_cross_entropy"] == [""]
    assert "linear_cross_entropy: 1 modules" in str(report)
    model.train()
    shapes = []
    model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    outputs = model(**labelled())
    assert "logits" not in outputs and outputs.logits is None
    assert shapes == [(2, 20, 64), ()]  # rows, then their loss
    as_tuple = model(**labelled(), return_dict=False)
    assert len(as_tuple) == 1 and torch.equal(as_tuple[0], outputs.loss)
    assert model(tokens()).logits.shape == (2, 20, 96)
    model.eval()
    found = model(**labelled())
    torch.testing.assert_close(found.logits, due.logits, rtol=0.1, atol=0.1)
    torch.testing.assert_close(found.loss, due.loss, rtol=0.02, atol=0)
    report.undo()
    assert not hasattr(model, "_loss_function")


def test_shifted_labels_and_positional_arguments():
    model = make("Llama", torch.float32).train()
    given = labelled()
    shifted = nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    due = model(**given).loss
    use_linear_loss(model)
    torch.testing.assert_close(model(**given, shift_labels=shifted).loss, due)
    found = model(given["input_ids"], None, None, None, None, given["labels"])
    torch.testing.assert_close(found.loss, due)


def test_under_autocast():
    model = make("Llama", torch.float32).train()
    with torch.autocast("cpu", torch.bfloat16):
        due, _ = gradients(model)
        use_linear_loss(model)
        loss, grads = gradients(model)
    torch.testing.assert_close(loss, due, rtol=2e-3, atol=0)
    assert {g.dtype for g in grads} == {torch.float32}


def test_a_copy_has_a_loss_of_its_own():
    model = make("Llama", torch.float32).train()
    use_linear_loss(model)
    twin = copy.deepcopy(model)
    due = model(**labelled()).loss
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(twin(**labelled()).loss, due)
    assert "logits" not in twin(**labelled())


def test_a_router_adds_its_loss():
    model = make("Qwen3Moe", torch.float32, output_router_logits=True).train()
    due, due_grads = gradients(model)
    undo = use_linear_loss(model)
    loss, grads = gradients(model)
    torch.testing.assert_close(loss, due)
    torch.testing.assert_close(grads, due_grads, rtol=1e-4, atol=1e-5)
    undo()


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_one_graph(name):
    torch._dynamo.reset()
    model = make(name, torch.float32).train()
    due = gradients(model)
    use_linear_loss(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs = compiled(**labelled())
    grads = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(outputs.loss.detach(), due[0])
    grads = [g for g in grads if g is not None]
    torch.testing.assert_close(grads, due[1], rtol=1e-4, atol=1e-5)
    assert getattr(model.config, "final_logit_softcapping", None) == (
        30.0 if name == "Gemma2" else None
    )


class Strange(transformers.LlamaForCausalLM):
    """Its logits are no linear function of rows."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state).sin()
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def strange():
    return Strange(config("Llama"))


def other_loss():
    model = make("Llama")
    model.loss_function = lambda *args, **kwargs: 0
    return model


def other_head():
    model = make("Llama")
    model.lm_head = nn.Sequential(model.lm_head)
    return model


def replaced():
    model = make("Llama")
    model.forward = lambda *args, **kwargs: None
    return model


@pytest.mark.parametrize(
    ("make_it", "why"),
    [
        (strange, "it computes something else of its logits"),
        (other_loss, "its loss is not that of a causal language model"),
        (other_head, "its output layer is Sequential, no Linear"),
        (replaced, "its forward is replaced already"),
    ],
)
def test_others_stay_as_they_are(make_it, why):
    model = make_it()
    before = dict(vars(model))
    report = door.apply(model)
    assert report.kept["loss_function"].endswith(why)
    assert "linear_cross_entropy" not in report.replaced
    assert vars(model).keys() == before.keys()
