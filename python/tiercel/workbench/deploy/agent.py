# SPDX-License-Identifier: Apache-2.0
# The other end of `tiercel deploy`. It is sent there as text and needs Python 3.8 and nothing else,
# so it imports nothing of Tiercel's and is written for old Pythons.
import contextlib
import io
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile

# A folder that --keep names is used again only where this lies in it.
MARKER = ".tiercel-deploy"
RESULTS = ("doctor.json", "smoke.jsonl", "bench.jsonl", "results.json")
MOST_BYTES = 64 << 20  # of each of them

OUTPUT, RESULT, END, HELLO, FAILED = b"o", b"r", b"e", b"h", b"f"
MAGIC = b"\ntiercel-deploy-1\n"

_lock = threading.Lock()
_state = {"process": None, "stopped": False}


def send(kind, data):
    with _lock:
        sys.stdout.buffer.write(kind + struct.pack(">Q", len(data)) + data)
        sys.stdout.buffer.flush()


def receive(stream):
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack(">Q", head)[0]
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def hello():
    return {
        "tag": "cp{}{}".format(*sys.version_info[:2]),
        "python": platform.python_version(),
        "machine": sys.platform + " " + platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "host": platform.node(),
    }


def stop(*_):
    """Ends the running step with all that it started."""
    _state["stopped"] = True
    process = _state["process"]
    if process is not None and process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def watch(stream):
    """Nothing more is sent: when the other end goes, reading ends."""
    stream.read()
    stop()


def run(words, folder, site, cache):
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [site] + [p for p in [environment.get("PYTHONPATH")] if p]
    )
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment["TIERCEL_CACHE_DIR"] = cache
    environment["TMPDIR"] = os.path.join(folder, "tmp")  # a killed program leaves its files there
    process = subprocess.Popen(
        [sys.executable] + words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _state["process"] = process
    if _state["stopped"]:
        stop()
    while True:
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            break
        send(OUTPUT, data)
    return process.wait()


def results(run_folder):
    """The files that a run's steps are told to write; of anything else in there, nothing."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in RESULTS:
            path = os.path.join(run_folder, "out", name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            if os.path.getsize(path) > MOST_BYTES:
                text = "\n%s is left there: it is larger than %d MiB\n"
                send(OUTPUT, (text % (path, MOST_BYTES >> 20)).encode())
                continue
            archive.add(path, "out/" + name)
    return made.getvalue()


class Refused(Exception):
    """A folder that was asked for and is not ours to write to."""


def claim(folder):
    """Makes the folder that --keep names, or takes the one that an earlier run made.

    Anything else is refused: what it holds would be mixed with ours, and might be removed.
    """
    marker = os.path.join(folder, MARKER)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Refused(f"{folder} belongs to another user, or others can write to it")
    if not os.path.isfile(marker) or os.path.islink(marker):
        if os.listdir(folder):
            raise Refused(
                f"{folder} is not empty and was not made by tiercel deploy: name a new folder"
            )
        with open(marker, "x") as file:
            file.write("made by tiercel deploy --keep\n")
    return folder


def work(payload, folder):
    """Below `folder`: `site` and `cache`, and `run`, which only this run writes to."""
    run_folder = os.path.join(folder, "run")
    shutil.rmtree(run_folder, ignore_errors=True)  # of an earlier run
    os.makedirs(run_folder, mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
        archive.extractall(run_folder)  # of our own making, over our own connection
    with open(os.path.join(run_folder, "job.json")) as file:
        job = json.load(file)
    site = os.path.join(folder, "site")
    with zipfile.ZipFile(os.path.join(run_folder, job["wheel"])) as wheel:
        wheel.extractall(site)
    cache = os.path.join(folder, "cache")
    os.makedirs(cache, mode=0o700, exist_ok=True)
    for name in ("out", "tmp"):
        os.makedirs(os.path.join(run_folder, name))
    worst = 0
    for step in job["steps"]:
        if _state["stopped"]:
            break
        send(OUTPUT, ("\n== " + step["title"] + "\n").encode())
        status = run(step["words"], run_folder, site, cache)
        if status and not step.get("may_fail"):
            worst = status
            if step.get("needed"):
                break
    if not _state["stopped"]:
        send(RESULT, results(run_folder))
    return worst


def main():
    stream = sys.stdin.buffer
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    sys.stdout.buffer.write(MAGIC)
    send(HELLO, json.dumps(hello()).encode())
    try:
        payload = receive(stream)
    except EOFError:
        return 1
    threading.Thread(target=watch, args=(stream,), daemon=True).start()
    options = json.loads(payload[: payload.index(b"\n")].decode())
    payload = payload[payload.index(b"\n") + 1 :]
    kept = options.get("folder")
    status, folder = 1, None
    try:
        if kept:
            folder = claim(os.path.abspath(os.path.expanduser(kept)))
        else:
            folder = tempfile.mkdtemp(prefix="tiercel-deploy-")
        status = work(payload, folder)
    except Exception as error:  # told at the other end, not as a traceback at this one
        if not _state["stopped"]:
            named = "" if isinstance(error, Refused) else type(error).__name__ + ": "
            send(FAILED, (named + str(error)).encode())
    finally:
        stop()
        if folder is not None:
            ours = os.path.join(folder, "run", "tmp") if kept else folder
            shutil.rmtree(ours, ignore_errors=True)
    with contextlib.suppress(OSError):  # nobody may be there any more
        send(END, str(status).encode())
    return 0


if __name__ in ("__main__", "tiercel_agent"):
    code = main()
    os._exit(code)  # the watching thread sits in a read
