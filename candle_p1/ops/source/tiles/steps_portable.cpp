// The steps for any processor: vectors of 16 bytes.

#define CANDLE_P1_LANES 4
#define CANDLE_P1_STEPS kPortable
#include "steps_body.h"
