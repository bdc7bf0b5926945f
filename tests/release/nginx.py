# SPDX-License-Identifier: Apache-2.0
"""The real nginx with nginx.conf, on a free port of the loopback."""

import os
import pathlib
import socket
import subprocess
import time


class NotHere(Exception):
    """nginx cannot be had on this machine; the text says why."""


class Nginx:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        program = pathlib.Path(os.environ["NGINX"]).absolute()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        text = pathlib.Path(os.environ["NGINX_CONF"]).read_text()
        (folder / "nginx.conf").write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{port}"))
        (folder / "cache").mkdir()
        self.address = f"http://127.0.0.1:{port}/"
        command = [program, "-p", folder, "-c", "nginx.conf", "-e", "stderr"]
        if os.geteuid() == 0:
            command += ["-g", "user root;"]  # its own user cannot write in a test's folder
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for _ in range(200):
            if self.process.poll() is not None:
                error = self.process.stderr.read().strip()
                if self.process.returncode == 77:
                    raise NotHere(error)
                raise AssertionError(f"nginx ended with {self.process.returncode}: {error}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("nginx does not listen")

    @property
    def log(self) -> str:
        return (self.folder / "access.log").read_text()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.process.stderr.close()
