# SPDX-License-Identifier: Apache-2.0
"""Pack files as a wheel, with the same members as that of rules_python."""

import argparse
import base64
import hashlib
import pathlib
import zipfile

EPOCH = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--metadata", type=pathlib.Path, required=True)
    parser.add_argument("--description", type=pathlib.Path, required=True)
    parser.add_argument("--entry-points", type=pathlib.Path, required=True)
    parser.add_argument("--strip-prefix", action="append", default=[])
    parser.add_argument("--file", nargs=2, action="append", default=[])
    parser.add_argument("--distinfo-file", nargs=2, action="append", default=[])
    args = parser.parse_args()

    name, version, python_tag, abi, platform = args.out.name.removesuffix(".whl").split("-")
    info = f"{name}-{version}.dist-info"
    contents = {}
    for source, path in args.file:
        prefix = next((p for p in args.strip_prefix if path.startswith(p)), "")
        contents[path.removeprefix(prefix).lstrip("/")] = pathlib.Path(source).read_bytes()
    metadata = f"{args.metadata.read_text()}Version: {version}\n\n{args.description.read_text()}\n"
    contents[f"{info}/METADATA"] = metadata.encode()
    wheel_lines = [
        "Wheel-Version: 1.0",
        "Generator: bazel-wheelmaker 1.0",
        f"Root-Is-Purelib: {str(platform == 'any').lower()}",
        f"Tag: {python_tag}-{abi}-{platform}",
    ]
    contents[f"{info}/WHEEL"] = ("\n".join(wheel_lines) + "\n").encode()
    if entry_points := args.entry_points.read_bytes():
        contents[f"{info}/entry_points.txt"] = entry_points
    for source, path in args.distinfo_file:
        contents[f"{info}/{path}"] = pathlib.Path(source).read_bytes()

    record = f"{info}/RECORD"
    lines = []
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    contents[record] = ("\n".join(lines) + f"\n{record},,\n").encode()
    with zipfile.ZipFile(args.out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in contents.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100777 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)


if __name__ == "__main__":
    main()
