// How optimizers update weights: one pass over the weights, their state and the gradient.
//
// The formulas are those of Keras (docs/running.md, "Optimizers"). The first array has the weights, the
// others their state.

#pragma once

#include <cmath>
#include <cstddef>

#include "loops.h"

namespace tensorflow_c {

constexpr int kMaxArrays = 3;  // the weights and their state

// constants: rate
FOR_EVERY_PROCESSOR static void descend(float* const* arrays, const float* __restrict gradient,
                                        std::size_t num, const float* constants) {
  float* __restrict weights = arrays[0];
  const float rate = constants[0];
  for (std::size_t i = 0; i < num; ++i) weights[i] -= rate * gradient[i];
}

// constants: rate, momentum
FOR_EVERY_PROCESSOR static void descend_with_momentum(float* const* arrays,
                                                      const float* __restrict gradient,
                                                      std::size_t num, const float* constants) {
  float* __restrict weights = arrays[0];
  float* __restrict velocity = arrays[1];
  const float rate = constants[0], momentum = constants[1];
  for (std::size_t i = 0; i < num; ++i) {
    velocity[i] = momentum * velocity[i] - rate * gradient[i];
    weights[i] += velocity[i];
  }
}

// constants: rate x sqrt(1 - beta_2^t) / (1 - beta_1^t), beta_1, beta_2, epsilon
FOR_EVERY_PROCESSOR static void adam(float* const* arrays, const float* __restrict gradient,
                                     std::size_t num, const float* constants) {
  float* __restrict weights = arrays[0];
  float* __restrict mean = arrays[1];
  float* __restrict mean_square = arrays[2];
  const float rate = constants[0], first = 1 - constants[1], second = 1 - constants[2],
              epsilon = constants[3];
  for (std::size_t i = 0; i < num; ++i) {
    const float g = gradient[i];
    mean[i] += (g - mean[i]) * first;
    mean_square[i] += (g * g - mean_square[i]) * second;
    weights[i] -= rate * mean[i] / (std::sqrt(mean_square[i]) + epsilon);
  }
}

// constants: rate, decay, epsilon under the root (Keras 3), epsilon beside the root (Keras 2)
FOR_EVERY_PROCESSOR static void rmsprop(float* const* arrays, const float* __restrict gradient,
                                        std::size_t num, const float* constants) {
  float* __restrict weights = arrays[0];
  float* __restrict mean_square = arrays[1];
  const float rate = constants[0], decay = constants[1], epsilon = constants[2],
              outer_epsilon = constants[3];
  for (std::size_t i = 0; i < num; ++i) {
    const float g = gradient[i];
    const float square = decay * mean_square[i] + (1 - decay) * (g * g);
    mean_square[i] = square;
    weights[i] -= rate * g / (std::sqrt(square + epsilon) + outer_epsilon);
  }
}

struct Rule {
  void (*apply)(float* const* arrays, const float* gradient, std::size_t num,
                const float* constants);
  int num_arrays;
  int num_constants;
};

// In the order of the names in candle_p1/ops/updates.py.
constexpr Rule kRules[] = {
    {descend, 1, 1}, {descend_with_momentum, 2, 2}, {adam, 3, 4}, {rmsprop, 2, 4}};
constexpr int kNumRules = sizeof kRules / sizeof *kRules;

}  // namespace tensorflow_c
