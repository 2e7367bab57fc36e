// cuBLAS handles only: the plugin computes products before cuBLAS is called.
#include <cstddef>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Handle {
  void* stream = nullptr;
  int math_mode = 0, pointer_mode = 0, num_sms = 0;
};

static int copy(int& target, int value) { return target = value, 0; }

EXPORT int cublasCreate_v2(Handle** handle) { return *handle = new Handle, 0; }
EXPORT int cublasSetStream_v2(Handle* handle, void* stream) { return handle->stream = stream, 0; }
EXPORT int cublasGetMathMode(Handle* handle, int* mode) { return copy(*mode, handle->math_mode); }
EXPORT int cublasSetMathMode(Handle* handle, int mode) { return copy(handle->math_mode, mode); }
EXPORT int cublasGetPointerMode_v2(Handle* handle, int* mode) { return copy(*mode, handle->pointer_mode); }
EXPORT int cublasSetPointerMode_v2(Handle* handle, int mode) { return copy(handle->pointer_mode, mode); }
EXPORT int cublasGetSmCountTarget(Handle* handle, int* count) { return copy(*count, handle->num_sms); }
EXPORT int cublasSetSmCountTarget(Handle* handle, int count) { return copy(handle->num_sms, count); }
