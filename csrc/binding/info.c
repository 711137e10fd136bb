/* The facts of `info`: what was built, what this machine offers, and which kernels there are. */
#include "binding/args.h"
#include "binding/plan_object.h"
#include "binding/py_cublaslt.h"

#include "cpu/isa.h"
#include "cpu/openmp.h"
#include "cpu/threads.h"
#include "cuda/cuda.h"
#include "ops/linear_kernels.h"
#include "ops/variables.h"

#include <string.h>

#ifndef MOQ_VERSION
#error "MOQ_VERSION and the other facts are defined by setup.py"
#endif

#if defined(__clang__) /* whose version names itself */
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

static PyObject *build_info(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:O,s:s}", "version", MOQ_VERSION, "commit", MOQ_COMMIT,
                         "compiler", COMPILER, "flags", MOQ_FLAGS, "cuda",
                         moq_cuda_built() ? Py_True : Py_False, "cuda_archs", moq_cuda_archs());
}

/* Appends `item`, whose reference it takes; clears *list on failure. */
static void append(PyObject **list, PyObject *item) {
    if (!item || PyList_Append(*list, item) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(item);
}

static PyObject *cpu_isa(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyUnicode_FromString(moq_isa_name(moq_cpu_isa()));
}

static PyObject *num_threads(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyLong_FromLong(moq_num_threads());
}

static PyObject *set_num_threads(PyObject *module, PyObject *value) {
    int64_t count;
    (void)module;
    if (moq_arg_int(value, "count", 0, MOQ_MAX_THREADS, &count) < 0)
        return NULL;
    moq_set_num_threads((int)count);
    Py_RETURN_NONE;
}

static PyObject *openmp(PyObject *module, PyObject *unused) {
    const char *reason;
    (void)module;
    (void)unused;
    const moq_openmp *omp = moq_find_openmp(&reason);
    return Py_BuildValue("zz", omp ? omp->path : NULL, reason);
}

static PyObject *cublaslt(PyObject *module, PyObject *unused) {
    char reason[256];
    (void)module;
    (void)unused;
    const moq_cublaslt *found = moq_cublaslt_find_in_path(reason, sizeof reason);
    if (!found)
        return Py_BuildValue("OOs", Py_None, Py_None, reason);
    return Py_BuildValue("s(iii)O", found->path, found->version / 10000, found->version / 100 % 100,
                         found->version % 100, Py_None);
}

static PyObject *kernels(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    if (list && moq_append_kernels(&MOQ_LINEAR, list) < 0)
        Py_CLEAR(list);
    return list;
}

/* Texts of the driver and of libraries may have any bytes. */
static void append_text(void *list, const char *text) {
    if (*(PyObject **)list)
        append(list, PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace"));
}

static PyObject *check_variables(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    if (list)
        moq_check_variables(append_text, &list);
    return list;
}

static PyObject *cuda_devices(PyObject *module, PyObject *unused) {
    (void)unused;
    moq_state *state = moq_module_state(module);
    moq_err err;
    int count = 0;
    moq_status status;
    Py_BEGIN_ALLOW_THREADS
    status = moq_cuda_device_count(&count, &err);
    Py_END_ALLOW_THREADS
    if (status != MOQ_OK)
        return moq_raise(state, &err);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        moq_cuda_device device;
        PyObject *row = NULL;
        if (moq_cuda_query_device(i, &device, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            row = Py_BuildValue("{s:i,s:s,s:(ii),s:i,s:K}", "index", i, "name", device.name,
                                "capability", device.major, device.minor, "sm_count",
                                device.sm_count, "memory", (unsigned long long)device.memory);
        append(&list, row);
    }
    return list;
}

static PyObject *cuda_versions(PyObject *module, PyObject *unused) {
    int runtime, driver;
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    moq_cuda_versions(&runtime, &driver);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ii", runtime, driver);
}

static PyMethodDef METHODS[] = {
    {"build_info", build_info, METH_NOARGS, "build_info() -> dict: how this extension was built"},
    {"cpu_isa", cpu_isa, METH_NOARGS, "cpu_isa() -> str: level of vector extensions in use"},
    {"num_threads", num_threads, METH_NOARGS, "num_threads() -> int: threads of a large call"},
    {"set_num_threads", set_num_threads, METH_O, "set_num_threads(count): 0 is the default"},
    {"openmp", openmp, METH_NOARGS,
     "openmp() -> (path of the OpenMP runtime or None, reason why there is none or None)"},
    {"cublaslt", cublaslt, METH_NOARGS,
     "cublaslt() -> (path of the library or None, its version or None, reason or None); opens it"},
    {"kernels", kernels, METH_NOARGS,
     "kernels() -> list of str: family:name of every linear kernel"},
    {"check_variables", check_variables, METH_NOARGS,
     "check_variables() -> list of str: what is wrong with variables of the environment"},
    {"cuda_versions", cuda_versions, METH_NOARGS,
     "cuda_versions() -> (runtime, driver): 13000 for 13.0, 0 where there is none"},
    {"cuda_devices", cuda_devices, METH_NOARGS,
     "cuda_devices() -> list of dict; RuntimeError says why there are none"},
    {NULL, NULL, 0, NULL},
};

int moq_add_info(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
