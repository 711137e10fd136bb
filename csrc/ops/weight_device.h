/* Weight processing on a CUDA device, as its files share it: weight_device_scales.c decides which
 * scales stay on the device and moves them, weight_zero_scales.c looks at codes under scales of
 * zero on the host, and weight_prepare_cuda.c has the codes and the order of the steps. */
#ifndef MOQ_OPS_WEIGHT_DEVICE_H
#define MOQ_OPS_WEIGHT_DEVICE_H

#include "cuda/tensor/cuda_prepare.h"
#include "ops/params.h"
#include "ops/weight_scales.h"

typedef struct {
    const moq_weight *w;
    const moq_weight_sources *sources;
    moq_params *params;
    void *stream;
    bool fresh;
    bool only_checks;
    bool checked;
    bool weight_stays; /* the weight's scales are on the device, of 16 or 32 bits, and not read */
    bool input_stays;  /* the scales of x are there, and not read */
    const float *row_factor;   /* as in moq_prepare_mode */
    moq_prepare_scales scales; /* on the host: all that do not stay */
    moq_findings *note;        /* what was met, for the host */
    moq_findings *found;       /* where checks tell it: there, or where later kernels see it */
    float *scale;              /* of rows or blocks, on the device */
    float *factor;             /* the scales of rows where there are some, else NULL */
    float *part_factor;        /* the scales of the partitions of a packed stack, else NULL */
    uint64_t *bad;             /* while the first bad code is looked for */
} moq_prepare_job;

/* ---- weight_device_scales.c ---- */

/* Decides which scales stay on the device and reads the others. The caller frees
 * job->scales.memory, also where this fails. */
moq_status moq_prepare_read_job(moq_prepare_job *job, moq_err *err);
/* The failure of the first bad one among the scales that stayed on the device, if there is one. */
moq_status moq_prepare_bad_scale(const moq_prepare_job *job, moq_err *err);
/* Reads the weight's scales that stayed on the device after all. */
moq_status moq_prepare_download_scales(moq_prepare_job *job, moq_err *err);

/* Float32 scales of a matrix that exist on the device, of rows or blocks, and of all experts. */
int64_t moq_prepare_scale_count(const moq_weight *weight);
int64_t moq_prepare_all_scales(const moq_prepare_job *job);
/* The address of the scale of partition p. */
const void *moq_prepare_scale_at(const moq_source *source, int32_t p);

/* Queues the scales of rows or blocks to job->scale. */
moq_status moq_prepare_place_scales(const moq_prepare_job *job, moq_err *err);
/* Queues one scale for each row to `out`, from those of partitions on the host. */
moq_status moq_prepare_fill_rows(const moq_prepare_job *job, float *out, moq_err *err);
/* Queues job->scale to outputs that are not fresh. */
moq_status moq_prepare_write_scales(const moq_prepare_job *job, moq_err *err);
/* Queues the factors of a stack's partitions to job->part_factor; what those that were on the
 * device are is told. */
moq_status moq_prepare_place_part_factors(const moq_prepare_job *job, moq_err *err);
/* Queues a look at the scales of x that are on the device, a copy of them, or both. */
moq_status moq_prepare_copy_input_scales(const moq_prepare_job *job, bool look, bool copy,
                                         moq_err *err);
/* Queues the scales of x that are on the host, of which there may be none. */
bool moq_prepare_has_input_scales(const moq_prepare_job *job);
moq_status moq_prepare_write_input_scales(const moq_prepare_job *job, moq_err *err);

/* ---- weight_zero_scales.c ---- */

/* True for a partition of an expert that means zero, whatever its codes are, where that is known.
 */
bool moq_prepare_is_zero(const moq_prepare_job *job, int64_t expert, int32_t p);
/* True where one of the weight's scales on the host is zero. */
bool moq_prepare_has_zero_scale(const moq_prepare_job *job);
/* Looks on the host at the e2m1 codes of partitions whose second-level scale is zero. */
moq_status moq_prepare_check_zero_parts(const moq_prepare_job *job, moq_err *err);
/* Checks FP8 codes and their scales on the host, and writes them from there unless only checks are
 * wanted. */
moq_status moq_prepare_on_host(moq_prepare_job *job, moq_err *err);

#endif
