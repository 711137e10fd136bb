/* DLPack in: DLTensors from the C exchange API and from `__dlpack__` capsules, checked field by
 * field and copied into views. Facts: DLPack 1.3 (third_party/dlpack.h) and the Python
 * specification of `__dlpack__` in the array API standard.
 *
 * Capsules are borrowed: they are never renamed, so their own destructor frees what they hold when
 * the call is over, whichever version they are. */
#include "binding/boundary.h"

#include <limits.h>
#include <string.h>

/* Names of types for messages, by DLDataTypeCode. */
static const char *const CODE_NAME[] = {
    "int",
    "uint",
    "float",
    "opaque handle",
    "bfloat",
    "complex",
    "bool",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
};

/* Names of devices for messages, by DLDeviceType. */
static const char *const DEVICE_NAME[] = {
    [kDLCPU] = "CPU",
    [kDLCUDA] = "CUDA",
    [kDLCUDAHost] = "CUDA pinned host",
    [kDLOpenCL] = "OpenCL",
    [kDLVulkan] = "Vulkan",
    [kDLMetal] = "Metal",
    [kDLVPI] = "VPI",
    [kDLROCM] = "ROCm",
    [kDLROCMHost] = "ROCm pinned host",
    [kDLExtDev] = "extension device",
    [kDLCUDAManaged] = "CUDA managed",
    [kDLOneAPI] = "oneAPI",
    [kDLWebGPU] = "WebGPU",
    [kDLHexagon] = "Hexagon",
    [kDLMAIA] = "MAIA",
    [kDLTrn] = "Trainium",
};

#define COUNT(array) (sizeof(array) / sizeof *(array))
/* A DLDataType as one number. */
#define DTYPE_KEY(code, bits, lanes) ((uint32_t)(code) << 24 | (uint32_t)(bits) << 16 | (lanes))

static const DLDataType DLDTYPE[MOQ_DT_COUNT] = {
    [MOQ_DT_BOOL] = {kDLBool, 8, 1},
    [MOQ_DT_U8] = {kDLUInt, 8, 1},
    [MOQ_DT_I8] = {kDLInt, 8, 1},
    [MOQ_DT_U16] = {kDLUInt, 16, 1},
    [MOQ_DT_I16] = {kDLInt, 16, 1},
    [MOQ_DT_I32] = {kDLInt, 32, 1},
    [MOQ_DT_I64] = {kDLInt, 64, 1},
    [MOQ_DT_F16] = {kDLFloat, 16, 1},
    [MOQ_DT_BF16] = {kDLBfloat, 16, 1},
    [MOQ_DT_F32] = {kDLFloat, 32, 1},
    [MOQ_DT_F64] = {kDLFloat, 64, 1},
    [MOQ_DT_E4M3] = {kDLFloat8_e4m3fn, 8, 1},
    [MOQ_DT_E5M2] = {kDLFloat8_e5m2, 8, 1},
    [MOQ_DT_E8M0] = {kDLFloat8_e8m0fnu, 8, 1},
    [MOQ_DT_E2M1X2] = {kDLFloat4_e2m1fn, 4, 2},
};

DLDataType moq_dldtype(moq_dtype dtype) {
    return DLDTYPE[dtype];
}

static int refuse_dldtype(DLDataType dtype, const char *name) {
    const char *code = dtype.code < COUNT(CODE_NAME) ? CODE_NAME[dtype.code] : "unknown";
    PyErr_Format(PyExc_TypeError,
                 "%s: DLPack dtype %s (code %d, %d bits, %d lanes) is not supported", name, code,
                 dtype.code, dtype.bits, dtype.lanes);
    return -1;
}

static int import_dtype(DLDataType dtype, uint64_t flags, const char *name, moq_dtype *out) {
    if (dtype.code == kDLFloat4_e2m1fn && dtype.bits == 4 &&
        (dtype.lanes == 1 || (flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED))) {
        /* Two values share a byte here by the specification; JAX, which cannot say otherwise in a
         * legacy capsule, keeps one in each. */
        PyErr_Format(PyExc_TypeError,
                     "%s: float4_e2m1fn with one value per element may or may not be packed; pass "
                     "the packed bytes as uint8 with a format",
                     name);
        return -1;
    }
    uint32_t key = DTYPE_KEY(dtype.code, dtype.bits, dtype.lanes);
    for (int i = MOQ_DT_NONE + 1; i < MOQ_DT_COUNT; i++) {
        if (DTYPE_KEY(DLDTYPE[i].code, DLDTYPE[i].bits, DLDTYPE[i].lanes) == key) {
            *out = (moq_dtype)i;
            return 0;
        }
    }
    return refuse_dldtype(dtype, name);
}

