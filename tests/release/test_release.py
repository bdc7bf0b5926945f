# SPDX-License-Identifier: Apache-2.0
"""A release, whole: to a real package index, with real twine and pip, for each Python."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path("tests/release").absolute()))

from scratch import VERSION, WHEELS, Checkout, Index, Releaser

TOKEN, TEST_TOKEN = "pypi-AgProductionSecret", "pypi-AgTestSecret"
SECRETS = {
    "TWINE_PASSWORD": TOKEN,
    "TWINE_TEST_PASSWORD": TEST_TOKEN,
    "TWINE_TEST_USERNAME": "__token__",
    "TWINE_USERNAME": "__token__",
}
OURS = {path.name: path.read_bytes() for path in WHEELS}


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def indexes(tmp_path: pathlib.Path) -> Iterator[tuple[Index, Index]]:
    test = Index(tmp_path / "test_index", "__token__", TEST_TOKEN)
    production = Index(tmp_path / "index", "__token__", TOKEN)
    yield test, production
    test.close()
    production.close()


@pytest.fixture
def releaser(checkout: Checkout, indexes, tmp_path: pathlib.Path) -> Releaser:
    test, production = indexes
    return Releaser(checkout, tmp_path / "home", test.address, production.address)


def published(index: Index) -> bool:
    return index.files == OURS


def with_bare_remote(checkout: Checkout) -> pathlib.Path:
    remote = checkout.root.parent / "remote.git"
    subprocess.run(["git", "init", "--quiet", "--bare", remote], check=True)
    checkout.git("remote", "add", "origin", str(remote))
    return remote


def test_release_whole_and_a_second_time(checkout: Checkout, indexes, tmp_path) -> None:
    test, production = indexes
    releaser = Releaser(checkout, tmp_path / "home", test.address, production.address, whole=True)
    remote = with_bare_remote(checkout)
    checkout.bump()
    code, text = releaser.run(answer=VERSION, **SECRETS)
    assert code == 0, text
    assert published(test) and published(production)
    for python in os.environ["SUPPORTED_PYTHONS"].split():
        assert f"Python {python}." in text, f"{python} did not install and run it:\n{text}"
    assert text.count("Type the version to go on") == 1
    commit = checkout.git("rev-parse", "HEAD")
    assert checkout.git("rev-parse", f"v{VERSION}^{{commit}}") == commit
    seen = subprocess.run(
        ["git", "-C", remote, "rev-parse", f"v{VERSION}^{{commit}}"], capture_output=True, text=True
    )
    assert seen.stdout.strip() == commit
    # Nothing tells the secrets: not the terminal, the log, the build or a process's arguments.
    build = (checkout.root / "out" / "release" / VERSION / "environment").read_text()
    for secret in (TOKEN, TEST_TOKEN):
        for where in (text, checkout.log, build, "\n".join(releaser.command_lines)):
            assert secret not in where
    assert any("twine upload" in line for line in releaser.command_lines)

    before = test.requests.count("POST") + production.requests.count("POST")
    code, text = releaser.run(**SECRETS)
    assert code == 0 and "is released" in text, text
    assert before == test.requests.count("POST") + production.requests.count("POST") == 8
    assert published(test) and published(production)
    assert checkout.git("tag") == f"v{VERSION}" and "Type the version" not in text


def test_killed_at_each_step(checkout: Checkout, indexes, releaser: Releaser) -> None:
    """The next run goes on; the index has nothing before everything was tried."""
    test, production = indexes
    checkout.bump()
    for step in ("check", "build", "audit", "test-upload", "install", "upload"):
        releaser.kill_when(f"^release: step {step}:", **SECRETS)
        assert production.files == {} and checkout.git("tag") == ""
    # In the middle of the build, and of each upload.
    shutil.rmtree(checkout.root / "out" / "release" / VERSION)
    releaser.kill_when("^building", **SECRETS)
    assert not (checkout.root / "out" / "release" / VERSION / "wheels").exists()
    for path in list(test.folder.glob("*.whl"))[2:]:
        path.unlink()
    releaser.kill_when("Uploading tiercel-", **SECRETS)
    assert production.files == {}
    releaser.kill_when("^release: step install:", **SECRETS)
    assert published(test)
    releaser.kill_when(r"^\+ .*twine upload.*" + production.address, "--yes", **SECRETS)
    assert all(OURS[name] == data for name, data in production.files.items())
    releaser.kill_when("^release: step tag:", "--yes", **SECRETS)
    assert published(production)
    code, text = releaser.run(**SECRETS)
    assert code == 0 and published(production), text
    assert checkout.git("tag") == f"v{VERSION}"


def test_dry_run_needs_no_index_and_no_credentials(checkout: Checkout, tmp_path) -> None:
    nowhere = "http://127.0.0.1:9/"
    checkout.bump()
    releaser = Releaser(checkout, tmp_path / "home", nowhere, nowhere)
    code, text = releaser.run("--dry-run")
    assert code == 0, text
    assert f"dry run of {VERSION} passed" in text and text.count("not asked") == 2
    assert text.count(f": tiercel {VERSION}, ") == len(releaser.env["PYTHONS"].split())
    assert checkout.git("tag") == ""


def refused(releaser: Releaser, *options: str, answer: str = VERSION, **env: str) -> str:
    code, text = releaser.run(*options, answer=answer, **(SECRETS | env))
    assert code == 1 and "release: error: " in text, text
    return text.partition("release: error: ")[2]


def test_what_is_refused(checkout: Checkout, indexes, releaser: Releaser) -> None:
    test, production = indexes
    assert f"no dated section [{VERSION}]" in refused(releaser)
    checkout.bump()
    (checkout.root / "left_over.py").write_text("")
    assert "the tree is dirty" in refused(releaser)
    (checkout.root / "left_over.py").unlink()
    (checkout.root / "README.md").write_text("changed\n")
    assert "README.md" in refused(releaser)
    checkout.git("checkout", "--quiet", "README.md")
    # Wheels of another commit, of a dirty tree, and changed ones.
    folder = checkout.root.parent / "wheels"
    build = [checkout.root / "ci" / "build.sh", "--release", folder]
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    checkout.commit("Another")
    assert "are of another commit" in refused(releaser, "--wheels", str(folder))
    (checkout.root / "left_over.py").write_text("")
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    (checkout.root / "left_over.py").unlink()
    assert "from a dirty tree" in refused(releaser, "--wheels", str(folder))
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    with (folder / WHEELS[0].name).open("ab") as file:
        file.write(b"more")
    assert "not those that were built" in refused(releaser, "--wheels", str(folder))
    (folder / "build.json").unlink()
    assert "has no build.json" in refused(releaser, "--wheels", str(folder))
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    record = folder / "build.json"
    record.write_text(record.read_text().replace('"committed"', '"of this machine"'))
    assert "built with settings of this machine" in refused(releaser, "--wheels", str(folder))
    # A version that is released: as a tag, or on the index with other bytes.
    checkout.git("tag", f"v{VERSION}", "HEAD~1")
    assert "is released already: v" in refused(releaser)
    checkout.git("tag", "--delete", f"v{VERSION}")
    assert test.files == production.files == {}


def test_what_is_uploaded_is_what_was_tried(
    checkout: Checkout, indexes, releaser: Releaser
) -> None:
    """Whatever happens to the folder while the question waits for its answer."""
    test, production = indexes
    checkout.bump()
    process = releaser.start(**SECRETS)
    said = ""
    while "Type the version" not in said:
        said += process.stdout.read(1) or pytest.fail(said)
    folder = checkout.root / "out" / "release" / VERSION / "wheels"
    for path in folder.glob("*.whl"):
        path.write_bytes(b"another wheel")
    text, _ = process.communicate(f"{VERSION}\n", timeout=300)
    assert process.returncode == 0, text
    assert published(test) and published(production)


def test_copies_are_hashed_again(checkout: Checkout, tmp_path: pathlib.Path) -> None:
    sys.path.insert(0, str(pathlib.Path("tools/release").absolute()))
    from shell import Failed
    from wheels import Copies

    folder = tmp_path / "wheels"
    build = [checkout.root / "ci" / "build.sh", "--release", folder]
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    copies = Copies(folder)
    assert copies.folder.stat().st_mode & 0o077 == 0
    copies.require_unchanged()
    (copies.folder / WHEELS[0].name).write_bytes(b"another wheel")
    with pytest.raises(Failed, match=WHEELS[0].name):
        copies.require_unchanged()
    with (folder / WHEELS[0].name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(Failed, match="not what was built in"):
        Copies(folder)


def test_sums_by_hand_are_no_audit(checkout: Checkout, releaser: Releaser, tmp_path) -> None:
    checkout.bump()
    folder = tmp_path / "dist"
    build = [checkout.root / "ci" / "build.sh", "--release", folder]
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    by_hand = "sha256sum tiercel-*.whl >SHA256SUMS"
    subprocess.run(["sh", "-c", by_hand], check=True, cwd=folder)
    (checkout.root / "ci" / "audit.py").write_text("import sys; sys.exit('a finding')")
    checkout.commit("An audit that finds something")
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    text = refused(releaser, "--dry-run", "--wheels", str(folder))
    assert "the audit failed" in text and "passed before" not in text


def test_an_audit_that_passed_is_not_repeated(checkout: Checkout, releaser: Releaser) -> None:
    checkout.bump()
    code, text = releaser.run("--dry-run")
    assert code == 0 and "passed before" not in text, text
    code, text = releaser.run("--dry-run")
    assert code == 0 and "these wheels passed before" in text, text


def test_who_tags_is_asked_before_the_upload(
    checkout: Checkout, indexes, releaser: Releaser
) -> None:
    test, production = indexes
    checkout.bump()
    for key in ("name", "email"):
        checkout.git("config", "--unset", f"user.{key}")
    checkout.git("config", "user.useConfigOnly", "true")
    text = refused(releaser)
    assert "git does not know who makes the tag" in text and "GIT_COMMITTER_NAME" in text
    named = {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.com"}
    checkout.git("remote", "add", "origin", str(checkout.root / "nowhere"))
    assert "nowhere" in refused(releaser, **named)
    checkout.git("remote", "remove", "origin")
    assert test.files == production.files == {}
    code, text = releaser.run("--yes", **SECRETS, **named)
    assert code == 0 and checkout.git("tag") == f"v{VERSION}", text


def test_jobs_of_the_workflow(checkout: Checkout, indexes, releaser: Releaser, tmp_path) -> None:
    """Uploads are another's: no step here has credentials, and the tag needs nothing of Bazel."""
    test, production = indexes
    checkout.bump()
    folder = tmp_path / "dist"
    build = [checkout.root / "ci" / "build.sh", "--release", folder]
    subprocess.run(build, check=True, cwd=checkout.root, capture_output=True)
    wheels = ["--wheels", str(folder)]
    code, text = releaser.run("--dry-run", *wheels)
    assert code == 0 and (folder / "SHA256SUMS").is_file(), text
    for name, data in OURS.items():
        (test.folder / name).write_bytes(data)
    code, text = releaser.run("--only", "install", *wheels)
    assert code == 0 and f": tiercel {VERSION}, " in text, text
    for name in ("AUDIT", "PYTHONS", "TEST_WHEELS", "PYTHONPATH"):
        releaser.env.pop(name, None)
    (production.folder / WHEELS[0].name).write_bytes(b"another")
    code, text = releaser.run("--only", "tag", *wheels)
    assert code == 1 and "with other contents" in text and checkout.git("tag") == ""
    for name, data in OURS.items():
        (production.folder / name).write_bytes(data)
    code, text = releaser.run("--only", "tag", *wheels)
    assert code == 0 and checkout.git("tag") == f"v{VERSION}", text
    assert "POST" not in test.requests + production.requests


