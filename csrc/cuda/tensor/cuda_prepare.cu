/* Weight processing on the device (cuda_prepare.h).
 *
 * Codes: out[row, column] = codes[row, column]. A kernel reports whether the rule forbids one, or
 * the first of them. The second dimension of a grid goes over the experts of a stack.
 *
 * Bound: memory. A thread moves 16 bytes and checks them in between, or only checks four times as
 * many. Rows without gaps form one long row, so that only its end is uneven; rows that are not
 * aligned to 16 bytes go byte by byte. A copy of codes that were just checked begins at their end,
 * which is still in the cache. */
#include "cuda/tensor/cuda_prepare.h"

#include "cuda/device/load.h"
#include "cuda/runtime/launch.h"

#include <pthread.h>

namespace moq::preparation {

#define THREADS   256
#define LOOKED_AT 4 /* pieces of a thread that only looks at them */

/* ---- copies ---- */

/* 0xff in each byte of four codes that is bad. */
static __device__ __forceinline__ uint32_t bad_bytes(uint32_t codes, moq_code_rule rule) {
    if (rule == MOQ_CODES_E4M3)
        return __vcmpeq4(codes & 0x7f7f7f7fu, 0x7f7f7f7fu);
    if (rule == MOQ_CODES_BLOCK_SCALE)
        return __vcmpgeu4(codes, 0x7f7f7f7fu) & ~__vcmpeq4(codes, 0x80808080u);
    return 0;
}

/* Returns the byte of the first bad code in a piece, or -1. */
static __device__ __forceinline__ int first_bad(uint8_t code, moq_code_rule rule) {
    return bad_bytes(code, rule) & 0xff ? 0 : -1;
}

static __device__ __forceinline__ int first_bad(const uint4 &codes, moq_code_rule rule) {
    uint32_t x = bad_bytes(codes.x, rule), y = bad_bytes(codes.y, rule);
    uint32_t z = bad_bytes(codes.z, rule), w = bad_bytes(codes.w, rule);
    if (!(x | y | z | w))
        return -1;
    uint32_t word = x ? x : y ? y : z ? z : w;
    return (x ? 0 : y ? 4 : z ? 8 : 12) + (__ffs((int)word) - 1) / 8;
}

static __device__ __forceinline__ void tell_bad(const moq_code_copy &c, int64_t position) {
    if (c.bad)
        atomicMin((unsigned long long *)c.bad, (unsigned long long)position);
    else
        c.found->bad_code = 1;
}

static __device__ __forceinline__ void set_zero(uint8_t &piece) {
    piece = 0;
}

static __device__ __forceinline__ void set_zero(uint4 &piece) {
    piece = make_uint4(0, 0, 0, 0);
}

/* Checks and copies codes: `chunks` blocks have a row, PIECES a thread, a block's width apart. */
template <typename Piece, int PIECES>
static __global__ void __launch_bounds__(THREADS) copy_codes(moq_code_copy c, unsigned chunks) {
    unsigned block = c.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    unsigned expert = c.backwards ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    unsigned row = block / chunks, chunk = block % chunks;
    int64_t pieces = c.columns / (int64_t)sizeof(Piece);
    int64_t begin = (int64_t)chunk * THREADS * PIECES + threadIdx.x;
    const Piece *from = (const Piece *)(c.codes + expert * c.step + row * c.stride);
    Piece piece[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        set_zero(piece[i]);
        if (begin + i * THREADS < pieces)
            piece[i] = from[begin + i * THREADS];
    }
#pragma unroll
    for (int i = PIECES; i-- > 0;) {
        int at = first_bad(piece[i], c.rule);
        int64_t column = (begin + i * THREADS) * (int64_t)sizeof(Piece) + at;
        if (at >= 0)
            tell_bad(c, c.first + expert * c.span + row * c.columns + column);
    }
    if (!c.out || moq_has_met(c.unless, c.found))
        return;
    Piece *to = (Piece *)(c.out + expert * c.span + row * c.columns);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        if (begin + i * THREADS < pieces)
            to[begin + i * THREADS] = piece[i];
    }
}

static bool is_aligned(const void *pointer, int64_t bytes) {
    return (uintptr_t)pointer % (uintptr_t)bytes == 0;
}

