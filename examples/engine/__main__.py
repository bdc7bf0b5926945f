# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (the clock starts before torch is imported)
"""Serves random prompts and prints the speed, or continues a prompt with a checkpoint.

python examples/engine --config qwen3-8b [--layers N] [--sequences B] [--prompt P] [--new N]
python examples/engine --checkpoint FOLDER --text "Once upon a time"   (needs transformers)
"""

import argparse
import collections
import json
import pathlib
import time

BEGAN = time.perf_counter()

import torch
from engine import Engine
from memory import Sampling
from model import Config, Model, random_weights

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "rope_theta": 1e6, "head_dim": 128}
CONFIGS = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


def load(folder: pathlib.Path, device: str) -> tuple[Config, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    config = Config.read(json.loads((folder / "config.json").read_text()))
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file, device=device)
    return config, weights


def measure(engine: Engine, args: argparse.Namespace) -> None:
    """Serves prompts of random tokens; times are those of the host, which waits for each step."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.model.config.vocab_size
    for _ in range(args.sequences):
        prompt = torch.randint(vocabulary, (args.prompt,), generator=generator).tolist()
        engine.add(prompt, args.new, sampling=Sampling(args.temperature, top_p=args.top_p))
    first, decoding = 0.0, []
    began = time.perf_counter()
    for drawn in engine.run():
        now = time.perf_counter()
        if not first:
            first = now
            print(f"first token {first - BEGAN:.2f} s after the start of the process")
        if len(drawn) == args.sequences:
            decoding.append(now - began)
        began = now
    if steady := sorted(decoding[1:]):
        seconds = steady[len(steady) // 2]
        speed = args.sequences / seconds
        print(f"decoding, {args.sequences} sequences: {1e3 * seconds:.3f} ms, {speed:.0f} tokens/s")
        if engine.device.type == "cuda":
            floor = read_bytes(engine, args.sequences, args.prompt + args.new // 2) / bandwidth()
            print(f"the floor, each byte read once: {1e3 * floor:.3f} ms, {floor / seconds:.0%}")


def profile(engine: Engine, rows: int) -> None:
    """Prints the kernels of a decoding step, as the last one left the engine."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(2):  # the first includes the profiler's own work
            torch.cuda.synchronize()
            engine.decode(rows)
        torch.cuda.synchronize()
    on_gpu = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu.sort(key=lambda event: event.time_range.start)
    times = collections.defaultdict(list)
    for event in on_gpu[len(on_gpu) // 2 :]:
        times[event.name[:70]].append(event.time_range.elapsed_us())
    print(f"{sum(map(len, times.values()))} launches a step")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{len(each):5} x {sum(each) / len(each):8.2f} us  {name}")


def read_bytes(engine: Engine, sequences: int, context: int) -> float:
    """The bytes of weights, keys and values that a decoding step has to read."""
    model, config = engine.model, engine.model.config
    cache = engine.pages.memory
    total = model.head.nbytes + sequences * context * cache.nbytes / cache[0, 0, ..., 0, 0].numel()
    # Counts the expected number of experts that random routing selects.
    unused = (1 - config.num_experts_per_tok / max(1, config.num_experts)) ** sequences
    for layer in model.layers:
        for name, weight in vars(layer).items():
            share = 1 - unused if config.num_experts and name in ("up", "down") else 1
            total += share * weight.nbytes if weight is not None else 0
    return total


def bandwidth() -> float:
    """The memory bandwidth in bytes per second, from its clock and width."""
    properties = torch.cuda.get_device_properties(0)
    return 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", choices=CONFIGS, help="random weights of this size")
    source.add_argument("--checkpoint", type=pathlib.Path, help="a folder of Hugging Face's")
    parser.add_argument("--text", default="Once upon a time", help="for --checkpoint")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a sequence")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", action="store_true", help="list a decoding step's kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.config:
        config = Config.read(CONFIGS[args.config] | _layers(args))
        weights = random_weights(config, args.device, torch.bfloat16)
    else:
        config, weights = load(args.checkpoint, args.device)
    longest = args.prompt + args.new
    with torch.inference_mode():
        model = Model(config, weights)
    engine = Engine(
        model,
        pages=args.sequences * -(-longest // 16) + 16,
        most_sequences=args.sequences,
        most_tokens=max(2048, args.sequences),
        longest=longest,
        graphs=not args.no_graphs,
    )
    if args.config:
        measure(engine, args)
        if args.profile:
            profile(engine, args.sequences)
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    sampling = Sampling(args.temperature, top_p=args.top_p)
    prompt = tokenizer(args.text).input_ids
    sequence = engine.add(prompt, args.new, end=tokenizer.eos_token_id, sampling=sampling)
    for _ in engine.run():
        pass
    print(tokenizer.decode(sequence.new))


def _layers(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.layers is None else {"num_hidden_layers": args.layers}


if __name__ == "__main__":
    main()
