/* Tensor arguments: see tensor_arg.h. */
#include "binding/tensor_arg.h"

#include "third_party/dlpack.h"

/* ---- memory ---- */

void moq_managed_release(DLManagedTensorVersioned *managed) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (managed->deleter)
        managed->deleter(managed);
    PyErr_Restore(type, value, traceback);
}

void moq_arg_release(moq_arg *arg) {
    if (arg->managed) {
        moq_managed_release(arg->managed);
        arg->managed = NULL;
    }
    if (arg->keeper) { /* its destructor is a stranger's: an exception in flight stays ours */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        Py_CLEAR(arg->keeper);
        PyErr_Restore(type, value, traceback);
    }
    Py_CLEAR(arg->adopt);
    Py_CLEAR(arg->object);
}

/* ---- dtypes ---- */

/* True if memory of one dtype may be read as another of its width. */
static bool carries(moq_dtype stored, moq_dtype dtype) {
    switch (moq_dtype_size(dtype)) {
    case 1:
        return stored == MOQ_DT_U8;
    case 2:
        return stored == MOQ_DT_U16 || stored == MOQ_DT_I16;
    default:
        return false;
    }
}

static int read_as(moq_arg *arg, moq_dtype dtype, bool fits, const char *carrier) {
    if (!fits) {
        PyErr_Format(PyExc_TypeError, "%s: expected %s%s, got %s", arg->name, moq_dtype_name(dtype),
                     carrier, moq_dtype_name(arg->stored));
        return -1;
    }
    arg->view.dtype = dtype;
    return 0;
}

int moq_arg_reinterpret(moq_arg *arg, moq_dtype dtype) {
    bool fits = arg->stored == dtype || carries(arg->stored, dtype);
    return read_as(arg, dtype, fits, moq_dtype_carrier_text(dtype));
}

int moq_arg_apply_format(moq_arg *arg, moq_dtype format) {
    moq_dtype stored = arg->stored;
    bool byte = moq_dtype_size(format) == 1 && stored == MOQ_DT_I8;
    bool fits = stored == format || carries(stored, format) || byte;
    return read_as(arg, format, fits, " or a raw carrier of its width");
}

/* ---- memory that two arguments share ---- */

static int refuse_overlap(const moq_arg *out, const moq_arg *other, const char *which) {
    if (!moq_tensor_overlap(&out->view, &other->view))
        return 0;
    PyErr_Format(PyExc_BufferError, "%s: shares memory with %s, which is %s", out->name,
                 other->name, which);
    return -1;
}

int moq_arg_refuse_overlap(const moq_arg *out, const moq_arg *in) {
    return refuse_overlap(out, in, "read while it is written");
}

int moq_arg_refuse_both_written(const moq_arg *out, const moq_arg *other) {
    return refuse_overlap(out, other, "written too");
}
