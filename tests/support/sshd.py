# SPDX-License-Identifier: Apache-2.0
"""A real sshd on the loopback, for this user alone: the machine's, or Debian's, unpacked."""

import getpass
import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

_PACKAGES = ("openssh-server", "openssh-client", "libwrap0")


def find(folder: Path) -> "tuple[Path, dict[str, str]]":
    """The server and its environment; skips the test where none can be had."""
    for place in (shutil.which("sshd"), "/usr/sbin/sshd", "/usr/local/sbin/sshd"):
        if place and os.access(place, os.X_OK) and shutil.which("ssh"):
            return Path(place), dict(os.environ)
    got = subprocess.run(
        ["apt-get", "-qq", "download", *_PACKAGES], cwd=folder, capture_output=True, text=True
    ) if shutil.which("apt-get") and shutil.which("dpkg-deb") else None  # fmt: skip
    if got is None or got.returncode:
        reason = "apt-get download did not get openssh-server" if got else "this is no Debian"
        pytest.skip(f"no sshd on this machine, and {reason}")
    root = folder / "root"
    for deb in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    environment = dict(os.environ, LD_LIBRARY_PATH=str(libraries))
    environment["PATH"] = f"{root / 'usr/bin'}:{environment['PATH']}"
    return root / "usr/sbin/sshd", environment


def _as_root(folder: Path) -> "list[str]":
    """What goes before a root's sshd: its user and folder, in a mount namespace of its own."""
    passwd = folder / "passwd"
    own = "" if _has_user("sshd") else "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n"
    passwd.write_text(Path("/etc/passwd").read_text() + own)
    script = (
        f"mount --bind '{passwd}' /etc/passwd && mount -t tmpfs tmpfs /run && "
        'mkdir -m 755 /run/sshd && exec "$@"'
    )
    wrap = ["unshare", "-m", "sh", "-c", script, "sh"]
    tried = subprocess.run([*wrap, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no sshd as root without a mount namespace: {tried.stderr.strip()}")
    return wrap


def _has_user(name: str) -> bool:
    try:
        return bool(pwd.getpwnam(name))
    except KeyError:
        return False


class Server:
    """`address` is what --ssh takes, `ssh` the client with this server's own configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o700)
        program, self.environment = find(folder)
        for name in ("host", "user"):
            key = folder / f"{name}_key"
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "sshd.log"
        config = folder / "sshd_config"
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"SetEnv TMPDIR={folder}/tmp\nPermitRootLogin yes\nUseDNS no\n"
        )
        (folder / "tmp").mkdir()
        words = [str(program), "-D", "-E", str(self.log), "-f", str(config)]
        if os.geteuid() == 0:
            words = [*_as_root(folder), *words]
        self.process = subprocess.Popen(words, env=self.environment)
        host_key = (folder / "host_key.pub").read_text().split()
        known = f"[127.0.0.1]:{self.port} {host_key[0]} {host_key[1]}\n"
        (folder / "known_hosts").write_text(known)
        client = folder / "ssh_config"
        client.write_text(
            f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
            "StrictHostKeyChecking yes\nBatchMode yes\n"
            f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n"
        )
        self.ssh = ["ssh", "-F", str(client)]
        self.address = f"{getpass.getuser()}@127.0.0.1:{self.port}"
        self._wait()

    def _run(self, *words: str) -> None:
        subprocess.run(words, check=True, env=self.environment)

    def _wait(self) -> None:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        pytest.fail(f"sshd does not answer: {self.log.read_text() if self.log.exists() else ''}")

    def left(self) -> "list[str]":
        """What lies in the other end's folder for temporary files."""
        return sorted(path.name for path in (self.folder / "tmp").iterdir())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
