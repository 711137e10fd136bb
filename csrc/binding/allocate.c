/* New tensors of the caller's own kind: NumPy arrays, tensors of a framework with the DLPack
 * exchange API, and for libraries that can only import, memory of ours that they adopt when it is
 * filled. See moq_arg_new_like and moq_arg_finish in py_tensor.h. */
#include "binding/py_tensor.h"

#include "binding/boundary.h"

#include <stdio.h>
#include <string.h>

static bool is_raw(moq_dtype dtype) {
    return dtype == MOQ_DT_U8 || dtype == MOQ_DT_I8 || dtype == MOQ_DT_U16 || dtype == MOQ_DT_I16;
}

/* The dtype to store a `dtype` result in, as far as `like` says: the carrier the caller uses, if
 * they do, uint8 for packed fp4, else the dtype itself. */
static moq_dtype stored_as(const moq_arg *like, moq_dtype dtype) {
    bool carried = like->stored != like->view.dtype && is_raw(like->stored);
    if (carried && !is_raw(dtype) && moq_dtype_size(like->stored) == moq_dtype_size(dtype))
        return like->stored;
    if (dtype == MOQ_DT_E2M1X2 && like->stored != MOQ_DT_E2M1X2)
        return MOQ_DT_U8;
    return dtype;
}

/* --- the exchange API */

/* The error that an allocator reports through its callback, without Python, because it may have
 * released the GIL. */
typedef struct {
    char kind[32];
    char message[512];
} allocator_error;

static void record_error(void *context, const char *kind, const char *message) {
    allocator_error *error = context;
    snprintf(error->kind, sizeof error->kind, "%s", kind ? kind : "");
    snprintf(error->message, sizeof error->message, "%s", message ? message : "");
}

static void raise_allocator_error(const allocator_error *error) {
    if (PyErr_Occurred())
        return;
    PyObject *type = strcmp(error->kind, "MemoryError") == 0  ? PyExc_MemoryError
                     : strcmp(error->kind, "ValueError") == 0 ? PyExc_ValueError
                     : strcmp(error->kind, "TypeError") == 0  ? PyExc_TypeError
                                                              : PyExc_RuntimeError;
    PyErr_Format(type, "out: the allocator of x's framework failed: %s",
                 error->message[0] ? error->message : "no reason given");
}

/* Checks that the allocator made what was asked for. */
static int check_allocation(const DLManagedTensorVersioned *managed, const moq_tensor *wanted,
                            moq_tensor *view) {
    if (managed->version.major != DLPACK_MAJOR_VERSION ||
        moq_dltensor_view(&managed->dl_tensor, managed->flags, "out", view) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_BufferError,
                            "out: the allocator of x's framework uses another DLPack version");
        return -1;
    }
    bool same = view->dtype == wanted->dtype && view->ndim == wanted->ndim &&
                view->device.kind == wanted->device.kind &&
                view->device.index == wanted->device.index && !view->readonly &&
                memcmp(view->shape, wanted->shape, (size_t)wanted->ndim * sizeof *view->shape) == 0;
    if (same && moq_tensor_is_contiguous(view))
        return 0;
    PyErr_SetString(PyExc_BufferError,
                    "out: the allocator of x's framework returned another tensor than asked for");
    return -1;
}

/* Memory that the caller owns; NULL with an exception. */
static DLManagedTensorVersioned *exchange_allocate(const DLPackExchangeAPI *api,
                                                   const moq_tensor *wanted, moq_tensor *view) {
    if (!api->managed_tensor_allocator || !api->managed_tensor_to_py_object_no_sync) {
        PyErr_SetString(PyExc_TypeError,
                        "out: x's framework exports no allocator, pass out= instead");
        return NULL;
    }
    int64_t shape[MOQ_MAX_NDIM];
    memcpy(shape, wanted->shape, sizeof shape);
    DLTensor prototype = {
        .device = {wanted->device.kind == MOQ_CUDA ? kDLCUDA : kDLCPU, wanted->device.index},
        .ndim = wanted->ndim,
        .dtype = moq_dldtype(wanted->dtype),
        .shape = shape,
    };
    DLManagedTensorVersioned *managed = NULL;
    allocator_error error;
    error.kind[0] = error.message[0] = 0;
    if (api->managed_tensor_allocator(&prototype, &managed, &error, record_error) != 0 ||
        !managed) {
        raise_allocator_error(&error);
        return NULL;
    }
    if (check_allocation(managed, wanted, view) == 0)
        return managed;
    moq_managed_release(managed);
    return NULL;
}

