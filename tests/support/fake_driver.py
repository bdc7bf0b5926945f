# SPDX-License-Identifier: Apache-2.0
"""A driver library of our own, compiled on the spot, for TIERCEL_LIBCUDA."""

import subprocess

SOURCE = """
#include <unistd.h>
#define NOTHING(name) int name(void) { return 801; }
int cuInit(unsigned flags) { (void)flags; sleep(SECONDS); return INIT; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuGetErrorName(int error, const char** text) { (void)error; *text = "FAKE_ERROR"; return 0; }
int cuGetErrorString(int error, const char** text) { (void)error; *text = "made up"; return 0; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return index < COUNT ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? MAJOR : attribute == 76 ? MINOR : 0;
  return 0;
}
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuCtxGetCurrent)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxPopCurrent_v2)
NOTHING(cuThreadExchangeStreamCaptureMode)
NOTHING(cuStreamGetId)
NOTHING(cuStreamIsCapturing)
NOTHING(cuKernelGetFunction)
NOTHING(cuKernelSetAttribute)
NOTHING(cuLibraryLoadData)
NOTHING(cuLibraryGetKernel)
NOTHING(cuKernelGetParamInfo)
NOTHING(cuTensorMapEncodeTiled)
#ifndef NO_LAUNCH
NOTHING(cuLaunchKernelEx)
#endif
"""


def build(
    folder, version=13000, capability=(9, 0), init=0, no_launch=False, count=1, init_seconds=0
):
    """Compiles the library in a folder and returns its path."""
    source, library = folder / "fake_cuda.c", folder / "libfakecuda.so"
    source.write_text(SOURCE)
    values = {
        "VERSION": version,
        "MAJOR": capability[0],
        "MINOR": capability[1],
        "INIT": init,
        "COUNT": count,
        "SECONDS": init_seconds,
    }
    defines = [f"-D{name}={value}" for name, value in values.items()]
    if no_launch:
        defines.append("-DNO_LAUNCH")
    command = ["gcc", "-shared", "-fPIC", *defines, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