static int import_device(int type, int32_t index, const char *name, moq_device *out) {
    switch (type) {
    case kDLCPU:
    case kDLCUDAHost:
    case kDLCUDAManaged:
        *out = (moq_device){MOQ_CPU, 0};
        return 0;
    case kDLCUDA:
        if (index >= 0) {
            *out = (moq_device){MOQ_CUDA, index};
            return 0;
        }
        break;
    default:
        break;
    }
    const char *text = type > 0 && (size_t)type < COUNT(DEVICE_NAME) ? DEVICE_NAME[type] : NULL;
    PyErr_Format(PyExc_BufferError,
                 "%s: DLPack device %s (type %d, index %d) is not supported, expected CPU or CUDA",
                 name, text ? text : "unknown", type, (int)index);
    return -1;
}

static int import_shape(const DLTensor *tensor, const char *name, moq_tensor *view) {
    int ndim = tensor->ndim;
    if (ndim < 0 || ndim > MOQ_MAX_NDIM) {
        PyErr_Format(PyExc_BufferError, "%s: %d dimensions, expected 0 to %d", name, ndim,
                     MOQ_MAX_NDIM);
        return -1;
    }
    if (ndim > 0 && !tensor->shape) {
        PyErr_Format(PyExc_BufferError, "%s: %d dimensions, but no shape", name, ndim);
        return -1;
    }
    view->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        view->shape[i] = tensor->shape[i];
        if (view->shape[i] < 0) {
            PyErr_Format(PyExc_BufferError, "%s: extent %d of the shape is negative (%lld)", name,
                         i, (long long)view->shape[i]);
            return -1;
        }
    }
    if (!tensor->strides) { /* before DLPack 1.2: row-major without gaps */
        moq_tensor_set_contiguous(view);
        return 0;
    }
    for (int i = 0; i < ndim; i++)
        view->stride[i] = tensor->strides[i];
    return 0;
}

/* Checks that every element lies in the address space and on a multiple of its size. */
static int check_memory(const moq_tensor *view, const char *name) {
    int64_t count = moq_tensor_numel(view);
    if (count == 0)
        return 0;
    if (count < 0) {
        PyErr_Format(PyExc_BufferError, "%s: the product of the shape overflows", name);
        return -1;
    }
    if (!view->data) {
        PyErr_Format(PyExc_BufferError,
                     "%s: no memory behind %lld elements; a tensor that stands for others (fake, "
                     "masked, distributed, traced) has to be made an ordinary one first",
                     name, (long long)count);
        return -1;
    }
    int64_t size = (int64_t)moq_dtype_size(view->dtype), low = 0, high = size;
    bool fits = true;
    for (int i = 0; i < view->ndim; i++) {
        int64_t reach;
        fits = fits && view->stride[i] != INT64_MIN &&
               !__builtin_mul_overflow(view->shape[i] - 1, view->stride[i], &reach) &&
               !__builtin_mul_overflow(reach, size, &reach) &&
               !__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high);
    }
    uintptr_t data = (uintptr_t)view->data;
    if (!fits || low == INT64_MIN || data < (uintptr_t)-low ||
        (uintptr_t)high > UINTPTR_MAX - data) {
        PyErr_Format(PyExc_BufferError, "%s: the strides leave the address space", name);
        return -1;
    }
    if (data % (uintptr_t)size) {
        PyErr_Format(PyExc_BufferError, "%s: address %p is not a multiple of the %d bytes of %s",
                     name, view->data, (int)size, moq_dtype_name(view->dtype));
        return -1;
    }
    return 0;
}

