/* Stand-in for CUDA's runtime: a device with the limits of compute capability 7.5, on which no
 * kernel runs. Only what FlashInfer's prefill launchers call is here.
 *
 * Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 64 KiB of
 * shared memory per SM and per block (opt-in), 48 KiB without opting in. 68 SMs: RTX 2080 Ti.
 * A request over the limit is answered as the real driver answers it: error 1, "invalid argument".
 */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1 };
enum { SHARED_PER_BLOCK = 49152, SHARED_OPT_IN = 65536, SHARED_PER_SM = 65536, SM_COUNT = 68 };
/* numbers of enum cudaDeviceAttr and enum cudaFuncAttribute in driver_types.h */
enum { ATTR_SHARED_PER_BLOCK = 8, ATTR_SM_COUNT = 16, ATTR_CC_MAJOR = 75, ATTR_CC_MINOR = 76,
       ATTR_SHARED_PER_SM = 81, ATTR_SHARED_OPT_IN = 97 };
enum { FUNC_MAX_DYNAMIC_SHARED = 8 };

typedef struct { unsigned x, y, z; } dim3_t;

static int max_dynamic = SHARED_PER_BLOCK; /* of the one kernel that is launched */

int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case ATTR_SHARED_PER_BLOCK: *value = SHARED_PER_BLOCK; break;
    case ATTR_SM_COUNT: *value = SM_COUNT; break;
    case ATTR_CC_MAJOR: *value = 7; break;
    case ATTR_CC_MINOR: *value = 5; break;
    case ATTR_SHARED_PER_SM: *value = SHARED_PER_SM; break;
    case ATTR_SHARED_OPT_IN: *value = SHARED_OPT_IN; break;
    default: printf("unknown attribute %d\n", attribute); return INVALID_VALUE;
  }
  return SUCCESS;
}

int cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
  (void)kernel;
  if (attribute != FUNC_MAX_DYNAMIC_SHARED) return INVALID_VALUE;
  printf("asked %d\n", value);
  if (value > SHARED_OPT_IN) return INVALID_VALUE;
  max_dynamic = value;
  return SUCCESS;
}

int cudaLaunchKernel(const void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared,
                     void *stream) {
  (void)kernel; (void)args; (void)stream;
  int status = shared > (size_t)max_dynamic ? INVALID_VALUE : SUCCESS;
  printf("launched %zu grid %u,%u,%u block %u,%u,%u status %d\n", shared, grid.x, grid.y, grid.z,
         block.x, block.y, block.z, status);
  return status;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                  size_t shared) {
  (void)kernel; (void)threads;
  *blocks = shared ? (int)(SHARED_PER_SM / shared) : 16;
  return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t shared,
                                                           unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}

const char *cudaGetErrorString(int status) {
  return status == SUCCESS ? "no error" : status == INVALID_VALUE ? "invalid argument" : "error";
}
const char *cudaGetErrorName(int status) {
  return status == INVALID_VALUE ? "cudaErrorInvalidValue" : "cudaSuccess";
}
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cudaLaunchKernelExC(const void *config, const void *kernel, void **args) {
  (void)config; (void)kernel; (void)args;
  printf("launched with PDL, which Turing has not\n");
  return INVALID_VALUE;
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  (void)to; (void)value; (void)size; (void)stream;
  return SUCCESS;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  (void)to; (void)from; (void)size; (void)kind; (void)stream;
  return SUCCESS;
}

/* what nvcc's host code calls at start-up and for <<<>>> */
void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int limit, void *thread, void *block, void *block_dim, void *grid_dim,
                            int *warp) {
  (void)handle; (void)host; (void)device; (void)name; (void)limit; (void)thread; (void)block;
  (void)block_dim; (void)grid_dim; (void)warp;
}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext,
                       size_t size, int constant, int global) {
  (void)handle; (void)host; (void)address; (void)name; (void)ext; (void)size; (void)constant;
  (void)global;
}
char __cudaInitModule(void **handle) { (void)handle; return 0; }
unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void *stream) {
  (void)grid; (void)block; (void)shared; (void)stream;
  return 0;
}
int __cudaPopCallConfiguration(dim3_t *grid, dim3_t *block, size_t *shared, void *stream) {
  memset(grid, 0, sizeof *grid);
  memset(block, 0, sizeof *block);
  *shared = 0;
  (void)stream;
  return SUCCESS;
}
int __cudaGetKernel(void **kernel, const void *entry) { *kernel = (void *)entry; return SUCCESS; }
int __cudaLaunchKernel(void *kernel, dim3_t grid, dim3_t block, void **args, size_t shared,
                       void *stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
