/* The chip behind a device, for the choice of a kernel. */
#ifndef MOQ_OPS_TARGET_H
#define MOQ_OPS_TARGET_H

#include "core/linear.h"

/* What `device` is. Never fails: where there is no such device, `missing` says why. */
moq_target moq_find_target(moq_device device);

#endif
