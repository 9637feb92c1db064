// Launches a recorded list of kernels in one call from Python: see replay.py.
//
// A program is bytes: for every launch a Launch and its Params, then the tensor maps. A parameter is a number, or an
// address: the address of one of the given tensors plus an offset. A tensor map (TMA's description of a matrix) was
// made once; only its address changes.
//
// BESIDE launches go to a second stream, after all launches before them. A launch that WAITS waits for the last BESIDE
// launch that SIGNALS; the end of the program waits for all of them. Every stream has its own second stream, so that a
// CUDA graph captured from one includes the other, and no thread's work waits for another's.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define MOST_TENSORS 32
#define MOST_PARAMS 96
#define MOST_MAPS 8
#define MOST_LANES 64

enum { COOPERATIVE = 1, OVERLAPS = 2, BESIDE = 4, SIGNALS = 8, WAITS = 16 };

typedef struct {
  uint64_t function;
  uint32_t programs, threads, shared, n_params, flags, unused;
} Launch;

typedef struct {
  uint64_t value;  // the number, or the offset in bytes
  int32_t tensor;  // the tensor whose address is added; -1: none
  uint32_t map;    // offset of its tensor map in the program; 0: none
} Param;

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*replace_address)(CUtensorMap *, void *);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*param_info)(CUfunction, size_t, size_t *, size_t *);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*current_context)(CUcontext *);
static CUresult (*capture_mode)(CUstreamCaptureMode *);
static CUresult (*create_stream)(CUstream *, unsigned);
static CUresult (*create_event)(CUevent *, unsigned);
static CUresult (*record_event)(CUevent, CUstream);
static CUresult (*wait_for_event)(CUstream, CUevent, unsigned);
static PyObject *data_ptr;

typedef struct {
  CUcontext context;
  CUstream stream, beside;
  CUevent forked, joined;
} Lane;

static Lane lanes[MOST_LANES];
static int n_lanes;

static PyObject *failed(const char *what, CUresult code) {
  const char *text = NULL;
  error_string(code, &text);
  return PyErr_Format(PyExc_RuntimeError, "%s: CUDA error %d, %s", what, (int)code, text ? text : "unknown");
}

// load(path): look up the driver's functions. Raises if one is missing.
static PyObject *load(PyObject *self, PyObject *path) {
  void *library = dlopen(PyUnicode_AsUTF8(path), RTLD_LAZY);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  struct { const char *name; void **to; } wanted[] = {
      {"cuLaunchKernelEx", (void **)&launch_kernel},       {"cuTensorMapReplaceAddress", (void **)&replace_address},
      {"cuTensorMapEncodeTiled", (void **)&encode_tiled},  {"cuFuncGetParamInfo", (void **)&param_info},
      {"cuGetErrorString", (void **)&error_string},        {"cuCtxGetCurrent", (void **)&current_context},
      {"cuThreadExchangeStreamCaptureMode", (void **)&capture_mode},
      {"cuStreamCreate", (void **)&create_stream},         {"cuEventCreate", (void **)&create_event},
      {"cuEventRecord", (void **)&record_event},           {"cuStreamWaitEvent", (void **)&wait_for_event},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    *wanted[i].to = dlsym(library, wanted[i].name);
    if (!*wanted[i].to) return PyErr_Format(PyExc_OSError, "the driver has no %s", wanted[i].name);
  }
  Py_RETURN_NONE;
}

// param_sizes(function) -> bytes of each parameter of the compiled kernel.
static PyObject *param_sizes(PyObject *self, PyObject *function) {
  CUfunction f = (CUfunction)PyLong_AsUnsignedLongLong(function);
  if (PyErr_Occurred()) return NULL;
  PyObject *sizes = PyList_New(0);
  size_t offset, size;
  for (size_t i = 0; sizes && i < MOST_PARAMS && param_info(f, i, &offset, &size) == CUDA_SUCCESS; i++) {
    PyObject *n = PyLong_FromSize_t(size);
    if (!n || PyList_Append(sizes, n)) Py_CLEAR(sizes);
    Py_XDECREF(n);
  }
  return sizes;
}

// tensor_map(data type, element size, address, rows, columns, row stride, block rows, block columns, swizzle) -> bytes.
static PyObject *tensor_map(PyObject *self, PyObject *args) {
  int type, swizzle;
  unsigned long long size, address, rows, columns, stride;
  unsigned int block_rows, block_columns;
  if (!PyArg_ParseTuple(args, "iKKKKKIIi", &type, &size, &address, &rows, &columns, &stride, &block_rows,
                        &block_columns, &swizzle))
    return NULL;
  CUtensorMap map;
  cuuint64_t shape[2] = {columns, rows}, strides[1] = {stride * size};
  cuuint32_t block[2] = {block_columns, block_rows}, steps[2] = {1, 1};
  CUresult code = encode_tiled(&map, (CUtensorMapDataType)type, 2, (void *)address, shape, strides, block, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)swizzle,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code) return failed("cuTensorMapEncodeTiled", code);
  return PyBytes_FromStringAndSize((const char *)&map, sizeof map);
}

