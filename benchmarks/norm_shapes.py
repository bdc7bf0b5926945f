#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Searches shapes of a norm's gradient on this machine's GPU, for an installed Tiercel.

python benchmarks/norm_shapes.py layer_norm --columns 4608 9216 --rows 16384 [--residual]

`kernels/norm/norm_backward_tables.h` has tables of what this finds. For each number of columns it
times every candidate once, then the fastest and the tables' own in turns, each checked against
float64, and prints their microseconds, their share of a large copy's rate, and a line for the
table. The same kernel is up to 1 percent apart between runs: less than that is no gain.
"""

import argparse
import functools
import itertools
import statistics

VECTORS_AND_ROWS = {2: [(2, 1), (3, 1), (4, 1), (2, 2)], 4: [(2, 1), (4, 1), (8, 1)]}
CLUSTERS, STAGES, AHEAD = (1, 2, 4, 8), (2, 3, 4, 5, 6), (0, 3)
MOST_THREADS, FEWEST_THREADS = 512, 96


def team_threads(vectors, each):
    """Whole warps."""
    return -(-vectors // (32 * each)) * 32


def candidates(columns, element):
    """Shapes (vectors, rows, cluster, threads, stages, ahead, even, pairs) worth a try: at most
    two in five of a row's lanes idle, blocks of three warps or more."""
    vectors = -(-columns * element // 16)
    found = []
    for (each, rows), cluster in itertools.product(VECTORS_AND_ROWS[element], CLUSTERS):
        part = -(-vectors // cluster)
        team = team_threads(part, each)
        if team > MOST_THREADS or (cluster > 1 and part < 384):
            continue
        if (team > 32 and team * each > 1.6 * part) or (each * rows <= 2 and team > 32):
            continue
        teams = [1] if cluster > 1 else range(1, MOST_THREADS // team + 1)
        blocks = [
            team * n for n in teams if team * n >= FEWEST_THREADS and n in (1, 2, 3, 4, 5, 6, 8, 12)
        ]
        for threads, stages, ahead, even in itertools.product(blocks, STAGES, AHEAD, (0, 1)):
            if stages >= rows:
                found.append((each, rows, cluster, threads, stages, ahead, even, 0))
    return found


def line(columns, element, rows, shape, us):
    """As a table has it, with the KB that are on their way to a block, up to 64; and the MB of x
    and grad, which tables of fewer or more rows have instead."""
    *numbers, ahead, even, pairs = shape
    each, _, cluster, threads, stages = numbers
    vectors = -(-columns * element // 16)
    part = -(-vectors // cluster)
    teams = max(1, threads // team_threads(part, each)) if cluster == 1 else 1
    least = min(64, stages * teams * part * 16 * 2 // 1024 // 8 * 8)
    megabytes = rows * vectors * 32 >> 20
    flags = ["true" if even or pairs else "", "true" if pairs else ""]
    numbers += [ahead] if ahead or even or pairs else []
    inner = ", ".join([*map(str, numbers), *filter(None, flags)])
    return f"{{{vectors}, {least}, {{{inner}}}}},  // {columns}, {rows}: {us:.1f}, {megabytes} MB"


class Search:
    """Of one problem."""

    def __init__(self, op, columns, rows, dtype, residual, clock):
        from tiercel.ops.norm.cases import BENCHES
        from tiercel.workbench.bench import ours, runner
        from tiercel.workbench.bench.cases import Case

        name = f"{op}_backward"
        params = {"M": rows, "N": columns, "weight": "same", "bias": op == "layer_norm"}
        self.case = Case("norm", name, dtype, {**params, "residual": residual})
        self.bench = next(bench for bench in BENCHES if bench.op == name)
        count = runner.input_sets(self.bench, self.case)
        self.sets = [self.bench.make(self.case, "cuda", seed) for seed in range(count)]
        self.impl = ours.impls(self.bench, ["sm90"])[0]
        self.clock = clock

    @functools.cached_property
    def expected(self):
        return self.bench.reference(self.case, self.sets[0])

    def replay(self, shape, checked=False):
        """Of a shape, or of the tables' where that is None; None where no kernel has it."""
        from tiercel import _C
        from tiercel.workbench.bench import runner

        _C.norm_try_backward_shape(*(shape or ()))
        try:
            if checked:
                case, inputs, expected = self.case, self.sets, self.expected
                return runner.prepare(
                    self.bench, case, self.impl, inputs, expected, self.clock
                ).replay
            launches = [self.impl.prepare(self.case, inputs) for inputs in self.sets]
            for launch in launches:
                launch.run()
            return self.clock.prepare(launches)
        except NotImplementedError:
            return None
        finally:
            _C.norm_try_backward_shape()

    @staticmethod
    def microseconds(replay, count):
        replay.sample(1)
        return statistics.median(replay.sample(count)) * 1e3

    def run(self, shapes, best):
        """The tables' shape and the `best` of `shapes`, with their microseconds."""
        quick = {}
        for shape in shapes:
            replay = self.replay(shape)
            if replay:
                quick[shape] = self.microseconds(replay, 6)
        kept = [None, *sorted(quick, key=quick.get)[:best]]
        replays = {shape: self.replay(shape, checked=True) for shape in kept}
        rounds = [
            {shape: self.microseconds(replay, 20) for shape, replay in replays.items()}
            for _ in range(5)
        ]
        return {shape: statistics.median(one[shape] for one in rounds) for shape in kept}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("op", choices=["rms_norm", "layer_norm"])
    parser.add_argument("--columns", type=int, nargs="+", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--residual", action="store_true", help="with a residual's gradient")
    parser.add_argument("--best", type=int, default=4, help="so many are timed again, in turns")
    args = parser.parse_args()

    import torch

    from tiercel.workbench.bench import limits
    from tiercel.workbench.bench.timing import CudaClock

    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    clock = CudaClock()
    rate = limits.summary(limits.measure(clock))["copy_gbps"]
    element = 4 if args.dtype == "float32" else 2
    print(f"{torch.cuda.get_device_name()}, copy {rate:.0f} GB/s")
    for columns in args.columns:
        search = Search(args.op, columns, args.rows, args.dtype, args.residual, clock)
        moved = search.bench.bytes_moved(search.case)
        found = search.run(candidates(columns, element), args.best)
        for shape, us in sorted(found.items(), key=lambda item: item[1]):
            text = line(columns, element, args.rows, shape, us) if shape else "the tables' shape"
            print(f"{us:9.2f} us {moved / us / rate / 10:6.1f} %  {text}", flush=True)
        del search


if __name__ == "__main__":
    main()