def test_the_gpu_tests_have_to_have_passed(
    checkout: Checkout, indexes, releaser: Releaser, tmp_path
) -> None:
    test, production = indexes
    checkout.bump()
    releaser.arguments.remove("--without-gpu-run")
    text = refused(releaser, GH_PROGRAM="/nowhere/gh")
    assert "gh is not installed" in text and "--without-gpu-run" in text
    gh = tmp_path / "gh"
    run = '{"status": "completed", "conclusion": "CONCLUSION", "head_branch": "main"'
    run += ', "html_url": "https://example.com/runs/7"}'
    gh.write_text(f"#!/bin/sh\necho '{{\"workflow_runs\": [{run}]}}'\n")
    gh.chmod(0o755)
    text = refused(releaser, GH_PROGRAM=str(gh))
    assert "failed: https://example.com/runs/7" in text
    assert test.files == production.files == {}
    gh.write_text(gh.read_text().replace("CONCLUSION", "success"))
    code, text = releaser.run("--yes", GH_PROGRAM=str(gh), **SECRETS)
    assert code == 0 and "the GPU tests passed: https://example.com/runs/7" in text, text


def test_what_the_indexes_have(checkout: Checkout, indexes, releaser: Releaser) -> None:
    test, production = indexes
    checkout.bump()
    name = WHEELS[0].name
    (production.folder / name).write_bytes(b"another")
    assert f"has {name} with other contents" in refused(releaser)
    (production.folder / name).unlink()
    (test.folder / name).write_bytes(b"another")
    assert f"the test index ({test.address}) has {name} with other" in refused(releaser)
    assert production.files == {}
    (test.folder / name).unlink()
    # A wrong password leaves nothing, and is not shown.
    text = refused(releaser, TWINE_TEST_PASSWORD="pypi-wrong")
    assert "the upload to the test index failed" in text and "pypi-wrong" not in checkout.log
    assert test.files == production.files == {}
    # An address that would show a password in twine's arguments.
    address = test.address.replace("://", "://user:hidden@")
    text = refused(releaser, TIERCEL_TEST_REPOSITORY=address)
    assert "holds credentials" in text and "hidden" not in text
    # The question answered with anything but the version.
    assert "not confirmed" in refused(releaser, answer="yes")
    assert published(test) and production.files == {} and checkout.git("tag") == ""


