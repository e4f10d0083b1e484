// Stands for the toolkit's header of this name on emulated ranks.
#pragma once

#include <peerlane_emulator/small_floats.h>

PEERLANE_SMALL_FLOAT(__half, __half2, half, f16)
using half = __half;
using half2 = __half2;
