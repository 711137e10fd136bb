/* A main for the fuzz targets where there is no libFuzzer: runs the target on the empty case and on
 * every file named on the command line, each in memory of exactly its size. */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>

static bool run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        return false;
    }
    const size_t size = (size_t)ftell(file);
    uint8_t *data = malloc(size);
    rewind(file);
    const bool whole = fread(data, 1, size, file) == size;
    fclose(file);
    if (whole)
        LLVMFuzzerTestOneInput(data, size);
    else
        fprintf(stderr, "%s: cannot be read\n", path);
    free(data);
    return whole;
}

int main(int argc, char **argv) {
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 1; i < argc; i++) {
        if (!run_file(argv[i]))
            return 2;
    }
    printf("%d\n", argc);
    return 0;
}
