// SPDX-License-Identifier: Apache-2.0
// Build-time only: stands in for what the DSL's host code calls, and hands each launch to a hook
// instead of launching. oracle.py sets the hook.
#include <string.h>

struct LaunchAttribute {
  unsigned id, pad;
  unsigned value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3];
  unsigned smem, pad;
  void *stream;
  const struct LaunchAttribute *attributes;
  unsigned attribute_count;
};

enum { kMaxKernels = 1024, kMaxDynamicSmemAttribute = 8 };
enum { kCapabilityMajor = 75, kSmemPerBlockOptin = 97 };  // device attributes

static char names[kMaxKernels][1024];
static int kernel_count;
int max_dynamic_smem[kMaxKernels];
void (*on_launch)(const struct LaunchConfig *config, const char *kernel, int max_smem, void **args);

static int handle_index(void *kernel) { return (int)((char *)kernel - (char *)0) - 1; }

int _cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d,
                         void *e, unsigned f) {
  *library = (void *)1;
  return 0;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  int i = 0;
  while (i < kernel_count && strcmp(names[i], name) != 0) ++i;
  if (i == kMaxKernels || strlen(name) >= sizeof names[0]) return 1;
  if (i == kernel_count) strcpy(names[kernel_count++], name);
  *kernel = (void *)((char *)0 + i + 1);
  return 0;
}

int _cudaGetDevice(int *device) { return *device = 0; }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == kSmemPerBlockOptin ? 232448 : attribute == kCapabilityMajor ? 9 : 0;
  return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  return *value = 0;
}

static int set_attribute(void *kernel, int attribute, int value) {
  if (attribute == kMaxDynamicSmemAttribute) max_dynamic_smem[handle_index(kernel)] = value;
  return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return set_attribute(kernel, attribute, value);
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  return set_attribute(kernel, attribute, value);
}

int _cudaLaunchKernelEx(const struct LaunchConfig *config, void *kernel, void **args) {
  on_launch(config, names[handle_index(kernel)], max_dynamic_smem[handle_index(kernel)], args);
  return 0;
}