int moq_dltensor_view(const DLTensor *tensor, uint64_t flags, const char *name, moq_tensor *view) {
    if (import_dtype(tensor->dtype, flags, name, &view->dtype) < 0 ||
        import_device(tensor->device.device_type, tensor->device.device_id, name, &view->device) <
            0 ||
        import_shape(tensor, name, view) < 0)
        return -1;
    uintptr_t data = (uintptr_t)tensor->data;
    if (data && tensor->byte_offset > UINTPTR_MAX - data) {
        PyErr_Format(PyExc_BufferError, "%s: byte_offset %llu leaves the address space", name,
                     (unsigned long long)tensor->byte_offset);
        return -1;
    }
    view->data = data ? (void *)(data + tensor->byte_offset) : NULL;
    view->readonly = (flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    return check_memory(view, name);
}

/* The fields before the DLTensor are frozen for all time, those after `flags` only for our major
 * version. */
static int check_version(DLPackVersion version, const char *name) {
    if (version.major == DLPACK_MAJOR_VERSION)
        return 0;
    PyErr_Format(PyExc_BufferError, "%s: DLPack version %u.%u is not supported, expected %d.x",
                 name, version.major, version.minor, DLPACK_MAJOR_VERSION);
    return -1;
}

static int view_versioned(const DLManagedTensorVersioned *managed, const char *name, bool output,
                          moq_tensor *view) {
    if (check_version(managed->version, name) < 0)
        return -1;
    if (output && (managed->flags & DLPACK_FLAG_BITMASK_IS_COPIED)) {
        PyErr_Format(PyExc_BufferError, "%s: not usable as an output, its producer exports a copy",
                     name);
        return -1;
    }
    return moq_dltensor_view(&managed->dl_tensor, managed->flags, name, view);
}

void moq_note_argument(const char *name) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *note = PyUnicode_FromFormat("while taking the argument %s", name);
    PyObject *done = note ? PyObject_CallMethod(value, "add_note", "O", note) : NULL;
    if (!done)
        PyErr_Clear(); /* the exception itself matters more than its note */
    Py_XDECREF(done);
    Py_XDECREF(note);
    PyErr_Restore(type, value, traceback);
}

/* --- the C exchange API */

/* True if an object has an attribute that is true; an exception of it is none of ours. */
static bool has_true(PyObject *object, const char *attribute) {
    PyObject *value = PyObject_GetAttrString(object, attribute);
    int truth = value ? PyObject_IsTrue(value) : 0;
    Py_XDECREF(value);
    PyErr_Clear();
    return truth > 0;
}

/* Names the kind of a torch tensor without dense memory: a new reference, NULL for a dense one. */
static PyObject *kind_without_memory(PyObject *object) {
    static const char *const KINDS[] = {"is_meta", "is_nested", "is_quantized"};
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        if (has_true(object, KINDS[i]))
            return PyUnicode_FromString(KINDS[i] + strlen("is_"));
    }
    PyObject *layout = PyObject_GetAttrString(object, "layout");
    PyObject *text = layout ? PyObject_Str(layout) : NULL;
    Py_XDECREF(layout);
    if (text && PyUnicode_CompareWithASCIIString(text, "torch.strided") == 0)
        Py_CLEAR(text);
    return text;
}

/* Takes the place of an error that torch raises with a page of its frames. */
static bool refuse_kind(PyObject *object, const char *name) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *kind = kind_without_memory(object);
    PyErr_Clear();
    if (!kind) {
        PyErr_Restore(type, value, traceback);
        return false;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    PyErr_Format(PyExc_TypeError, "%s: expected a dense tensor in memory, got one that is %U", name,
                 kind);
    Py_DECREF(kind);
    return true;
}

static int exchange_failed(PyObject *object, const char *name) {
    if (PyErr_Occurred()) {
        if (!refuse_kind(object, name))
            moq_note_argument(name);
    } else {
        PyErr_Format(PyExc_BufferError, "%s: its DLPack exchange API failed without saying why",
                     name);
    }
    return -1;
}

int moq_exchange_take(const DLPackExchangeAPI *api, PyObject *object, const char *name, bool output,
                      moq_arg *out) {
    if (api->dltensor_from_py_object_no_sync && !output) {
        DLTensor tensor = {0};
        if (api->dltensor_from_py_object_no_sync(object, &tensor) != 0)
            return exchange_failed(object, name);
        if (moq_dltensor_view(&tensor, 0, name, &out->view) < 0)
            return -1;
    } else {
        DLManagedTensorVersioned *managed = NULL;
        if (api->managed_tensor_from_py_object_no_sync(object, &managed) != 0 || !managed)
            return exchange_failed(object, name);
        if (view_versioned(managed, name, output, &out->view) < 0) {
            moq_managed_release(managed);
            return -1;
        }
        out->managed = managed;
    }
    out->exchange = api;
    return 0;
}

/* --- the Python protocol */

