# SPDX-License-Identifier: Apache-2.0
"""The real clock: a short run on the GPU."""

import pytest

pytestmark = pytest.mark.gpu


def test_a_short_run(tmp_path, capfd):
    from tiercel.cli import main
    from tiercel.workbench.bench import limits, records

    out = tmp_path / "results.jsonl"
    words = ["bench", "--peers", "torch", "--iterations", "5", "--out", str(out)]
    assert main(words) == 0, capfd.readouterr().out
    rows = records.read(out)
    assert all(r["status"] == "ok" for r in rows)
    found = limits.summary([r for r in rows if r["family"] == "limits"])
    assert 1500 < found["copy_gbps"] < 6000 and 0.1 < found["launch_us"] < 5
    graphs = [r for r in rows if r["impl"] == "tiercel" and r["timing"] == "graph"]
    assert graphs and all(0.0005 < r["ms_median"] < 0.2 for r in graphs)
    assert all(r["kernel"] not in ("", "ref") for r in graphs)


def test_a_replay_is_proportional_to_its_work():
    import torch

    from tiercel.workbench.bench.launch import Launch
    from tiercel.workbench.bench.timing import CudaClock

    clock = CudaClock()
    times = []
    for size in (1 << 26, 1 << 28):
        source = torch.zeros(size, dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        launch = Launch(lambda s=source, t=target: (t.copy_(s),))
        launch.run()
        times.append(min(clock.prepare([launch]).sample(5)))
    assert 2.5 < times[1] / times[0] < 5.5
