/* The chip behind a device: see target.h. */
#include "ops/target.h"

#include "cuda/choice/chip.h"
#include "cuda/cuda.h"
#include "cuda/runtime/cublaslt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Code of 9.0a runs on 9.0 alone; that of 10.0f and of 8.0 also on later minor versions; PTX, which
 * the driver compiles, on everything later. */
static bool arch_runs_on(int32_t arch, char suffix, int32_t capability) {
    if (suffix == 'a')
        return arch == capability;
    if (suffix == '-')
        return arch <= capability;
    return arch / 10 == capability / 10 && arch <= capability;
}

bool moq_archs_run_on(const char *archs, int32_t capability) {
    while (*archs) {
        char *end;
        int32_t arch = (int32_t)strtol(archs, &end, 10);
        if (end == archs)
            return false;
        if (arch_runs_on(arch, *end, capability))
            return true;
        while (*end && *end != ';')
            end++;
        archs = *end ? end + 1 : end;
    }
    return false;
}

moq_target moq_find_target(moq_device device) {
    moq_target target = {0};
    moq_cuda_device found;
    moq_err err;
    char message[MOQ_MESSAGE_SIZE];
    if (device.kind != MOQ_CUDA)
        return target;
    if (moq_cuda_query_device(device.index, &found, &err) != MOQ_OK) {
        snprintf(target.missing, sizeof target.missing, "%.255s", moq_err_message(&err, message));
        return target;
    }
    moq_chip chip = {found.name,       10 * found.major + found.minor,
                     found.sm_count,   found.sm_mhz,
                     found.memory_mhz, found.bus_bits};
    moq_describe_chip(&chip, &target);
    if (!moq_archs_run_on(moq_cuda_archs(), target.capability))
        snprintf(target.missing, sizeof target.missing,
                 "this build has code for %.64s, none for compute capability %d.%d",
                 moq_cuda_archs(), found.major, found.minor);
    moq_cublaslt_find(NULL, target.cublaslt_missing, sizeof target.cublaslt_missing);
    return target;
}

static moq_status refuse_capability(const char *capability, moq_err *err) {
    char names[192] = "";
    size_t used = 0;
    const moq_chip *chip;
    for (int32_t i = 0; (chip = moq_chip_at(i)) && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, ", \"%s\"", chip->name);
    return moq_fail_of(err, MOQ_ERR_VALUE, "capability",
                       "expected a compute capability as in \"9.0\", or a chip of%s, got \"%.32s\"",
                       names + 1, capability);
}

/* NULL where no chip has the name. */
static const moq_chip *find_chip(const char *name) {
    const moq_chip *chip;
    for (int32_t i = 0; (chip = moq_chip_at(i)); i++)
        if (strcmp(chip->name, name) == 0)
            return chip;
    return NULL;
}

moq_status moq_assume_target(moq_device device, const char *capability, bool pretend,
                             moq_target *target, moq_err *err) {
    int major = 0, minor = 0;
    char tail = 0;
    const moq_chip *named = find_chip(capability);
    *target = (moq_target){.assumed = true, .pretended = pretend};
    if (device.kind != MOQ_CUDA)
        return moq_fail_of(err, MOQ_ERR_VALUE, "capability",
                           "expected None for a layer on the CPU");
    if (!named &&
        (sscanf(capability, "%2d.%1d%c", &major, &minor, &tail) != 2 || major < 1 || minor < 0))
        return refuse_capability(capability, err);
    moq_chip chip = named ? *named : moq_chip_of(10 * major + minor);
    moq_describe_chip(&chip, target);
    if (pretend)
        moq_cublaslt_find(NULL, target->cublaslt_missing, sizeof target->cublaslt_missing);
    return MOQ_OK;
}

moq_status moq_check_target(moq_device device, const moq_target *target, moq_err *err) {
    char text[32];
    if (!target->assumed || target->pretended)
        return MOQ_OK;
    moq_target found = moq_find_target(device);
    if (found.missing[0])
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "%s", found.missing);
    if (found.capability == target->capability)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                    "the layer was planned for compute capability %d.%d, %s has %d.%d",
                    (int)target->capability / 10, (int)target->capability % 10,
                    moq_device_text(device, text, sizeof text), (int)found.capability / 10,
                    (int)found.capability % 10);
}