def test_credentials_of_pypirc(checkout: Checkout, indexes, releaser: Releaser) -> None:
    test, production = indexes
    checkout.bump()
    lines = "[distutils]\nindex-servers =\n    tried\n    real\n"
    for name, index in (("tried", test), ("real", production)):
        lines += f"[{name}]\nrepository = {index.address}\n"
        lines += f"username = {index.user}\npassword = {index.password}\n"
    (pathlib.Path(releaser.env["HOME"]) / ".pypirc").write_text(lines)
    names = {"TIERCEL_TEST_REPOSITORY": "tried", "TIERCEL_REPOSITORY": "real"}
    code, text = releaser.run("--yes", **names)
    assert code == 0, text
    assert published(production) and TOKEN not in checkout.log + text


def small_wheel(folder: pathlib.Path, name: str, version: str, more: str = "") -> None:
    info, tag = f"{name}-{version}.dist-info", "py3-none-any"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", head + more)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


def test_dependencies_never_come_from_the_test_index(indexes, tmp_path, monkeypatch) -> None:
    """Anybody may upload a name there; dependencies come from where pip is told to look."""
    sys.path.insert(0, str(pathlib.Path("tools/release").absolute()))
    import smoke
    from main import pip_wheel
    from record import wheels
    from shell import Shell

    test, _ = indexes
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    small_wheel(test.folder, "tiercel", "7.0", "Requires-Dist: helper\n")
    small_wheel(test.folder, "helper", "9.9")
    small_wheel(trusted, "helper", "1.0")
    seen = []

    def look(environment: smoke.Environment, version: str) -> str:
        code = "import helper, tiercel; print(helper.__version__, tiercel.__version__)"
        seen.append(environment.run("python", "-I", "-c", code).split())
        return "seen"

    monkeypatch.setattr(smoke, "try_out", look)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(trusted))
    ours = {k: v for k, v in wheels(test.folder).items() if k.startswith("tiercel")}
    python, shell = os.environ["PYTHONS"].split()[-1], Shell(tmp_path / "log")
    source = ["--index-url", f"{test.address}simple/"]
    smoke.smoke([python], pip_wheel(), "7.0", ours, source, shell)
    assert seen == [["1.0", "7.0"]]
    # Only what was built is installed: the same version with other bytes is not.
    other = dict.fromkeys(ours, "0" * 64)
    with pytest.raises(smoke.Failed):
        smoke.smoke([python], pip_wheel(), "7.0", other, source, shell)
    assert "DO NOT MATCH" in (tmp_path / "log").read_text()
