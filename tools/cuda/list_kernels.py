# SPDX-License-Identifier: Apache-2.0
"""Lists compiled kernels: family, name, registers, shared memory, bytes of code.

    list_kernels.py OUT CUOBJDUMP PACKAGE=FILE...

FILE is an object of nvcc, or a folder of cubins and their manifest, both from the CuTe DSL.
"""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def code_sizes(image: bytes) -> dict[str, int]:
    """Bytes of code by kernel, from a cubin's sections named .text.KERNEL."""
    start = struct.unpack_from("<Q", image, 0x28)[0]
    entry, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * entry) for i in range(count)]
    sizes = {}
    for header in headers:
        place = headers[names][4] + header[0]
        name = image[place : image.index(b"\0", place)].decode()
        if name.startswith(".text."):
            sizes[name[6:]] = header[5]
    return sizes


class Lister:
    def __init__(self, cuobjdump: str) -> None:
        self.cuobjdump = pathlib.Path(cuobjdump).absolute()
        self.env = {**os.environ, "PATH": f"{self.cuobjdump.parent}:/usr/bin:/bin"}

    def _run(self, *words: str, folder: str | None = None) -> str:
        command = [str(self.cuobjdump), *words]
        done = subprocess.run(command, cwd=folder, env=self.env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kernels(self, file: pathlib.Path) -> list[dict]:
        """Of one object or cubin, under their symbols."""
        sizes: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as folder:
            if file.suffix == ".cubin":
                images = [file]
            else:
                self._run("--extract-elf", "all", str(file.absolute()), folder=folder)
                images = sorted(pathlib.Path(folder).glob("*.cubin"))
            for image in images:
                sizes |= code_sizes(image.read_bytes())
        found = _USAGE.findall(self._run("--dump-resource-usage", str(file)))
        return [
            {
                "symbol": symbol,
                "registers": int(registers),
                "shared": int(shared),
                "bytes": sizes.get(symbol, 0),
            }
            for symbol, registers, _, shared, _ in found
        ]


def demangled(symbols: list[str]) -> dict[str, str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, check=True, text=True
    )
    return dict(zip(symbols, map(readable, done.stdout.splitlines()), strict=True))


def readable(name: str) -> str:
    """Without "void", namespaces of ours and parameters."""
    name = (
        name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("tiercel::", "")
    )
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # an enumerator's type
    return re.sub(r"\(.*\)$", "", name)


def of_the_dsl(file: pathlib.Path, kernels: list[dict], manifests: list[dict]) -> list[dict]:
    """A cubin's kernels by the names of their launches, with what a launch adds."""
    launches = {
        record["symbol"]: record
        for manifest in manifests
        for record in manifest["kernels"]
        if record["cubin"] == file.name
    }
    found = []
    for kernel in kernels:
        launch = launches[kernel["symbol"]]
        named = {"name": launch["name"], **kernel}
        named["shared"] += launch["dynamic_smem"]
        named |= {"block": launch["block"], "cluster": launch["cluster"]}
        found.append(named | {"attributes": launch["attributes"]})
    return found


def main() -> None:
    out, lister = pathlib.Path(sys.argv[1]), Lister(sys.argv[2])
    given = [word.split("=", 1) for word in sys.argv[3:]]
    # A package is kernels/FAMILY or a folder below it.
    files = [(package.split("/")[1], pathlib.Path(path)) for package, path in given]
    manifests: dict[str, list[dict]] = {}
    for family, path in files:
        if path.suffix == ".json":
            manifests.setdefault(family, []).append(json.loads(path.read_text()))
    found = []
    for family, path in files:
        if path.is_dir():
            for cubin in sorted(path.glob("*.cubin")):
                made = of_the_dsl(cubin, lister.kernels(cubin), manifests[family])
                found += [{"family": family, "language": "cute", **kernel} for kernel in made]
        elif path.suffix == ".o":
            kernels = lister.kernels(path)
            names = demangled([kernel["symbol"] for kernel in kernels])
            for kernel in kernels:
                named = {"name": names[kernel["symbol"]], **kernel}
                found.append({"family": family, "language": "cuda", **named})
    for kernel in found:
        del kernel["symbol"]
    found.sort(key=lambda kernel: (kernel["family"], kernel["name"]))
    lines = ",\n".join(json.dumps(kernel) for kernel in found)
    out.write_text(f'{{"format": 1, "arch": "sm_90a", "kernels": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
