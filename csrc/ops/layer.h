/* The facts of any problem that the rules and the path of a call need. */
#ifndef MOQ_OPS_LAYER_H
#define MOQ_OPS_LAYER_H

#include "core/linear.h"

typedef struct {
    const char *algo;     /* canonical name of the algorithm */
    moq_dtype dtype;      /* of the activations, in and out, */
    moq_dtype x_dtype;    /* but for what comes in as this, */
    const char *x_scheme; /* codes that this scheme of ops/quantize.h makes */
    bool quantized_input; /* x is such codes */
    bool low_rank;        /* a low-rank part is added to its outputs */
    bool batch_invariant; /* one kernel runs all numbers of tokens */
    moq_compute compute;  /* as the layer asks for */
    moq_compute choice;   /* what "auto" may multiply beside exact products */
    moq_device device;
    const moq_target *target; /* the problem's */
    int32_t group_size;       /* columns that share a block scale; 0 where it does not apply */
} moq_layer;

/* Describes the linear that a problem is, or begins with, as experts do. */
moq_layer moq_describe_layer(const void *problem);

#endif
