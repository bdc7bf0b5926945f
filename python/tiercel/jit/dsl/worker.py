# SPDX-License-Identifier: Apache-2.0
"""A process that compiles one variant of a family's CuTe DSL kernels; tiercel.jit starts it.

worker.py FOLDER MAIN ARCH OUT < the variant, JSON
"""

import importlib
import json
import os
import pathlib
import sys


def main() -> None:
    folder, main_module, arch, out = sys.argv[1:]
    os.environ["CUTE_DSL_ARCH"] = arch  # before the import: else another target is built
    out_path = pathlib.Path(out).absolute()
    os.chdir(out_path.parent)  # the DSL leaves copies of its cubins in the folder that it is in
    sys.path[:0] = [str(pathlib.Path(__file__).absolute().parent), folder]
    import description
    from build import compile_function

    function = importlib.import_module(main_module).variant(**json.load(sys.stdin))
    image = compile_function(function, arch).__cubin__
    out_path.write_bytes(description.pack(description.describe(function, image), image))


if __name__ == "__main__":
    main()