static PyObject *exchange_new(const DLPackExchangeAPI *api, const moq_tensor *wanted,
                              moq_arg *out) {
    void *object = NULL;
    DLManagedTensorVersioned *managed = exchange_allocate(api, wanted, &out->view);
    if (!managed)
        return NULL;
    /* Steals `managed`, on failure too. */
    if (api->managed_tensor_to_py_object_no_sync(managed, &object) != 0 || !object) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_BufferError, "out: x's framework did not take its own tensor");
        return NULL;
    }
    out->exchange = api;
    return object;
}

/* --- libraries that import */

/* The array API namespace of `object`; without one, the top-level package its type comes from. A
 * new reference, or NULL with or without an exception. */
static PyObject *library_of(PyObject *object) {
    PyObject *namespace = PyObject_CallMethod(object, "__array_namespace__", NULL);
    if (namespace || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return namespace;
    PyErr_Clear();
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    PyObject *parts = module ? PyObject_CallMethod(module, "partition", "s", ".") : NULL;
    PyObject *package = parts ? PySequence_GetItem(parts, 0) : NULL;
    PyObject *found =
        package ? PyDict_GetItemWithError(PyImport_GetModuleDict(), package) : NULL; /* borrowed */
    Py_XINCREF(found);
    Py_XDECREF(package);
    Py_XDECREF(parts);
    Py_XDECREF(module);
    return found;
}

/* The `from_dlpack` that makes arrays of the library of `like`; TypeError without one. */
static PyObject *find_importer(const moq_arg *like) {
    PyObject *library = library_of(like->object);
    PyObject *importer = library ? PyObject_GetAttrString(library, "from_dlpack") : NULL;
    Py_XDECREF(library);
    if (importer || (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)))
        return importer;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "out: cannot make a tensor of %s's kind (%R), pass out= instead",
                 like->name, Py_TYPE(like->object));
    return NULL;
}

static PyObject *no_cuda_tensor(const moq_arg *like) {
    PyErr_Format(PyExc_TypeError,
                 "out: cannot make a CUDA tensor of %s's kind (%R), pass out= instead", like->name,
                 Py_TYPE(like->object));
    return NULL;
}

/* `library.empty(shape, dtype=name)`, for libraries whose arrays can be written. */
static PyObject *call_empty(PyObject *library, const moq_tensor *wanted) {
    PyObject *shape = PyTuple_New(wanted->ndim);
    for (int i = 0; shape && i < wanted->ndim; i++) {
        PyObject *extent = PyLong_FromLongLong(wanted->shape[i]);
        if (!extent || PyTuple_SetItem(shape, i, extent) < 0)
            Py_CLEAR(shape);
    }
    PyObject *empty = shape ? PyObject_GetAttrString(library, "empty") : NULL;
    PyObject *object =
        empty ? PyObject_CallFunction(empty, "Os", shape, moq_dtype_name(wanted->dtype)) : NULL;
    Py_XDECREF(empty);
    Py_XDECREF(shape);
    return object;
}

/* A CUDA array of a library without the exchange API (CuPy), on its current device. */
static PyObject *library_new(moq_state *state, const moq_producer *producer, const moq_arg *like,
                             const moq_tensor *wanted, moq_arg *out) {
    bool legacy;
    PyObject *library = producer->in_place ? library_of(like->object) : NULL;
    PyObject *object = library ? call_empty(library, wanted) : NULL;
    Py_XDECREF(library);
    if (!object) {
        if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_AttributeError))
            no_cuda_tensor(like);
        return NULL;
    }
    moq_producer own;
    if (moq_producer_of(state, object, &own) == 0 && own.protocol == MOQ_FROM_DLPACK &&
        moq_dlpack_take(state, &own, object, "out", true, out, &legacy) == 0) {
        if (out->view.dtype == wanted->dtype && moq_tensor_is_contiguous(&out->view) &&
            out->view.device.kind == wanted->device.kind &&
            out->view.device.index == wanted->device.index)
            return object;
        moq_arg_release(out);
    }
    Py_DECREF(object);
    return PyErr_Occurred() ? NULL : no_cuda_tensor(like);
}

