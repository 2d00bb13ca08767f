/* A CUDA driver without a device: it takes every call of Triton's launcher and keeps the values of the last launch. */
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { MOST_PARAMETERS = 64 };

static unsigned long kernels = 0;

static struct {
    uint64_t launches, grid, threads, stream, count, parameters[MOST_PARAMETERS];
} last; /* count: of the parameters that the caller wants to see */

void *stub_last(void) { return &last; }

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
    *value = name == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : 227 * 1024;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)++kernels; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
    *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *names, void **values, CUdeviceptr pointer) {
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    last.launches++;
    last.grid = config->gridDimX;
    last.threads = config->blockDimX;
    last.stream = (uint64_t)config->hStream;
    for (uint64_t number = 0; number < last.count; number++)
        memcpy(&last.parameters[number], parameters[number], sizeof(uint64_t));
    return CUDA_SUCCESS;
}
