# SPDX-License-Identifier: Apache-2.0
"""Rings of shared-memory stages that tensor-map copies fill, and named barriers."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline


def ring(barriers, stages, warps, size):
    """`warps` read each stage, of `size` bytes, after the copies into it have arrived."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps),
        tx_count=size,
        defer_sync=True,
    )


def writer(stages):
    """The stage that is filled next."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def reader(stages):
    """The stage that is read next."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def synchronize_block():
    """After the rings are created: their barriers are initialized for all threads."""
    pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))


def fetch(ring, state, tma, source, at, to):
    """Starts the copy of a tile into a stage that the producer has acquired."""
    cute.copy(
        tma,
        source[None, at],
        to[None, state.index],
        tma_bar_ptr=ring.producer_get_barrier(state),
    )


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def arrive(barrier, threads):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)