static PyObject *imported_new(moq_state *state, const moq_arg *like, const moq_tensor *wanted,
                              moq_arg *out) {
    PyObject *importer = find_importer(like);
    if (!importer)
        return NULL;
    PyObject *object = moq_owned_new(state, wanted->dtype, wanted->device, wanted->ndim,
                                     wanted->shape, &out->view);
    if (!object) {
        Py_DECREF(importer);
        return NULL;
    }
    out->adopt = importer;
    return object;
}

/* --- */

static PyObject *numpy_new(moq_state *state, moq_tensor *wanted, moq_arg *out) {
    PyObject *array = moq_numpy_new(state, wanted->dtype, wanted->ndim, wanted->shape);
    if (array && moq_numpy_take(state, array, "out", out) < 0)
        Py_CLEAR(array);
    return array;
}

PyObject *moq_arg_new_like(moq_state *state, const moq_arg *like, moq_dtype dtype, int32_t ndim,
                           const int64_t *shape, moq_arg *out) {
    *out = (moq_arg){.name = "out"};
    moq_tensor wanted = {
        .dtype = stored_as(like, dtype), .device = like->view.device, .ndim = ndim};
    memcpy(wanted.shape, shape, (size_t)ndim * sizeof *shape);
    if (moq_tensor_numel(&wanted) < 0) {
        PyErr_SetString(PyExc_ValueError, "out: the product of the result's shape overflows");
        return NULL;
    }
    moq_producer producer;
    if (moq_producer_of(state, like->object, &producer) < 0)
        return NULL;
    PyObject *object = NULL;
    if (producer.protocol == MOQ_FROM_NUMPY)
        object = numpy_new(state, &wanted, out);
    else if (producer.protocol == MOQ_FROM_EXCHANGE)
        object = exchange_new(producer.exchange, &wanted, out);
    else if (moq_is_owned(state, like->object))
        object = moq_owned_new(state, wanted.dtype, wanted.device, ndim, shape, &out->view);
    else if (wanted.device.kind == MOQ_CUDA)
        object = library_new(state, &producer, like, &wanted, out);
    else
        object = imported_new(state, like, &wanted, out);
    if (!object)
        return NULL;
    out->stored = out->view.dtype;
    out->view.dtype = dtype;
    out->object = Py_NewRef(object);
    return object;
}

int moq_arg_take_memory(moq_state *state, const moq_arg *like, int64_t bytes, moq_arg *out) {
    *out = (moq_arg){.name = "workspace"};
    if (bytes == 0)
        return 0;
    if (!like->exchange) {
        PyObject *object = moq_arg_new_like(state, like, MOQ_DT_U8, 1, &bytes, out);
        Py_XDECREF(object); /* *out has another reference */
        return object ? 0 : -1;
    }
    moq_tensor wanted = {
        .dtype = MOQ_DT_U8, .device = like->view.device, .ndim = 1, .shape = {bytes}};
    out->managed = exchange_allocate(like->exchange, &wanted, &out->view);
    return out->managed ? 0 : -1;
}

PyObject *moq_arg_output(moq_state *state, PyObject *given, const moq_arg *like, moq_dtype dtype,
                         int32_t ndim, const int64_t *shape, moq_arg *out) {
    if (!given || given == Py_None)
        return moq_arg_new_like(state, like, dtype, ndim, shape, out);
    if (moq_arg_take_output(state, given, "out", out) < 0)
        return NULL;
    if (moq_arg_apply_format(out, dtype) == 0 && moq_arg_refuse_overlap(out, like) == 0)
        return Py_NewRef(given);
    moq_arg_release(out);
    return NULL;
}

PyObject *moq_arg_finish(moq_state *state, PyObject *result, moq_arg *out, int status) {
    (void)state;
    PyObject *adopt = Py_XNewRef(out->adopt);
    moq_arg_release(out);
    if (status < 0) {
        Py_CLEAR(result);
    } else if (adopt) {
        PyObject *adopted = PyObject_CallFunctionObjArgs(adopt, result, NULL);
        Py_DECREF(result);
        result = adopted;
    }
    Py_XDECREF(adopt);
    return result;
}