/* Asks the object where it lives. A producer without `__dlpack_device__` is taken as CPU. */
static int ask_device(PyObject *object, const char *name, moq_device *out) {
    *out = (moq_device){MOQ_CPU, 0};
    PyObject *method = PyObject_GetAttrString(object, "__dlpack_device__");
    if (!method) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            moq_note_argument(name);
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    PyObject *pair = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    if (!pair) {
        moq_note_argument(name);
        return -1;
    }
    int status = -1;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        long type = PyLong_AsLong(PyTuple_GetItem(pair, 0));
        long index = PyErr_Occurred() ? -1 : PyLong_AsLong(PyTuple_GetItem(pair, 1));
        if (!PyErr_Occurred() && type >= 0 && type <= INT_MAX && index >= INT_MIN &&
            index <= INT_MAX)
            status = import_device((int)type, (int32_t)index, name, out);
    }
    if (status < 0 && !PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_BufferError,
                     "%s: __dlpack_device__() returned %R, expected (device type, index)", name,
                     pair);
    }
    Py_DECREF(pair);
    return status;
}

/* Calls `method(stream=-1, max_version=ours)`, with those keywords that are asked for. */
static PyObject *call_rung(moq_state *state, PyObject *method, bool with_stream,
                           bool with_version) {
    PyObject *kwargs = PyDict_New();
    PyObject *stream = NULL, *version = NULL, *capsule = NULL;
    if (!kwargs)
        return NULL;
    if (with_stream) {
        stream = PyLong_FromLong(-1); /* no synchronisation */
        if (!stream || PyDict_SetItemString(kwargs, "stream", stream) < 0)
            goto done;
    }
    if (with_version) {
        version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
        if (!version || PyDict_SetItemString(kwargs, "max_version", version) < 0)
            goto done;
    }
    capsule = PyObject_Call(method, state->boundary->empty_tuple, kwargs);
done:
    Py_XDECREF(version);
    Py_XDECREF(stream);
    Py_DECREF(kwargs);
    return capsule;
}

/* Old producers do not know the keywords and answer TypeError; each rung asks with fewer. */
static PyObject *ask_capsule(moq_state *state, PyObject *object, const char *name, bool no_sync) {
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *capsule = NULL;
    if (method) {
        capsule = call_rung(state, method, no_sync, true);
        if (!capsule && no_sync && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = call_rung(state, method, true, false);
        }
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = call_rung(state, method, false, false);
        }
        Py_DECREF(method);
    }
    if (!capsule)
        moq_note_argument(name);
    return capsule;
}

static int refuse_capsule(PyObject *object, const char *name) {
    if (!PyCapsule_CheckExact(object)) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack__() returned %R, expected a capsule", name,
                     Py_TYPE(object));
        return -1;
    }
    const char *capsule_name = PyCapsule_GetName(object);
    PyErr_Clear();
    if (capsule_name && strncmp(capsule_name, "used_", 5) == 0)
        PyErr_Format(PyExc_BufferError,
                     "%s: __dlpack__() returned a capsule already consumed "
                     "(\"%s\")",
                     name, capsule_name);
    else
        PyErr_Format(PyExc_BufferError,
                     "%s: __dlpack__() returned a capsule named \"%s\", expected \"dltensor\" or "
                     "\"dltensor_versioned\"",
                     name, capsule_name ? capsule_name : "");
    return -1;
}

static int view_capsule(PyObject *capsule, const char *name, bool output, moq_tensor *view,
                        bool *legacy) {
    *legacy = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        return view_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"), name, output,
                              view);
    if (!PyCapsule_IsValid(capsule, "dltensor"))
        return refuse_capsule(capsule, name);
    *legacy = true;
    const DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    return moq_dltensor_view(&managed->dl_tensor, 0, name, view);
}

int moq_dlpack_take(moq_state *state, const moq_producer *producer, PyObject *object,
                    const char *name, bool output, moq_arg *out, bool *legacy) {
    moq_device said;
    if (ask_device(object, name, &said) < 0)
        return -1;
    /* A library with a current stream runs its work and ours in order there, and must not wait. One
     * whose arrays are values (JAX) has none and computes when it likes; asked without a stream, it
     * answers when the memory is ready. JAX also takes the -1 for the address of a stream. */
    bool no_sync = said.kind == MOQ_CUDA && producer->in_place;
    PyObject *capsule = ask_capsule(state, object, name, no_sync);
    if (!capsule)
        return -1;
    out->keeper = capsule;
    if (view_capsule(capsule, name, output, &out->view, legacy) < 0) {
        moq_arg_release(out);
        return -1;
    }
    moq_device is = out->view.device;
    if (said.kind != is.kind || said.index != is.index) {
        PyErr_Format(PyExc_BufferError,
                     "%s: __dlpack_device__() and the capsule of __dlpack__() disagree about the "
                     "device",
                     name);
        moq_arg_release(out);
        return -1;
    }
    return 0;
}
