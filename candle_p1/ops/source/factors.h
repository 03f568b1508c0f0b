// The gradient of a kernel as its factors. It is never written as a whole: an update forms it piece
// by piece, where it updates the weights.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "loops.h"

namespace tensorflow_c {

FOR_EVERY_PROCESSOR static void set_multiple(float* __restrict products,
                                             const float* __restrict values, float factor,
                                             std::size_t num) {
  for (std::size_t i = 0; i < num; ++i) products[i] = factor * values[i];
}

FOR_EVERY_PROCESSOR static void add_multiple(float* __restrict sums, const float* __restrict values,
                                             float factor, std::size_t num) {
  for (std::size_t i = 0; i < num; ++i) sums[i] += factor * values[i];
}

// The values of inputs that are not zero, as TensorFlow's sparse tensors have them.
struct SparseInputs {
  const int64_t* places;  // the row and the column of each
  const float* values;
  std::size_t num;
};

// The same by column: what a column of inputs is multiplied by is then read once. In a column, they
// have the order in which they were added.
class Columns {
 public:
  struct Value {
    std::uint32_t row;
    float value;
  };

  explicit Columns(std::size_t num_columns) : starts_(num_columns + 1) {}

  // Returns false if a row or a column does not exist. Parts are counted, and then added, in order.
  bool count(const SparseInputs& part, std::size_t num_rows) {
    for (std::size_t i = 0; i < part.num; ++i) {
      const auto row = static_cast<std::uint64_t>(part.places[2 * i]);
      const auto column = static_cast<std::uint64_t>(part.places[2 * i + 1]);
      if (row >= num_rows || column + 1 >= starts_.size()) return false;
      ++starts_[column + 1];
    }
    return true;
  }

  // Adds values times a factor, whose first row is `first_row`; all parts have been counted.
  void add(const SparseInputs& part, std::size_t first_row, float factor) {
    if (values_.empty()) {
      for (std::size_t i = 1; i < starts_.size(); ++i) starts_[i] += starts_[i - 1];
      values_.resize(starts_.back());
      next_.assign(starts_.begin(), starts_.end());
    }
    for (std::size_t i = 0; i < part.num; ++i) {
      values_[next_[part.places[2 * i + 1]]++] = {
          static_cast<std::uint32_t>(part.places[2 * i] + first_row), part.values[i] * factor};
    }
  }

  std::size_t num_columns() const { return starts_.size() - 1; }
  const Value* begin(std::size_t column) const { return values_.data() + starts_[column]; }
  const Value* end(std::size_t column) const { return begin(column + 1); }

  // Where the share of one of several begins, with a like number of columns and values together.
  std::size_t bound(std::size_t number, std::size_t num_shares) const {
    const std::size_t wanted = (num_columns() + values_.size()) * number / num_shares;
    std::size_t low = 0, high = num_columns();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (middle + starts_[middle] < wanted) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  std::vector<std::size_t> starts_, next_;
  std::vector<Value> values_;
};

// transpose(inputs) x upstream + decay x weights, the latter the gradient of a penalty.
struct Factors {
  Columns inputs;
  const float* upstream;  // the gradient of the outputs, shape (rows of the inputs, units)
  std::size_t units;
  float decay;
  const float* weights;

  // Writes that of some weights, from one of them on.
  void form(const float* first, float* gradient, std::size_t num) const {
    std::size_t begin = first - weights;
    while (num > 0) {
      const std::size_t column = begin / units, unit = begin % units;
      const std::size_t size = std::min(num, units - unit);
      set_multiple(gradient, weights + begin, decay, size);
      for (const auto* each = inputs.begin(column); each != inputs.end(column); ++each) {
        add_multiple(gradient, upstream + each->row * units + unit, each->value, size);
      }
      begin += size;
      gradient += size;
      num -= size;
    }
  }
};

}  // namespace tensorflow_c
