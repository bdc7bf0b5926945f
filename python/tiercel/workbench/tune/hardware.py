# SPDX-License-Identifier: Apache-2.0
"""The resources of a Hopper multiprocessor; a candidate that needs more is not compiled."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_PER_BLOCK = 227 * 1024
SHARED_PER_SM = 228 * 1024
_SHARED_RESERVED = 1024  # of each block, for the system
REGISTERS_PER_SM = 64 * 1024
REGISTERS_PER_THREAD = 255
THREADS_PER_BLOCK = 1024
THREADS_PER_SM = 2048
BLOCKS_PER_SM = 32
CLUSTER = 8  # what every H100 and H200 places; 16 needs an opt-in
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Needs:
    """A block's needs.

    Args:
        threads: Of a block.
        shared: Bytes.
        registers: Of each thread, as launched.
        busiest: Registers that a thread needs at least, after warps have handed theirs over.
        most: What such a thread may have.
        cluster: Blocks.
        least_blocks: That a multiprocessor must hold, for the candidate to make sense.
        most_threads: That the kernel is compiled for.
    """

    threads: int
    shared: int
    registers: int
    busiest: int = 0
    most: int = REGISTERS_PER_THREAD
    cluster: int = 1
    least_blocks: int = 1
    most_threads: int = THREADS_PER_BLOCK


def blocks_per_sm(needs: Needs) -> int:
    warps = -(-needs.threads // 32)
    by_registers = REGISTERS_PER_SM // (warps * 32 * (-(-needs.registers // 8) * 8))
    by_shared = SHARED_PER_SM // (needs.shared + _SHARED_RESERVED)
    return min(by_registers, by_shared, THREADS_PER_SM // (warps * 32), BLOCKS_PER_SM)


def why_not(needs: Needs) -> str | None:
    """Why a block cannot run, or None."""
    most = min(needs.most_threads, THREADS_PER_BLOCK)
    if needs.threads > most:
        return f"{needs.threads} threads a block, {most} is the most"
    if needs.shared > SHARED_PER_BLOCK:
        return f"{needs.shared} bytes of shared memory, {SHARED_PER_BLOCK} is the most"
    if needs.registers > REGISTERS_PER_THREAD or needs.busiest > needs.most:
        most = min(needs.most, REGISTERS_PER_THREAD)
        return f"{max(needs.registers, needs.busiest)} registers a thread, {most} is the most"
    if needs.cluster > CLUSTER:
        return f"clusters of {needs.cluster}, {CLUSTER} is the most"
    held = blocks_per_sm(needs)
    if held < needs.least_blocks:
        return f"{held} blocks a multiprocessor, {needs.least_blocks} are needed"
    return None