extern "C" moq_status moq_cuda_copy_codes(const moq_code_copy *copy, void *stream, moq_err *err) {
    moq_code_copy c = *copy;
    if (c.stride == c.columns || c.rows == 1) {
        c.columns *= c.rows;
        c.rows = 1;
        c.stride = 0;
    }
    bool steps_wide = c.experts == 1 || (c.step % 16 == 0 && c.span % 16 == 0);
    bool wide = c.columns % 16 == 0 && c.stride % 16 == 0 && is_aligned(c.codes, 16) &&
                is_aligned(c.out, 16) && steps_wide;
    int64_t per_block = THREADS * (c.out ? 1 : LOOKED_AT) * (wide ? 16 : 1);
    unsigned chunks = (unsigned)((c.columns + per_block - 1) / per_block);
    const void *copying =
        wide ? (const void *)copy_codes<uint4, 1> : (const void *)copy_codes<uint8_t, 1>;
    const void *looking = wide ? (const void *)copy_codes<uint4, LOOKED_AT>
                               : (const void *)copy_codes<uint8_t, LOOKED_AT>;
    moq_launch launch = {.what = "prepare: copying codes",
                         .kernel = c.out ? copying : looking,
                         .grid = dim3(chunks * (unsigned)c.rows, (unsigned)c.experts),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&c, &chunks};
    return moq_cuda_launch(&launch, args, err);
}

static __global__ void __launch_bounds__(THREADS)
    fill_floats(float *out, float value, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count)
        out[i] = value;
}

extern "C" moq_status moq_cuda_fill_floats(float *out, float value, int64_t count, void *stream,
                                           moq_err *err) {
    moq_launch launch = {.what = "prepare: factors of rows",
                         .kernel = (const void *)fill_floats,
                         .grid = dim3((unsigned)((count + THREADS - 1) / THREADS)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&out, &value, &count};
    return moq_cuda_launch(&launch, args, err);
}

static __global__ void __launch_bounds__(THREADS) copy_scales(moq_scale_copy c) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= c.count)
        return;
    const char *scales = (const char *)c.scales + blockIdx.y * c.from_step;
    float scale = moq_load_one(scales, i * c.step, c.dtype);
    bool beyond = (scale != 0 && scale <= c.above) || (c.most > 0 && scale > c.most);
    if (c.bad && (!(scale >= 0) || __float_as_uint(scale) == 0x7f800000u || beyond))
        *c.bad = 1;
    if (c.zero && scale == 0)
        *c.zero = 1;
    if (c.out && !moq_has_met(c.unless, c.found))
        c.out[blockIdx.y * c.out_step + i] = scale;
}

extern "C" moq_status moq_cuda_copy_scales(const moq_scale_copy *copy, void *stream, moq_err *err) {
    moq_scale_copy c = *copy;
    if (!c.out && c.step == 0)
        c.count = 1;
    moq_launch launch = {
        .what = "prepare: scales",
        .kernel = (const void *)copy_scales,
        .grid = dim3((unsigned)((c.count + THREADS - 1) / THREADS), (unsigned)c.experts),
        .block = dim3(THREADS),
        .stream = (cudaStream_t)stream};
    void *args[] = {&c};
    return moq_cuda_launch(&launch, args, err);
}

/* ---- notes ---- */

#define NOTES      64
#define NOTE_BYTES 64

/* Memory that all devices reach by the host's addresses. It is allocated with the first note and
 * kept, as allocating takes longer than its use. */
static struct notebook {
    pthread_mutex_t lock;
    pthread_cond_t returned;
    char *memory;
    uint64_t taken; /* a bit for each note */
} notebook = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0};
static_assert(NOTES == 64 && sizeof(moq_findings) <= NOTE_BYTES, "a bit each, and enough bytes");

static cudaError_t open_notebook(void) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* as in memory.cu */
    void *memory;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t status =
        cudaHostAlloc(&memory, NOTES * NOTE_BYTES, cudaHostAllocPortable | cudaHostAllocMapped);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == cudaSuccess)
        notebook.memory = (char *)memory;
    return status;
}

extern "C" moq_status moq_cuda_take_note(moq_findings **note, moq_err *err) {
    cudaError_t status = cudaSuccess;
    pthread_mutex_lock(&notebook.lock);
    if (!notebook.memory)
        status = open_notebook();
    while (status == cudaSuccess && ~notebook.taken == 0)
        pthread_cond_wait(&notebook.returned, &notebook.lock);
    if (status == cudaSuccess) {
        int free = __builtin_ctzll(~notebook.taken);
        notebook.taken |= 1ull << free;
        *note = (moq_findings *)(notebook.memory + free * NOTE_BYTES);
        **note = {};
    }
    pthread_mutex_unlock(&notebook.lock);
    return moq_cuda_check(status, "memory for what kernels find", err);
}

extern "C" void moq_cuda_return_note(moq_findings *note) {
    pthread_mutex_lock(&notebook.lock);
    notebook.taken &= ~(1ull << ((char *)note - notebook.memory) / NOTE_BYTES);
    pthread_cond_signal(&notebook.returned);
    pthread_mutex_unlock(&notebook.lock);
}

} // namespace moq::preparation
