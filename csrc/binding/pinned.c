/* `_C.PinnedMemory(nbytes, device)`: memory of the host that copies to and from a device go to
 * directly, with the buffer protocol. */
#include "binding/args.h"
#include "cuda/cuda.h"

typedef struct {
    PyObject_HEAD
    void *data;
    Py_ssize_t size;
    int32_t device;
} pinned;

static PyObject *pinned_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *const KEYWORDS[] = {"nbytes", "device", NULL};
    PyObject *count, *where;
    moq_device device;
    moq_status status;
    int64_t bytes;
    void *data;
    moq_err err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", (char **)KEYWORDS, &count, &where) ||
        moq_arg_int(count, "nbytes", 1, PY_SSIZE_T_MAX, &bytes) < 0 ||
        moq_arg_device(where, "device", &device) < 0)
        return NULL;
    if (device.kind != MOQ_CUDA)
        return PyErr_Format(PyExc_ValueError, "device: expected \"cuda:N\", got %R", where);
    Py_BEGIN_ALLOW_THREADS
    status = moq_cuda_new_pinned(device.index, (size_t)bytes, &data, &err);
    Py_END_ALLOW_THREADS
    if (status != MOQ_OK)
        return moq_raise(PyType_GetModuleState(type), &err);
    pinned *self = (pinned *)PyType_GenericAlloc(type, 0);
    if (!self) {
        moq_cuda_delete_pinned(device.index, data);
        return NULL;
    }
    self->data = data;
    self->size = (Py_ssize_t)bytes;
    self->device = device.index;
    return (PyObject *)self;
}

static void pinned_dealloc(PyObject *self) {
    PyObject *type = (PyObject *)Py_TYPE(self);
    moq_cuda_delete_pinned(((pinned *)self)->device, ((pinned *)self)->data);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int pinned_buffer(PyObject *self, Py_buffer *view, int flags) {
    const pinned *memory = (pinned *)self;
    return PyBuffer_FillInfo(view, self, memory->data, memory->size, 0, flags);
}

static PyType_Slot SLOTS[] = {
    {Py_tp_doc, "PinnedMemory(nbytes, device): page-locked bytes of the host, as a buffer."},
    {Py_tp_new, (void *)pinned_new},
    {Py_tp_dealloc, (void *)pinned_dealloc},
    {Py_bf_getbuffer, (void *)pinned_buffer},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "moqext._C.PinnedMemory",
    .basicsize = sizeof(pinned),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = SLOTS,
};

int moq_add_pinned(PyObject *module, moq_state *state) {
    (void)state;
    PyObject *type = PyType_FromModuleAndSpec(module, &SPEC, NULL);
    int status = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return status;
}
