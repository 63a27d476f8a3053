/* Laid over CUDA's runtime: while switched on, the GPU that is there claims Turing's limits and
 * refuses what a Turing driver would refuse; kernels really run. Load it before torch (ctypes with
 * RTLD_GLOBAL, or LD_PRELOAD). It records what was asked, and can pad launches so that only one
 * block fits on an SM, as on Turing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { INVALID_VALUE = 1, LIMIT = 65536, PER_BLOCK = 49152, SM_COUNT = 68 };
enum { ATTR_PER_BLOCK = 8, ATTR_SM_COUNT = 16, ATTR_CC_MAJOR = 75, ATTR_CC_MINOR = 76,
       ATTR_PER_SM = 81, ATTR_OPT_IN = 97 }; /* enum cudaDeviceAttr */
enum { FUNC_MAX_DYNAMIC = 8 };               /* enum cudaFuncAttribute */
enum { ATTENTION = 32768 };                  /* other kernels of a call ask less than this */

typedef struct { unsigned x, y, z; } dim3_t;

static int on;
static size_t padding;
static long asked, refused;

void turing_switch(int on_, size_t padding_) { on = on_; padding = padding_; }
void turing_reset(void) { asked = refused = 0; }
long turing_asked(void) { return asked; }
long turing_refused(void) { return refused; }

static void *real(const char *name) {
  static void *runtime;
  if (!runtime) runtime = dlopen("libcudart.so.13", RTLD_NOLOAD | RTLD_LAZY);
  if (!runtime) runtime = dlopen("libcudart.so.12", RTLD_NOLOAD | RTLD_LAZY);
  void *function = runtime ? dlsym(runtime, name) : NULL;
  if (!function) {
    fprintf(stderr, "turing_limits: the process has no libcudart with %s\n", name);
    abort();
  }
  return function;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  static int (*next)(int *, int, int);
  if (!next) next = (int (*)(int *, int, int))real("cudaDeviceGetAttribute");
  int status = next(value, attribute, device);
  if (!on || status) return status;
  switch (attribute) {
    case ATTR_PER_BLOCK: *value = PER_BLOCK; break;
    case ATTR_SM_COUNT: *value = SM_COUNT; break;
    case ATTR_CC_MAJOR: *value = 7; break;
    case ATTR_CC_MINOR: *value = 5; break;
    case ATTR_PER_SM:
    case ATTR_OPT_IN: *value = LIMIT; break;
  }
  return status;
}

int cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
  static int (*next)(const void *, int, int);
  if (!next) next = (int (*)(const void *, int, int))real("cudaFuncSetAttribute");
  if (on && attribute == FUNC_MAX_DYNAMIC) {
    if (value > asked) asked = value;
    if (value > LIMIT) {
      refused++;
      return INVALID_VALUE;
    }
    if (value >= ATTENTION && padding > (size_t)value) value = (int)padding;
  }
  return next(kernel, attribute, value);
}

int cudaLaunchKernel(const void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared,
                     void *stream) {
  static int (*next)(const void *, dim3_t, dim3_t, void **, size_t, void *);
  if (!next)
    next = (int (*)(const void *, dim3_t, dim3_t, void **, size_t, void *))real("cudaLaunchKernel");
  if (on) {
    if (shared > LIMIT) {
      refused++;
      return INVALID_VALUE;
    }
    if (shared >= ATTENTION && padding > shared) shared = padding;
  }
  return next(kernel, grid, block, args, shared, stream);
}
