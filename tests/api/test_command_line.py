# SPDX-License-Identifier: Apache-2.0
"""What a user may mistype: each is one line that says what was expected, and nothing is done."""

import pytest

from tiercel.cache import Cache
from tiercel.cli import main


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("cache prune --days -1", "--days: must be positive, got '-1'"),
        ("cache prune --days nan", "--days: must be positive, got 'nan'"),
        ("cache prune --days inf", "--days: must be positive, got 'inf'"),
        ("cache prune --days soon", "--days: must be positive, got 'soon'"),
        ("cache prune --size " + "9" * 400, "is no size such as 500MB or 2GiB"),
        ("smoke --timeout 0", "--timeout: must be positive, got '0'"),
        ("smoke --timeout x", "--timeout: must be positive, got 'x'"),
        ("bench --rounds 0", "--rounds: must be at least 1, got 0"),
        ("bench --rounds " + "9" * 30, "--rounds: must be at most"),
        ("bench --warmup x", "--warmup: must be a whole number of at least 0, got 'x'"),
        ("bench --threshold -0.1", "--threshold: must be a number of at least 0, got '-0.1'"),
        ("tune linear --num-tokens x", "must be a whole number of at least 1, got 'x'"),
        ("tune linear --num-tokens " + "9" * 5000, "must be a whole number of at least 1"),
        ("tune linear --lease 0", "--lease: must be positive, got '0'"),
        ("tune linear --trial-limit -5", "--trial-limit: must be positive, got '-5'"),
        ("tune linear --problem N=" + "9" * 5000 + ",K=8", "must look like N=4096,K=4096"),
    ],
)
def test_values_out_of_range(capsys, words, text):
    words = [word.replace("=-", "=-") for word in words.split(" ")]
    with pytest.raises(SystemExit) as ended:
        main([f"{words[-2]}={words[-1]}" if w == words[-2] else w for w in words[:-1]])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and text in said and "invalid" not in said


def test_a_negative_age_removes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "c"))
    Cache(tmp_path / "c", 1 << 20).get_or_build({"n": 1}, lambda path: path.write_bytes(b"x"))
    with pytest.raises(SystemExit):
        main(["cache", "prune", "--days=-1"])
    assert len(Cache(tmp_path / "c", 1 << 20).entries()) == 1


def test_a_shared_folder_s_mode_is_not_advised_on(tmp_path, monkeypatch, capsys):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(shared))
    assert main(["cache", "info"]) == 1
    said = capsys.readouterr().err
    assert "chmod" not in said and "set TIERCEL_CACHE_DIR to a folder of your own" in said


def test_a_kernel_that_there_is_not(capsys):
    assert main(["kernels", "nosuch"]) == 1
    assert capsys.readouterr().err == "tiercel kernels: no kernel has 'nosuch' in its name\n"
    assert main(["kernels", "nosuch", "--family", "norm"]) == 1
    assert "no kernel of the family norm has" in capsys.readouterr().err
    assert main(["kernels", "nosuch", "--json"]) == 1
    assert main(["kernels", "norm", "--summary"]) == 0


def test_a_file_that_is_there_already(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("precious")
    assert main(["new-kernel", "mine", "--language", "torch"]) == 2
    said = capsys.readouterr().err
    assert said == "tiercel new-kernel: mine.py is there already; --out FILE writes another\n"
    assert (tmp_path / "mine.py").read_text() == "precious"
    words = ["new-kernel", "mine", "--language", "torch", "--out", "none/x.py"]
    assert main(words) == 2
    assert "cannot write none/x.py: No such file or directory" in capsys.readouterr().err
