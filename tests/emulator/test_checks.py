# SPDX-License-Identifier: Apache-2.0
"""What the emulator says of kernels that are wrong: each defect has its message."""

import pytest
import torch
from support.ptx import EmulatorError, kernel, options, zeros

# %r1 = the thread, %rd9 = its element of 4 bytes in parameter 0
THREAD = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd8, %r1, 4; add.s64 %rd9, %rd0, %rd8;"


@pytest.fixture(autouse=True)
def _usual_options():
    yield
    options()


def fails(launch, *arguments, match, **named):
    with pytest.raises(EmulatorError, match=match) as caught:
        launch(*arguments, **named)
    return str(caught.value)


def test_out_of_bounds_names_everything(tmp_path):
    launch = kernel(tmp_path, f"{THREAD} st.global.u32 [%rd9+4], %r1;")
    text = fails(launch, zeros(32), match="out-of-bounds write of 4 bytes at global address 0x")
    assert "0 bytes after tensor 0 of 128 bytes" in text
    assert "kernel kernel_" in text and "block (0, 0, 0), thread (31, 0, 0)" in text
    assert ".ptx:" in text and "st.global.u32 [%rd9+4], %r1" in text


def test_every_block_of_a_dependent_grid_waits(tmp_path):
    body = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 ret; griddepcontrol.wait;"
    launch = kernel(tmp_path, body)
    launch(zeros(1), grid=2)
    launch(zeros(1), grid=1, dependent=True)
    text = fails(launch, zeros(1), grid=2, dependent=True, match="without griddepcontrol.wait")
    assert "block (1, 0, 0)" in text


def test_misaligned(tmp_path):
    launch = kernel(tmp_path, f"{THREAD} ld.global.v2.u32 {{%r2, %r3}}, [%rd9];")
    assert "thread (1, 0, 0)" in fails(launch, zeros(40), match="misaligned read of 8 bytes")


def test_prefetches_have_bounds_too(tmp_path):
    launch = kernel(tmp_path, "mov.u32 %r1, 48; cp.async.bulk.prefetch.L2.global [%rd0+16], %r1;")
    launch(zeros(16))
    fails(launch, zeros(12), match="out-of-bounds read of 48 bytes")


def test_what_a_line_held_is_gone(tmp_path):
    launch = kernel(
        tmp_path,
        f"{THREAD} st.global.u32 [%rd9], %r1; setp.eq.u32 %p1, %r1, 0; "
        "@%p1 discard.global.L2 [%rd0], 128;",
    )
    out = on_a_line(33)
    launch(out)
    assert (out[:32] == -1).all() and out[32] == 0


def test_only_lines_are_discarded(tmp_path):
    launch = kernel(tmp_path, "discard.global.L2 [%rd0+64], 128;")
    fails(launch, on_a_line(64), match="discard of what is not a line")
    launch = kernel(tmp_path, "discard.global.L2 [%rd0], 128;")
    fails(launch, on_a_line(16), match="out-of-bounds write of 16 bytes")


def on_a_line(count):
    room = zeros(count + 32)
    skipped = -room.data_ptr() % 128 // 4
    return room[skipped : skipped + count]


def test_shared_memory_has_an_end(tmp_path):
    launch = kernel(tmp_path, "mov.u32 %r1, dynamic; ld.shared.u32 %r2, [%r1+64];")
    launch(zeros(1), shared=80)
    fails(launch, zeros(1), shared=64, match="out-of-bounds access of 4 bytes at shared address")


def test_shared_memory_begins_as_nan(tmp_path):
    launch = kernel(
        tmp_path, f"{THREAD} mov.u32 %r2, dynamic; ld.shared.f32 %f1, [%r2]; st.f32 [%rd9], %f1;"
    )
    out = zeros(32, torch.float32)
    launch(out, shared=64)
    assert out.isnan().all()


def test_too_much_shared_memory(tmp_path):
    launch = kernel(tmp_path, "")
    fails(launch, zeros(1), shared=64 * 1024, match="65536 bytes of dynamic shared memory")


def test_deadlock_says_who_waits_where(tmp_path):
    body = f"{THREAD} setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 64; "
    launch = kernel(tmp_path, body)
    text = fails(launch, zeros(64), block=64, match="is deadlocked")
    assert "block (0, 0, 0) warp 0 lanes 0xffffffff" in text and "bar.sync 1, 64" in text
    assert "warp 1" not in text


def warpgroups(*counts):
    """Each warpgroup asks for its number of registers; the kernel is of that many warpgroups."""
    text = "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 7;\n"
    for i, (operation, count) in enumerate(counts):
        text += f"setp.ne.u32 %p1, %r1, {i}; @%p1 bra NEXT{i};\n"
        text += f"setmaxnreg.{operation}.sync.aligned.u32 {count};\nNEXT{i}:\n"
    return text


THREE = ".reqntid 384, 1, 1 .minnctapersm 1"  # ptxas gives each thread 168


@pytest.mark.parametrize("seed", [0, 7])
def test_warpgroups_share_the_registers_of_the_launch(tmp_path, seed):
    """One more than what the third gives back to two is waited for on the GPU for ever."""
    options(seed=seed)
    fits = warpgroups(("inc", 216), ("inc", 216), ("dec", 72))
    kernel(tmp_path, fits, directives=THREE)(zeros(1), block=384)
    launch = kernel(tmp_path, fits.replace("72", "80"), directives=THREE)
    text = fails(launch, zeros(1), block=384, match="is deadlocked: setmaxnreg waits for 48 more")
    assert "starts with 168 for each of its 12 warps" in text
    assert "setmaxnreg.inc.sync.aligned.u32 216" in text


