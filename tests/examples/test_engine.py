# SPDX-License-Identifier: Apache-2.0
"""examples/engine: its tokens are those of transformers, however sequences share a step."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples" / "engine"))

from engine import Engine
from memory import GREEDY, Pages, Rows, Sampling
from model import Config, Model, random_weights
from scheduler import Scheduler, Sequence
from support.tiny_models import make

pytestmark = pytest.mark.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [5, 1, 40, 17, 33]


def prompts(vocabulary=96):
    numbers = random.Random(0)
    return [[numbers.randrange(3, vocabulary) for _ in range(length)] for length in PROMPTS]


def engine_of(model, **settings):
    config = Config.read(model.config.to_dict())
    given = {"pages": 24, "page_size": 16, "most_sequences": 4, "most_tokens": 24, "longest": 64}
    return Engine(Model(config, model.state_dict()), **given | settings)


def serve(engine, new=12, sampling=GREEDY):
    sequences = [engine.add(prompt, new, sampling=sampling) for prompt in prompts()]
    for _ in engine.run():
        pass
    return sequences


def serve_alone(prompt, new):
    engine = engine_of(make("Qwen3"))
    sequence = engine.add(prompt, new)
    for _ in engine.run():
        pass
    return sequence.new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe"])
def test_greedy_tokens_are_those_of_transformers(name, device):
    model, right = make(name, device=device), make(name, torch.float32, device=device).double()
    exact = 0
    for sequence in serve(engine_of(model)):
        assert len(sequence.new) == 12
        ids = torch.tensor([sequence.prompt + sequence.new], device=device)
        with torch.no_grad():
            logits = right(ids[:, :-1]).logits[0, len(sequence.prompt) - 1 :]
        chosen = logits.gather(1, ids[0, len(sequence.prompt) :, None])[:, 0]
        behind = (logits.amax(1) - chosen) / logits.std(1)
        exact += (behind == 0).sum().item()
        assert behind.max() < 0.05, "only bfloat16's rounding may choose another token"
    assert exact >= 0.9 * 12 * len(PROMPTS)


def test_a_step_s_size_does_not_matter():
    model = make("Qwen3")
    found = [
        [sequence.new for sequence in serve(engine_of(model, **settings))]
        for settings in (
            {"most_tokens": 200, "most_sequences": 5},
            {"most_sequences": 1},
            {"pages": 5},  # sequences take pages from each other, and start over
            {"page_size": 1, "pages": 300},
        )
    ]
    same = [a == b for other in found[1:] for a, b in zip(found[0], other, strict=True)]
    assert sum(same) >= len(same) - 2  # rounding differs with the number of rows


def test_draws_follow_seeds():
    model = make("Qwen3")
    one, same, other = (
        [s.new for s in serve(engine_of(model), sampling=Sampling(1.0, 20, 0.9, seed))]
        for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.gpu
def test_graphs_give_the_same_tokens():
    model = make("Qwen3", device="cuda")
    for sampling in (GREEDY, Sampling(1.0, 20, 0.9, 3)):
        plain = [s.new for s in serve(engine_of(model, graphs=False), sampling=sampling)]
        assert plain == [s.new for s in serve(engine_of(model), sampling=sampling)]


def test_an_end_token_ends_a_sequence_and_frees_its_pages():
    engine = engine_of(make("Qwen3"))
    first = serve(engine)[0]
    assert engine.pages.free == 24
    again = engine.add(first.prompt, 12, end=first.new[3])
    for _ in engine.run():
        pass
    assert again.new == first.new[: first.new.index(first.new[3]) + 1]
    assert engine.pages.free == 24 and not engine.scheduler.running


def scheduler_of(pages, page_size, most_sequences, most_tokens):
    pages = Pages(1, pages, page_size, 1, 8)
    rows = Rows(most_sequences, 16, page_size, torch.device("cpu"))
    return Scheduler(pages, rows, most_sequences, most_tokens), pages, rows


def run_step(scheduler):
    """(pieces, the sequences that draw a token); the token is read at once."""
    pieces = scheduler.next_step()
    drawn = [piece.sequence for piece in pieces if piece.gives_token]
    scheduler.started(pieces)
    scheduler.finished(drawn, [1] * len(drawn))
    return pieces


def test_decoding_goes_first_and_prompts_come_in_chunks():
    scheduler, *_ = scheduler_of(8, 16, most_sequences=3, most_tokens=20)
    scheduler.waiting += [Sequence([0] * length, 4) for length in (10, 30, 7)]
    counts = [[piece.count for piece in run_step(scheduler)] for _ in range(4)]
    assert counts == [[10, 10], [1, 19], [1, 1, 7], [1, 1, 1]]


def test_the_youngest_sequence_gives_its_pages():
    scheduler, pages, rows = scheduler_of(4, 4, most_sequences=2, most_tokens=16)
    old, young = Sequence([0] * 8, 8), Sequence([0] * 8, 8)
    scheduler.waiting += [old, young]
    run_step(scheduler)
    pieces = run_step(scheduler)
    assert [piece.sequence for piece in pieces] == [old]
    assert list(scheduler.waiting) == [young] and young.cached == 0 and not young.pages
    for _ in range(20):
        run_step(scheduler)
    assert old.done and young.done and pages.free == 4
    rows.send()
    assert rows.settings.active.sum() == 0


def test_a_sequence_that_gave_its_pages_waits_for_its_token():
    scheduler, *_ = scheduler_of(4, 4, most_sequences=2, most_tokens=16)
    old, young = Sequence([0] * 8, 8), Sequence([0] * 7, 8)
    scheduler.waiting += [old, young]
    scheduler.started(first := scheduler.next_step())
    scheduler.started(second := scheduler.next_step())  # both have a token that nobody read
    assert [piece.sequence for piece in second] == [old] and young.drawn == 1
    assert [piece.sequence for piece in first] == [old, young]
    scheduler._stop(old)
    assert not scheduler.next_step(), "the token of `young` is not known yet"
    scheduler.finished([old, young], [1, 2])
    (again,) = scheduler.next_step()
    assert (again.sequence, again.count, again.gives_token) == (young, 8, True)


def test_an_end_that_is_read_late():
    scheduler, pages, rows = scheduler_of(8, 4, most_sequences=2, most_tokens=16)
    sequence = Sequence([0] * 4, 8, end=7)
    scheduler.waiting.append(sequence)
    for _ in range(2):
        scheduler.started(scheduler.next_step())
    assert sequence.drawn == 2 and not sequence.new
    assert scheduler.finished([sequence], [7]) == [sequence]
    assert sequence.done and not scheduler.running and pages.free == 8
    assert not scheduler.finished([sequence], [3]) and sequence.new == [7]
    assert rows.take(GREEDY) == 0


def test_a_step_is_launched_before_the_last_one_s_tokens_are_read():
    engine = engine_of(make("Qwen3"))
    sequence = engine.add([5, 6, 7], 4)
    assert next(engine.run()) == [sequence]
    assert (len(sequence.new), sequence.drawn) == (1, 2)
    steps = [len(sequence.new) for _ in engine.run()]  # goes on where the other stopped
    assert steps == [2, 3, 4]
    assert sequence.new == serve_alone([5, 6, 7], 4)


def test_what_it_refuses():
    engine = engine_of(make("Qwen3"))
    for prompt, new, says in [([], 1, "a prompt"), ([1], 0, "one new"), ([1] * 60, 5, "65, more")]:
        with pytest.raises(ValueError, match=says):
            engine.add(prompt, new)
    with pytest.raises(ValueError, match="more than the cache of 2 pages"):
        engine_of(make("Qwen3"), pages=2)
    with pytest.raises(ValueError, match="`model_type` must be qwen3 or qwen3_moe, got 'llama'"):
        Config.read(make("Llama").config.to_dict())
    fields = make("Qwen3").config.to_dict()
    with pytest.raises(ValueError, match="only default rotary"):
        Config.read(fields | {"rope_parameters": {"rope_type": "yarn"}})


@pytest.mark.parametrize("experts", [0, 4])
def test_random_weights_are_complete(experts):
    config = Config(96, 64, 2, 4, 2, 16, 96, num_experts=experts, moe_intermediate_size=32)
    weights = random_weights(config, "cpu", torch.bfloat16)
    name = "Qwen3Moe" if experts else "Qwen3"
    assert {k: v.shape for k, v in weights.items()} == {
        k: v.shape for k, v in make(name).state_dict().items()
    }
