# SPDX-License-Identifier: Apache-2.0
"""Kernels with one mistake each: a tool that is silent about its own would be about ours.

    canary.py TOOL KERNEL_NAME

Needs a GPU and its driver, and nothing else. That the mistake ends the kernel is no failure.
"""

import ctypes
import sys

_PTX = """.version 7.0
.target sm_70
.address_size 64
.visible .entry {name}(.param .u64 data)
{{
  .reg .pred %p;
  .reg .b32 %thread, %other, %mine, %theirs, %value;
  .reg .b64 %data, %place, %offset;
  .shared .align 4 .b8 words[256];
  ld.param.u64 %data, [data];
  cvta.to.global.u64 %data, %data;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %offset, %thread, 4;
  add.s64 %place, %data, %offset;
{body}
  ret;
}}
"""

# For 64 threads and 256 bytes of global memory that nothing has written.
_BODIES = {
    "memcheck": "  st.global.u32 [%place+1048576], %thread;",
    # Reads another warp's write without a barrier.
    "racecheck": """  shl.b32 %other, %thread, 2;
  mov.u32 %mine, words;
  add.u32 %mine, %mine, %other;
  st.shared.u32 [%mine], %thread;
  xor.b32 %other, %other, 252;
  mov.u32 %theirs, words;
  add.u32 %theirs, %theirs, %other;
  ld.shared.u32 %value, [%theirs];
  st.global.u32 [%place], %value;""",
    # A mask without those who call; then every second thread of a warp, while the others sleep.
    "synccheck": """  bar.warp.sync 1;
  and.b32 %other, %thread, 1;
  setp.eq.u32 %p, %other, 0;
  @%p bra even;
  nanosleep.u32 100000;
  bra.uni after;
even:
  bar.sync 0;
after:
  st.global.u32 [%place], %thread;""",
    "initcheck": """  ld.global.u32 %value, [%place];
  add.u32 %value, %value, 1;
  st.global.u32 [%place], %value;""",
}


def ptx(tool: str, name: str) -> str:
    return _PTX.format(name=name, body=_BODIES[tool])


def launch(tool: str, name: str) -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: object) -> None:
        if error := getattr(driver, function)(*arguments):
            sys.exit(f"canary: {function} gave error {error}")

    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    kernel, data = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx(tool, name).encode()))
    call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
    call("cuMemAlloc_v2", ctypes.byref(data), ctypes.c_size_t(256))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(data))
    call("cuLaunchKernel", kernel, 1, 1, 1, 64, 1, 1, 0, None, parameters, None)
    driver.cuCtxSynchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
