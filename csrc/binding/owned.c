/* Memory of our own, on the host or a CUDA device, lent out through `__dlpack__`: how a result
 * reaches a library that only imports finished memory, and how a tensor reaches a device without
 * any library.
 *
 * The block counts its holders in plain C: the Python object is one, every exported capsule or
 * tensor another. The deleter a consumer calls, on any thread and with or without the GIL, touches
 * nothing of Python. */
#include "binding/boundary.h"
#include "cuda/cuda.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* The alignment that the DLPack specification asks of `data`; consumers copy what is aligned less
 * than they like. */
#define DATA_ALIGNMENT 256

typedef struct {
    atomic_size_t holders;
    moq_tensor view;
} block;

typedef struct {
    union {
        DLManagedTensor legacy;
        DLManagedTensorVersioned versioned;
    } managed;
    block *memory;
} export;

typedef struct {
    PyObject_HEAD
    block *memory;
} owned;

static void let_go(block *memory) {
    if (atomic_fetch_sub_explicit(&memory->holders, 1, memory_order_acq_rel) > 1)
        return;
    if (memory->view.device.kind == MOQ_CUDA)
        moq_cuda_delete(memory->view.device.index, memory->view.data);
    else
        free(memory->view.data);
    free(memory);
}

/* Memory of the host is cleared, so that a failed operation shows nobody what was there. */
static moq_status allocate(moq_device device, size_t bytes, void **data, moq_err *err) {
    size_t padded = (bytes / DATA_ALIGNMENT + 1) * DATA_ALIGNMENT;
    if (device.kind == MOQ_CUDA)
        return moq_cuda_new(device.index, padded, data, err);
    *data = aligned_alloc(DATA_ALIGNMENT, padded);
    if (!*data)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for a tensor of %zu bytes", bytes);
    memset(*data, 0, bytes);
    return MOQ_OK;
}

static block *new_block(moq_dtype dtype, moq_device device, int32_t ndim, const int64_t *shape,
                        moq_err *err) {
    block *memory = calloc(1, sizeof *memory);
    if (!memory) {
        moq_fail(err, MOQ_ERR_MEMORY, "no memory for a tensor");
        return NULL;
    }
    atomic_init(&memory->holders, 1);
    memory->view.dtype = dtype;
    memory->view.device = device;
    memory->view.ndim = ndim;
    memcpy(memory->view.shape, shape, (size_t)ndim * sizeof *shape);
    moq_tensor_set_contiguous(&memory->view);
    size_t bytes = (size_t)moq_tensor_numel(&memory->view) * moq_dtype_size(dtype);
    if (allocate(device, bytes, &memory->view.data, err) != MOQ_OK) {
        free(memory);
        return NULL;
    }
    return memory;
}

static DLDevice dldevice(const block *memory) {
    moq_device device = memory->view.device;
    return (DLDevice){device.kind == MOQ_CUDA ? kDLCUDA : kDLCPU, device.index};
}

static DLTensor describe(block *memory) {
    return (DLTensor){
        .data = memory->view.data,
        .device = dldevice(memory),
        .ndim = memory->view.ndim,
        .dtype = moq_dldtype(memory->view.dtype),
        .shape = memory->view.shape,
        .strides = memory->view.stride,
    };
}

static void delete_legacy(DLManagedTensor *managed) {
    export *lent = managed->manager_ctx;
    let_go(lent->memory);
    free(lent);
}

static void delete_versioned(DLManagedTensorVersioned *managed) {
    export *lent = managed->manager_ctx;
    let_go(lent->memory);
    free(lent);
}

/* A consumer renames a capsule when it takes over; only an untouched one still owns its tensor. */
static void destroy_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
    else if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

