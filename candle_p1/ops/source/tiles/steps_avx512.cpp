// The steps for processors with AVX-512; see CMakeLists.txt for the flags.

#define CANDLE_P1_LANES 16
#define CANDLE_P1_STEPS kAvx512
#include "steps_body.h"
