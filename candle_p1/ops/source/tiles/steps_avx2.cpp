// The steps for processors with AVX2; see CMakeLists.txt for the flags.

#define CANDLE_P1_LANES 8
#define CANDLE_P1_STEPS kAvx2
#include "steps_body.h"