// The second stream of a stream, made on first use; NULL if that fails. The caller holds the GIL.
static Lane *lane_of(CUstream stream) {
  CUcontext context;
  if (current_context(&context)) return NULL;
  for (int i = 0; i < n_lanes; i++)
    if (lanes[i].stream == stream && lanes[i].context == context) return &lanes[i];
  if (n_lanes == MOST_LANES) return NULL;
  Lane lane = {.context = context, .stream = stream};
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // allow making a stream during graph capture
  capture_mode(&mode);
  int is_made = !create_stream(&lane.beside, CU_STREAM_NON_BLOCKING) &&
                !create_event(&lane.forked, CU_EVENT_DISABLE_TIMING) &&
                !create_event(&lane.joined, CU_EVENT_DISABLE_TIMING);
  capture_mode(&mode);
  if (!is_made) return NULL;
  lanes[n_lanes] = lane;
  return &lanes[n_lanes++];
}

// Make the second stream wait for all work on the first so far.
static CUresult fork_to(const Lane *lane) {
  CUresult code = record_event(lane->forked, lane->stream);
  return code ? code : wait_for_event(lane->beside, lane->forked, 0);
}

static CUresult join(const Lane *lane) {
  CUresult code = record_event(lane->joined, lane->beside);
  return code ? code : wait_for_event(lane->stream, lane->joined, 0);
}

// ``overlaps``: the launch may start while the preceding one on its stream ends.
static CUresult launch_one(const char *program, const Launch *launch, const Param *params, CUstream stream,
                           const uint64_t *addresses, int overlaps) {
  uint64_t values[MOST_PARAMS];
  void *pointers[MOST_PARAMS];
  CUtensorMap maps[MOST_MAPS];
  int n_maps = 0, n_attributes = 0;
  for (uint32_t i = 0; i < launch->n_params; i++) {
    values[i] = params[i].value + (params[i].tensor < 0 ? 0 : addresses[params[i].tensor]);
    pointers[i] = &values[i];
    if (params[i].map) {
      CUtensorMap *map = &maps[n_maps++];
      memcpy(map, program + params[i].map, sizeof *map);
      CUresult code = replace_address(map, (void *)values[i]);
      if (code) return code;
      pointers[i] = map;
    }
  }
  CUlaunchAttribute attributes[2];
  memset(attributes, 0, sizeof attributes);
  if (overlaps) {
    attributes[n_attributes].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[n_attributes++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (launch->flags & COOPERATIVE) {
    attributes[n_attributes].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[n_attributes++].value.cooperative = 1;
  }
  CUlaunchConfig config = {.gridDimX = launch->programs, .gridDimY = 1, .gridDimZ = 1,
                           .blockDimX = launch->threads, .blockDimY = 1, .blockDimZ = 1,
                           .sharedMemBytes = launch->shared, .hStream = stream,
                           .attrs = attributes, .numAttrs = n_attributes};
  return launch_kernel(&config, (CUfunction)launch->function, pointers, NULL);
}

// replay(program, stream, *tensors) -> whether all tensors were aligned; if not, nothing is launched. A tensor may be
// None.
static PyObject *replay(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  uint64_t addresses[MOST_TENSORS];
  char *program;
  Py_ssize_t size;
  if (n < 2 || n - 2 > MOST_TENSORS) return PyErr_Format(PyExc_TypeError, "%zd arguments", n);
  if (PyBytes_AsStringAndSize(args[0], &program, &size)) return NULL;
  CUstream stream = (CUstream)PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t i = 2; i < n; i++) {
    addresses[i - 2] = 0;
    if (args[i] == Py_None) continue;
    PyObject *address = PyObject_CallMethodNoArgs(args[i], data_ptr);
    if (!address) return NULL;
    addresses[i - 2] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return NULL;
    if (addresses[i - 2] % 16) Py_RETURN_FALSE;
  }
  uint32_t n_launches, forks;
  memcpy(&n_launches, program, sizeof n_launches);
  memcpy(&forks, program + sizeof n_launches, sizeof forks);
  const Lane *lane = forks ? lane_of(stream) : NULL;
  const char *at = program + 8;
  int is_apart = 0, is_behind = 1;  // must join at the end; must fork before BESIDE
  CUresult code = CUDA_SUCCESS;
  Py_BEGIN_ALLOW_THREADS;
  for (uint32_t i = 0; i < n_launches && code == CUDA_SUCCESS; i++) {
    const Launch *launch = (const Launch *)at;
    const Param *params = (const Param *)(at + sizeof(Launch));
    int is_beside = lane && launch->flags & BESIDE;
    int waits = is_apart && launch->flags & WAITS;
    if (waits) code = wait_for_event(stream, lane->joined, 0);
    else if (is_beside && is_behind) code = fork_to(lane);
    if (code == CUDA_SUCCESS)
      code = launch_one(program, launch, params, is_beside ? lane->beside : stream, addresses,
                        launch->flags & OVERLAPS && !waits);
    if (code == CUDA_SUCCESS && is_beside && launch->flags & SIGNALS) code = record_event(lane->joined, lane->beside);
    is_apart |= is_beside;
    is_behind = !is_beside;
    at = (const char *)(params + launch->n_params);
  }
  if (is_apart && code == CUDA_SUCCESS) code = join(lane);
  Py_END_ALLOW_THREADS;
  if (code) return failed("launching recorded kernels", code);
  Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_O, NULL},
    {"param_sizes", param_sizes, METH_O, NULL},
    {"tensor_map", tensor_map, METH_VARARGS, NULL},
    {"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "twell_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_twell_replay(void) {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  return data_ptr ? PyModule_Create(&module) : NULL;
}
