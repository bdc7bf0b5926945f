# SPDX-License-Identifier: Apache-2.0
"""``tiercel cache``: what Tiercel has compiled on this machine."""

import argparse
import json
import sys

HELP = "Shows or empties the folder of kernels that were compiled on this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tiercel.cache.folder import parse_size
    from tiercel.cli.values import number

    def size(text: str) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    info = actions.add_parser("info", help="its place, size and limit")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--entries", action="store_true", help="list what is in it")
    actions.add_parser("clear", help="remove everything but what is just being compiled")
    text = "remove what is damaged, left over, or beyond the size limit"
    prune = actions.add_parser("prune", help=text)
    prune.add_argument("--size", type=size, metavar="S", help="down to this, such as 500MB")
    days = number()
    prune.add_argument("--days", type=days, metavar="N", help="what was not used for N days, too")


def run(args: argparse.Namespace) -> int:
    from tiercel.cache import CacheError, default
    from tiercel.cache.folder import show_size

    try:
        cache = default()
        if args.action == "info":
            return _info(args)
        removed = cache.clear() if args.action == "clear" else cache.prune(args.size, args.days)
        left = cache.entries()
    except (CacheError, OSError) as error:
        print(f"tiercel cache: {error}", file=sys.stderr)
        return 1
    size = show_size(sum(entry.size for entry in left))
    print(f"removed {removed} of {removed + len(left)} entries, {size} left in {cache.folder}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from tiercel.cache import default
    from tiercel.cache.folder import check, show_size

    cache = default()
    if cache.folder.exists():
        check(cache.folder)
    entries = cache.entries()
    size = sum(entry.size for entry in entries)
    facts = {
        "folder": str(cache.folder),
        "entries": len(entries),
        "bytes": size,
        "limit": cache.limit,
    }
    if args.json:
        listed = [{"key": e.key, "bytes": e.size, **e.about()} for e in entries]
        print(json.dumps(facts | ({"list": listed} if args.entries else {}), indent=2))
        return 0
    print(f"folder:   {cache.folder}")
    print(f"entries:  {len(entries)}")
    print(f"size:     {show_size(size)} of {show_size(cache.limit)}")
    for entry in entries if args.entries else ():
        fields = ", ".join(f"{name}={text}" for name, text in entry.about()["fields"].items())
        print(f"{entry.key[:12]}  {show_size(entry.size):>9}  {' '.join(fields.split())[:100]}")
    return 0
