/* Memory of our own, lent out through `__dlpack__`: how a result reaches a library that only
 * imports finished memory.
 *
 * The block counts its holders in plain C: the Python object is one, every exported capsule or
 * tensor another. The deleter a consumer calls, on any thread and with or without the GIL, touches
 * nothing of Python. */
#include "binding/boundary.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* What the DLPack specification asks of `data`; consumers copy what is aligned less than they
 * like. */
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
    free(memory->view.data);
    free(memory);
}

static block *new_block(moq_dtype dtype, int32_t ndim, const int64_t *shape) {
    block *memory = calloc(1, sizeof *memory);
    if (!memory)
        return NULL;
    atomic_init(&memory->holders, 1);
    memory->view.dtype = dtype;
    memory->view.ndim = ndim;
    memcpy(memory->view.shape, shape, (size_t)ndim * sizeof *shape);
    moq_tensor_set_contiguous(&memory->view);
    size_t bytes = (size_t)moq_tensor_numel(&memory->view) * moq_dtype_size(dtype);
    size_t padded = (bytes / DATA_ALIGNMENT + 1) * DATA_ALIGNMENT;
    memory->view.data = aligned_alloc(DATA_ALIGNMENT, padded);
    if (!memory->view.data) {
        free(memory);
        return NULL;
    }
    memset(memory->view.data, 0, bytes);
    return memory;
}

static DLTensor describe(block *memory) {
    return (DLTensor){
        .data = memory->view.data,
        .device = {kDLCPU, 0},
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
        if (type != kDLCPU) {
            PyErr_SetString(PyExc_BufferError, "this tensor is on the CPU");
            return NULL;
        }
    }
    int major = 0, minor = 0;
    if (version != Py_None && !PyArg_Parse(version, "(ii)", &major, &minor))
        return NULL;
    return lend(((owned *)self)->memory, major >= DLPACK_MAJOR_VERSION);
}

static PyObject *owned_device(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return Py_BuildValue("(ii)", kDLCPU, 0);
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
    {"__dlpack_device__", owned_device, METH_NOARGS, "__dlpack_device__() -> (1, 0)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_doc, "A result on its way to the library of the caller's arrays."},
    {Py_tp_methods, METHODS},
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

PyObject *moq_owned_new(moq_state *state, moq_dtype dtype, int32_t ndim, const int64_t *shape,
                        moq_tensor *view) {
    block *memory = new_block(dtype, ndim, shape);
    if (!memory)
        return PyErr_NoMemory();
    owned *self = (owned *)PyType_GenericAlloc((PyTypeObject *)state->boundary->owned_type, 0);
    if (!self) {
        let_go(memory);
        return NULL;
    }
    self->memory = memory;
    *view = memory->view;
    return (PyObject *)self;
}
