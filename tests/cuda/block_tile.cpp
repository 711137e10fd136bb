/* Runs csrc/cuda/linear/sm120/nvfp4_block_tile.h on the host: a thread for each lane of a warp, and
 * the instruction by the tables of the PTX ISA ("Matrix Fragments for mma.m16n8k64", "Block Scaling
 * for mma.sync"), element by element.
 *
 * Arguments: n m k, and files of W's codes, W's scales, x's codes, x's scales; float32 [m, n] to
 * standard output. */
#include "cuda/linear/sm120/nvfp4_block_tile.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <pthread.h>
#include <vector>

static thread_local int lane_of_thread;
static pthread_barrier_t warp;

/* ---- the instruction ---- */

static double e2m1(uint32_t code) {
    static const double VALUE[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code & 8 ? -1 : 1) * VALUE[code & 7];
}

static double ue4m3(uint32_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent ? std::ldexp(1 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa, -9);
}

static double A[16][64], B[64][8], SCALE_A[16][4], SCALE_B[4][8];

static void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      uint32_t a_scales, uint32_t b_scales) {
    const int lane = lane_of_thread, group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 32; i++) { /* element i of A's fragment, eight in a register */
        int row = i < 8 || (i >= 16 && i < 24) ? group : group + 8;
        int column = in_group * 8 + (i & 7) + (i < 16 ? 0 : 32);
        A[row][column] = e2m1(a[i / 8] >> i % 8 * 4);
    }
    for (int i = 0; i < 16; i++)
        B[in_group * 8 + (i & 7) + (i < 8 ? 0 : 32)][group] = e2m1(b[i / 8] >> i % 8 * 4);
    for (int byte = 0; byte < 4;
         byte++) { /* selectors are 0: the first two lanes, the first lane */
        if (in_group < 2)
            SCALE_A[group + 8 * in_group][byte] = ue4m3(a_scales >> 8 * byte & 0xff);
        if (in_group == 0)
            SCALE_B[byte][group] = ue4m3(b_scales >> 8 * byte & 0xff);
    }
    pthread_barrier_wait(&warp);
    for (int i = 0; i < 4; i++) {
        int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
        double sum = d[i];
        for (int k = 0; k < 64; k++)
            sum += A[row][k] * SCALE_A[row][k / 16] * B[k][column] * SCALE_B[k / 16][column];
        d[i] = (float)sum;
    }
    pthread_barrier_wait(&warp); /* before the next product overwrites the operands */
}

/* ---- a grid of one warp after the other ---- */

using namespace moq::block_scaled;

static product problem;
static std::vector<float> y;

static void *run_lane(void *number) {
    lane_of_thread = (int)(intptr_t)number;
    for (int64_t row = 0; row < problem.w.rows; row += TILE_ROWS)
        for (int64_t token = 0; token < problem.x.rows; token += TILE_TOKENS)
            for (int w = 0; w < WARPS; w++)
                multiply_tile(problem, lane_of_thread, row + w * WARP_ROWS, token, mma_nvfp4,
                              [](int64_t m, int64_t n, float sum) {
                                  if (m < problem.x.rows && n < problem.w.rows)
                                      y[(size_t)(m * problem.w.rows + n)] = sum;
                              });
    return nullptr;
}

static std::vector<uint8_t> read_file(const char *path) {
    std::vector<uint8_t> bytes;
    FILE *file = fopen(path, "rb");
    for (int c; file && (c = fgetc(file)) != EOF;)
        bytes.push_back((uint8_t)c);
    return bytes;
}

int main(int, char **argv) {
    std::vector<uint8_t> file[4];
    for (int i = 0; i < 4; i++)
        file[i] = read_file(argv[4 + i]);
    problem = {{file[0].data(), file[1].data(), atoll(argv[1])},
               {file[2].data(), file[3].data(), atoll(argv[2])},
               atoll(argv[3])};
    y.assign((size_t)(problem.w.rows * problem.x.rows), NAN);
    pthread_barrier_init(&warp, nullptr, 32);
    pthread_t thread[32];
    for (intptr_t i = 0; i < 32; i++)
        pthread_create(&thread[i], nullptr, run_lane, (void *)i);
    for (pthread_t &each : thread)
        pthread_join(each, nullptr);
    fwrite(y.data(), sizeof(float), y.size(), stdout);
    return 0;
}
