/* Shared parts of the tensor boundary's files; users of the boundary need only py_tensor.h. Each
 * file uses those above it:
 *
 *   tensor_arg.c    an argument: its release, its dtype, the memory that it shares
 *   producer.c      what a type offers, remembered per type
 *   numpy_tensor.c  NumPy arrays: read by their struct, made through the C API, ml_dtypes
 *   dlpack.c        DLTensors of every origin checked and turned into views
 *   owned.c         memory of our own behind an object with __dlpack__
 *   py_tensor.c     tensors in: by which way, as an input or an output
 *   allocate.c      new tensors of the caller's kind
 *   workspace.c     memory that calls work in
 *   tensor_setup.c  what is remembered, made and given back with the module */
#ifndef MOQ_BINDING_BOUNDARY_H
#define MOQ_BINDING_BOUNDARY_H

#include "binding/producer.h"
#include "binding/tensor_arg.h"

/* The ml_dtypes types that have a moq_dtype. */
#define MOQ_ML_DTYPES 4

/* Blocks that are kept, each for a stream of its own. */
#define MOQ_KEPT_BLOCKS 8

/* Memory kept for the next call on a stream. */
typedef struct {
    DLManagedTensorVersioned *managed; /* owned; NULL for a free place */
    const DLPackExchangeAPI *exchange; /* of the framework that lent it */
    moq_tensor view;
    void *stream;
} moq_kept_block;

struct moq_boundary {
    moq_producer producer[MOQ_PRODUCER_SLOTS];
    bool ml_dtypes_known;              /* the module was in sys.modules when last asked */
    bool ml_dtypes_absent;             /* it could not be imported */
    int ml_type_num[MOQ_ML_DTYPES];    /* NumPy's numbers for them; NPY_NOTYPE where missing */
    PyObject *ml_descr[MOQ_ML_DTYPES]; /* strong: their dtype objects */
    PyObject *owned_type;              /* owned.c */
    PyObject *empty_tuple;
    moq_kept_block kept[MOQ_KEPT_BLOCKS];
    unsigned next_kept;
};

/* --- numpy_tensor.c */

int moq_numpy_setup(void);
/* Fills view and stored from an array, exact or of a subclass. */
int moq_numpy_take(moq_state *state, PyObject *array, const char *name, moq_arg *out);
/* A new array, of the ml_dtypes type where that package is installed, else of a raw carrier. */
PyObject *moq_numpy_new(moq_state *state, moq_dtype dtype, int32_t ndim, const int64_t *shape);

/* --- dlpack.c */

/* Checks a DLTensor and fills the view; BufferError or TypeError names the argument and the field.
 * The producer's shape and strides are copied. */
int moq_dltensor_view(const DLTensor *tensor, uint64_t flags, const char *name, moq_tensor *view);
/* The DLPack type of a moq_dtype; every one has one. */
DLDataType moq_dldtype(moq_dtype dtype);
/* Takes through the exchange API. An output comes in the owning form, which alone has flags. */
int moq_exchange_take(const DLPackExchangeAPI *api, PyObject *object, const char *name, bool output,
                      moq_arg *out);
/* Takes through `__dlpack__`; *legacy tells that the capsule could not say read-only. */
int moq_dlpack_take(moq_state *state, const moq_producer *producer, PyObject *object,
                    const char *name, bool output, moq_arg *out, bool *legacy);
/* Adds "argument 'x'" to the exception a producer raised. */
void moq_note_argument(const char *name);

/* --- owned.c */

int moq_owned_setup(PyObject *module, moq_state *state);
/* An object with __dlpack__ and __dlpack_device__, zero-filled on the host; fills the view. */
PyObject *moq_owned_new(moq_state *state, moq_dtype dtype, moq_device device, int32_t ndim,
                        const int64_t *shape, moq_tensor *view);
bool moq_is_owned(moq_state *state, PyObject *object);

#endif