static PyObject *lend(block *memory, bool versioned) {
    export *lent = calloc(1, sizeof *lent);
    if (!lent)
        return PyErr_NoMemory();
    lent->memory = memory;
    void *managed;
    if (versioned) {
        lent->managed.versioned = (DLManagedTensorVersioned){
            .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
            .manager_ctx = lent,
            .deleter = delete_versioned,
            .dl_tensor = describe(memory),
        };
        managed = &lent->managed.versioned;
    } else {
        lent->managed.legacy = (DLManagedTensor){
            .dl_tensor = describe(memory), .manager_ctx = lent, .deleter = delete_legacy};
        managed = &lent->managed.legacy;
    }
    PyObject *capsule =
        PyCapsule_New(managed, versioned ? "dltensor_versioned" : "dltensor", destroy_capsule);
    if (!capsule)
        free(lent);
    else
        atomic_fetch_add_explicit(&memory->holders, 1, memory_order_relaxed);
    return capsule;
}

static PyObject *owned_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *const KEYWORDS[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO", (char **)KEYWORDS, &stream, &version,
                                     &device, &copy))
        return NULL;
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "this tensor is lent, never copied");
        return NULL;
    }
    if (device != Py_None) {
        int type, index;
        if (!PyArg_Parse(device, "(ii)", &type, &index))
            return NULL;
        DLDevice is = dldevice(((owned *)self)->memory);
        if (type != (int)is.device_type || index != is.device_id) {
            PyErr_SetString(PyExc_BufferError,
                            "this tensor is on another device, and never copied");
            return NULL;
        }
    }
    int major = 0, minor = 0;
    if (version != Py_None && !PyArg_Parse(version, "(ii)", &major, &minor))
        return NULL;
    return lend(((owned *)self)->memory, major >= DLPACK_MAJOR_VERSION);
}

static PyObject *owned_device(PyObject *self, PyObject *unused) {
    DLDevice is = dldevice(((owned *)self)->memory);
    (void)unused;
    return Py_BuildValue("(ii)", (int)is.device_type, (int)is.device_id);
}

static PyObject *owned_shape(PyObject *self, void *unused) {
    const moq_tensor *view = &((owned *)self)->memory->view;
    PyObject *shape = PyTuple_New(view->ndim);
    (void)unused;
    for (int i = 0; shape && i < view->ndim; i++) {
        PyObject *extent = PyLong_FromLongLong(view->shape[i]);
        if (!extent || PyTuple_SetItem(shape, i, extent) < 0)
            Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *owned_dtype(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(moq_dtype_name(((owned *)self)->memory->view.dtype));
}

static PyObject *owned_place(PyObject *self, void *unused) {
    char text[32];
    (void)unused;
    return PyUnicode_FromString(
        moq_device_text(((owned *)self)->memory->view.device, text, sizeof text));
}

static void owned_dealloc(PyObject *self) {
    PyObject *type = (PyObject *)Py_TYPE(self);
    let_go(((owned *)self)->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"__dlpack__", (PyCFunction)(void *)owned_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None) -> capsule"},
    {"__dlpack_device__", owned_device, METH_NOARGS, "__dlpack_device__() -> (device type, index)"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ATTRIBUTES[] = {
    {"shape", owned_shape, NULL, "extents", NULL},
    {"dtype", owned_dtype, NULL, "full name of the dtype", NULL},
    {"device", owned_place, NULL, "\"cpu\" or \"cuda:N\"", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_doc, "Row-major memory of moqext's own, for every library that takes DLPack tensors."},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_tp_dealloc, (void *)owned_dealloc},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "moqext._C.OwnedTensor",
    .basicsize = sizeof(owned),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = SLOTS,
};

int moq_owned_setup(PyObject *module, moq_state *state) {
    state->boundary->owned_type = PyType_FromModuleAndSpec(module, &SPEC, NULL);
    return state->boundary->owned_type ? 0 : -1;
}

bool moq_is_owned(moq_state *state, PyObject *object) {
    return (PyObject *)Py_TYPE(object) == state->boundary->owned_type;
}

PyObject *moq_owned_new(moq_state *state, moq_dtype dtype, moq_device device, int32_t ndim,
                        const int64_t *shape, moq_tensor *view) {
    moq_err err;
    block *memory = new_block(dtype, device, ndim, shape, &err);
    if (!memory)
        return moq_raise(state, &err);
    owned *self = (owned *)PyType_GenericAlloc((PyTypeObject *)state->boundary->owned_type, 0);
    if (!self) {
        let_go(memory);
        return NULL;
    }
    self->memory = memory;
    *view = memory->view;
    return (PyObject *)self;
}
