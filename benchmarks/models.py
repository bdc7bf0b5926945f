#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill and decoding of Hugging Face models with random weights, with and without Tiercel.

python benchmarks/models.py [MODEL ...] [--layers N] [--json FILE]

Each way of running a model is measured in the same process, one after the other: eager and compiled
with sdpa, then `tiercel.integrations.transformers.apply`, eager and compiled. Decoding reads a
static cache; compiled, it replays CUDA graphs. A record holds the median of single steps between
two events, the peak of allocated memory, and the seconds of the first call, compilation included.
"""

import argparse
import functools
import json
import statistics
import sys
import time

MODELS = {
    "Llama-3.2-1B": (
        "Llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "Qwen3-8B": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "tiny": (
        "Llama",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
        },
    ),
}
SPARE = 512  # places of a cache behind the context, for the steps that are timed


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["Llama-3.2-1B", "Qwen3-8B"], metavar="MODEL")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prefill", nargs="*", default=["1x128", "1x4096", "8x1024"])
    parser.add_argument(
        "--decode", nargs="*", default=["1x2048", "32x2048"], help="batch x context"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="append the records to this file, a line each")
    return parser.parse_args()


class Timer:
    """Times of single steps, on a GPU between events."""

    def __init__(self, device):
        import torch

        self._torch, self._gpu = torch, device == "cuda"

    def wait(self):
        if self._gpu:
            self._torch.cuda.synchronize()

    def _step(self, function):
        if not self._gpu:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        return first, last

    def measure(self, function, steps):
        self.wait()
        start = time.perf_counter()
        function()
        self.wait()
        first = time.perf_counter() - start
        for _ in range(4):
            function()
        self.wait()
        if self._gpu:
            self._torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        samples = [self._step(function) for _ in range(steps)]
        host = (time.perf_counter() - start) / steps * 1e3
        self.wait()
        if self._gpu:
            samples = [first.elapsed_time(last) for first, last in samples]
        peak = self._torch.cuda.max_memory_allocated() / 2**20 if self._gpu else None
        return {
            "ms": round(statistics.median(samples), 4),
            "host_ms": round(host, 4),
            "peak_mib": peak and round(peak, 1),
            "first_call_s": round(first, 2),
        }


def build(name, args):
    import torch
    import transformers

    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_hidden_layers=args.layers, max_position_embeddings=40960, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()


def prefill(model, shape, device):
    import torch

    ids = torch.randint(0, model.config.vocab_size, shape, device=device)
    return lambda run: run(ids, use_cache=False, logits_to_keep=1).logits


def decode(model, shape, device):
    """One token over a full context; each step writes to the same place."""
    import torch
    from transformers import StaticCache

    batch, context = shape
    cache = StaticCache(config=model.config, max_cache_len=context + SPARE)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    for row in ids.split(256, 1):
        model(row, past_key_values=cache, logits_to_keep=1)

    def step(run):
        logits = run(ids[:, :1], past_key_values=cache).logits
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
        return logits

    return step


def measure(name, args):
    import torch
    import transformers

    import tiercel
    from tiercel.integrations.transformers import apply

    gpu = args.device == "cuda"
    common = {
        "model": name,
        "layers": args.layers,
        "device": torch.cuda.get_device_name() if gpu else args.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tiercel": tiercel.__version__,
    }
    model, timer = build(name, args), Timer(args.device)
    cases = [("prefill", prefill, shape) for shape in args.prefill]
    cases += [("decode", decode, shape) for shape in args.decode]
    for phase, make, text in cases:
        torch.manual_seed(1)
        step = None  # frees the last case's cache
        step = make(model, tuple(map(int, text.split("x"))), args.device)
        right = None
        for way in ("sdpa", "sdpa, compiled", "applied", "applied, compiled"):
            torch._dynamo.reset()
            report = apply(model) if way.startswith("applied") else None
            run = model
            if way.endswith("compiled"):
                graphs = {"mode": "reduce-overhead"} if phase == "decode" and gpu else {}
                run = torch.compile(model, fullgraph=True, **graphs)
            record = common | {"phase": phase, "case": text, "way": way}
            try:
                record |= timer.measure(functools.partial(step, run), args.steps)
                logits = step(run).float()
                right = logits.clone() if right is None else right
                record["distance"] = float((logits - right).norm() / right.norm())
            except Exception as error:  # the other ways are still measured
                record["error"] = f"{type(error).__name__}: {error}"[:500]
            if report is not None:
                report.undo()
            yield record
        if gpu:
            torch.cuda.empty_cache()


def main():
    args = parse()
    import torch

    with torch.no_grad():
        for name in args.models:
            for record in measure(name, args):
                line = json.dumps(record)
                print(line, flush=True)
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