@pytest.mark.parametrize(
    ("directives", "most"),
    [(".maxntid 256", 256), (".maxntid 256 .minnctapersm 2", 128), (".maxnreg 96", 96)],
)
def test_registers_of_a_launch(tmp_path, directives, most):
    launch = kernel(tmp_path, warpgroups(("dec", most)), directives=directives)
    launch(zeros(1), block=128)
    for wrong, match in ((most - 8, "to fewer"), (most + 8, "waits for 8 more")):
        if wrong <= 256:
            launch = kernel(tmp_path, warpgroups(("inc", wrong)), directives=directives)
            fails(launch, zeros(1), block=128, match=match)
    if most < 256:
        launch = kernel(tmp_path, warpgroups(("dec", most + 8)), directives=directives)
        fails(launch, zeros(1), block=128, match=f"setmaxnreg.dec from {most} registers to more")


def test_registers_of_a_launch_must_be_known(tmp_path):
    fails(kernel(tmp_path, warpgroups(("dec", 24))), zeros(1), match="ptxas ignores it")


def test_endless_loop(tmp_path):
    launch = kernel(tmp_path, "AGAIN: add.u32 %r1, %r1, 1; bra AGAIN;")
    options(max_instructions=50_000)
    fails(launch, zeros(1), match="more than allowed")


def test_unknown_instruction_is_quoted(tmp_path):
    launch = kernel(tmp_path, "frobnicate.u32 %r1, %r2;")
    fails(launch, zeros(1), match=r"unknown opcode frobnicate\n.*frobnicate.u32 %r1, %r2")
    launch = kernel(tmp_path, "add.weird.u32 %r1, %r2, %r3;")
    fails(launch, zeros(1), match=r"modifier \.weird is not implemented")
    launch = kernel(tmp_path, "add.u32 %rd1, %r2, %r3;")
    fails(launch, zeros(1), match="register %rd1 has 64 bits, not 32")


def test_assertions_and_traps(tmp_path):
    fails(kernel(tmp_path, "trap;"), zeros(1), match="trap")


COPY = f"""{THREAD}
mov.u32 %r2, dynamic; mad.lo.u32 %r3, %r1, 4, %r2; add.s64 %rd6, %rd1, %rd8;
cp.async.ca.shared.global [%r3], [%rd9], 4;
cp.async.commit_group; WAIT
ld.shared.u32 %r4, [%r3]; st.global.u32 [%rd6], %r4;"""


def test_a_copy_that_nobody_waits_for_is_not_there_yet(tmp_path):
    source, out = torch.arange(32, dtype=torch.int32), zeros(32)
    kernel(tmp_path, COPY.replace("WAIT", "cp.async.wait_group 0;"), parameters=2)(
        source, out, shared=128
    )
    assert torch.equal(out, source)
    launch = kernel(tmp_path, COPY.replace("WAIT", "cp.async.wait_group 1;"), parameters=2)
    launch(source, out, shared=128)
    assert (out == -1).all()
    options(lazy=False)
    launch(source, out, shared=128)
    assert torch.equal(out, source)


def test_a_missing_barrier_shows_in_some_order(tmp_path):
    body = f"""{THREAD} mov.u32 %r2, dynamic; mad.lo.u32 %r3, %r1, 4, %r2;
    st.shared.u32 [%r3], %r1; BARRIER
    xor.b32 %r4, %r1, 96; mad.lo.u32 %r5, %r4, 4, %r2; ld.shared.u32 %r6, [%r5];
    st.global.u32 [%rd9], %r6;"""
    due = torch.arange(128, dtype=torch.int32) ^ 96
    for barrier, right in (("bar.sync 0;", True), ("", False)):
        launch = kernel(tmp_path, body.replace("BARRIER", barrier))
        results = []
        for seed in range(1, 6):
            options(seed=seed)
            out = zeros(128)
            launch(out, block=128, shared=512)
            results.append(torch.equal(out, due))
        assert all(results) == right


@pytest.mark.parametrize("instead", ["wgmma.wait_group.sync.aligned 0;", "add.u32 %r2, %r2, 1;"])
def test_warps_of_a_warpgroup_wait_together(tmp_path, instead):
    """Warps below the bound wait at one place, the others at another or not at all."""
    body = (
        f"{THREAD} setp.lt.u32 %p1, %r1, BOUND; @%p1 bra FIRST;\n{instead}\nbra END;\n"
        "FIRST:\nwgmma.wait_group.sync.aligned 0;\nEND:\nwgmma.fence.sync.aligned;"
    )
    kernel(tmp_path, body.replace("BOUND", "128"))(zeros(256), block=256)
    launch = kernel(tmp_path, body.replace("BOUND", "32"))
    fails(launch, zeros(128), match="another warp of the warpgroup is at PTX line", block=128)


def test_barriers_that_do_not_fit(tmp_path):
    launch = kernel(tmp_path, "bar.sync 0, 33;")
    fails(launch, zeros(1), block=64, match="must be a multiple of 32")
    launch = kernel(tmp_path, "barrier.cluster.wait;")
    fails(launch, zeros(1), match="without an arrive")


def test_clusters_that_do_not_fit(tmp_path):
    fails(
        kernel(tmp_path, ""), zeros(1), grid=3, cluster=2, match="clusters of 2 x 1 x 1 in a grid"
    )
    fails(
        kernel(tmp_path, ""),
        zeros(1),
        grid=16,
        cluster=16,
        match="clusters of 16 x 1 x 1 in a grid",
    )
    launch = kernel(
        tmp_path, "mov.u32 %r1, 5; mov.u32 %r2, dynamic; mapa.shared::cluster.u32 %r3, %r2, %r1;"
    )
    fails(launch, zeros(1), grid=2, cluster=2, match="mapa to block 5 of a cluster of 2")
