// Stands for the toolkit's header of this name on emulated ranks.
#pragma once

#include <peerlane_emulator/small_floats.h>

PEERLANE_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162, bfloat16, bf16)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
