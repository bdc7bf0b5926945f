# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of moe_up, moe_down and grouped_gemm."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from linear_layouts_cute import EPI, OPERAND_MAJORS


@cute.jit
def next_stage(stages, index, phase):
    end = index + 1 == stages
    return Int32(0) if end else index + 1, phase ^ 1 if end else phase


@cute.jit
def release(empty, index):
    """One arrival per warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + index)


def sync(barrier, threads):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def tensor_in(field, layout):
    """A field of the shared memory struct as a swizzled tensor."""
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def box_copies(tma, smem, places, box):
    """A TMA copy's stages in shared memory and its boxes in `places`."""
    boxes = cute.zipped_divide(places, box)
    return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), boxes)


def group_places(groups, rows, columns):
    """Coordinates (row, column, group) for the tensor map of [groups, rows, columns]."""
    identity = cute.make_identity_tensor((columns, rows, groups))
    return cute.make_tensor(identity.iterator, cute.select(identity.layout, [1, 0, 2]))


def tiled_mma(dtype, warpgroups, columns, majors=("k", "k")):
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        *(OPERAND_MAJORS[major] for major in majors),
        Float32,
        (warpgroups, 1, 1),
        (64, columns),
    )


def result_copies(dtype, y, layout, wg_thread):
    """How a warpgroup's sums reach shared memory, 64 rows and columns at a time: the tensor there,
    the copy, its destination for each stage of `layout` and the registers that it reads."""
    sy = tensor_in(y, layout)
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy_c = cute.make_tiled_copy_C_atom(stmatrix, tiled_mma(dtype, 1, EPI))
    r2s = cute.make_tiled_copy_S(stmatrix, copy_c)
    to_sy = r2s.get_slice(wg_thread).partition_D(sy)
    return sy, r2s, to_sy, cute.make_rmem_tensor(to_sy.shape[:3], dtype)


def result_piece(from_y, row, lane):
    """The offset of a lane's 16 bytes in a row: 8 lanes read a row's 128 bytes."""
    return from_y + (row * EPI + (lane % 8 ^ row % 8) * 8)
