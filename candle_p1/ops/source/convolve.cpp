// CandleP1Convolve and CandleP1ConvolveGradient: a 1D convolution with its bias, relu and pooling; see
// tiles/steps.h and tiles/convolution.h.

#include <cstdlib>
#include <initializer_list>
#include <new>
#include <string>

#include "tensorflow.h"
#include "tiles/convolution.h"

namespace tiles {
namespace {

// CANDLE_P1_INSTRUCTIONS is avx512 (the default), avx2 or portable.
const Steps& choose_steps() {
#if defined(__x86_64__)
  const char* variable = std::getenv("CANDLE_P1_INSTRUCTIONS");
  const std::string newest = variable == nullptr ? "avx512" : variable;
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  if (avx512 && newest == "avx512") return kAvx512;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && newest != "portable") return kAvx2;
#endif
  return kPortable;
}

}  // namespace

const Steps& chosen_steps() {
  static const Steps& chosen = choose_steps();
  return chosen;
}

}  // namespace tiles

namespace tensorflow_c {
namespace {

constexpr int kInvalidArgument = 3;
constexpr int kResourceExhausted = 8;

struct Settings {
  int32_t pool;
  int32_t rectify;
  int32_t by_tiles;
  int32_t threads;
  int32_t only_values;  // whether to compute the gradient of the values, or else all others
};

template <bool of_gradient>
void* create(Construction* construction) {
  auto* settings = new Settings();
  Outcome outcome;
  tf.get_int(construction, "pool", &settings->pool, outcome);
  if (outcome.ok()) tf.get_int(construction, "rectify", &settings->rectify, outcome);
  if (outcome.ok()) tf.get_int(construction, "by_tiles", &settings->by_tiles, outcome);
  if (outcome.ok()) tf.get_int(construction, "threads", &settings->threads, outcome);
  if (of_gradient && outcome.ok()) {
    tf.get_int(construction, "only_values", &settings->only_values, outcome);
  }
  if (!outcome.ok()) tf.fail_construction(construction, outcome);
  return settings;
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

// The inputs of both operations.
struct Inputs {
  Held values, first_kernel, first_biases, kernel, biases_or_maxima, places, gradient;

  Inputs(Context* context, int num, Outcome& outcome) {
    Held* const all[] = {&values,           &first_kernel, &first_biases, &kernel,
                         &biases_or_maxima, &places,       &gradient};
    for (int i = 0; i < num && outcome.ok(); ++i) tf.get_input(context, i, all[i]->out(), outcome);
  }

  bool has_first() const { return first_kernel.num_bytes() > 0; }

  tiles::Weights weights() const {
    return {has_first() ? first_kernel.floats() : nullptr,
            has_first() ? first_biases.floats() : nullptr, kernel.floats(),
            biases_or_maxima.floats()};
  }

  // The sizes, if the shapes fit each other.
  tiles::Sizes sizes(const Settings& settings, Outcome& outcome) const {
    tiles::Sizes sizes = {};
    const auto dim = [](const Held& tensor, int i) {
      return static_cast<int>(tf.dim(tensor.get(), i));
    };
    const bool dims = tf.num_dims(values.get()) == 3 && tf.num_dims(kernel.get()) == 3 &&
                      tf.num_dims(first_kernel.get()) == 3;
    if (dims) {
      sizes.batch = dim(values, 0);
      sizes.length = dim(values, 1);
      sizes.first_taps = has_first() ? dim(first_kernel, 0) : 0;
      sizes.taps = dim(kernel, 0);
      sizes.channels = dim(kernel, 1);
      sizes.filters = dim(kernel, 2);
      sizes.pool = settings.pool;
      sizes.rectify = settings.rectify != 0;
      sizes.by_tiles = settings.by_tiles != 0;
    }
    const bool fit = dims && dim(values, 2) == sizes.num_values() &&
                     tiles::Convolution::fits(sizes) &&
                     (!has_first() || (dim(first_kernel, 1) == 1 &&
                                       dim(first_kernel, 2) == sizes.channels &&
                                       has(first_biases, sizes.channels)));
    if (!fit) fail(outcome);
    return sizes;
  }

  static bool has(const Held& tensor, std::size_t num) {
    return tensor.num_bytes() == num * sizeof(float);
  }

  static void fail(Outcome& outcome) {
    tf.set_status(outcome, kInvalidArgument, "CandleP1Convolve: shapes do not fit each other");
  }
};

// Allocates an output and returns its memory.
template <typename Value>
Value* allocate(Context* context, int index, const int64_t* shape, int num_dims, int type,
                Held& held, Outcome& outcome) {
  if (!outcome.ok()) return nullptr;
  std::size_t num = 1;
  for (int i = 0; i < num_dims; ++i) num *= static_cast<std::size_t>(shape[i]);
  *held.out() = tf.allocate_output(context, index, type, shape, num_dims, num * sizeof(Value),
                                   outcome);
  return outcome.ok() ? static_cast<Value*>(tf.data(held.get())) : nullptr;
}

template <typename Work>
void run(Outcome& outcome, Work work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    tf.set_status(outcome, kResourceExhausted, "CandleP1Convolve: out of memory");
  }
}

void compute(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  const Inputs inputs(context, 5, outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);
  const tiles::Sizes sizes = inputs.sizes(settings, outcome);
  if (outcome.ok() && !Inputs::has(inputs.biases_or_maxima, sizes.filters)) Inputs::fail(outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);
  const int64_t shape[] = {sizes.batch, sizes.num_pools(), sizes.filters};
  const int64_t places_shape[] = {sizes.pool > 1 ? shape[0] : 0, shape[1], shape[2]};
  Held held[2];
  float* maxima = allocate<float>(context, 0, shape, 3, kFloat, held[0], outcome);
  auto* places = allocate<std::uint8_t>(context, 1, places_shape, 3, kByte, held[1], outcome);
  if (outcome.ok()) {
    run(outcome, [&] {
      const tiles::Convolution convolution(sizes, tiles::chosen_steps(), settings.threads);
      convolution.forward(inputs.values.floats(), inputs.weights(), maxima, places);
    });
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

void compute_gradient(void* kernel, Context* context) {
  const auto& settings = *static_cast<Settings*>(kernel);
  Outcome outcome;
  const Inputs inputs(context, 7, outcome);
  if (!outcome.ok()) return tf.fail(context, outcome);
  const tiles::Sizes sizes = inputs.sizes(settings, outcome);
  if (outcome.ok()) {
    const std::size_t num =
        static_cast<std::size_t>(sizes.batch) * sizes.num_pools() * sizes.filters;
    const bool fit = Inputs::has(inputs.biases_or_maxima, num) &&
                     Inputs::has(inputs.gradient, num) &&
                     (sizes.pool == 1 || inputs.places.num_bytes() == num) &&
                     !(settings.only_values && inputs.has_first());
    if (!fit) Inputs::fail(outcome);
  }
  if (!outcome.ok()) return tf.fail(context, outcome);
  // What is not computed has no elements.
  const bool only_values = settings.only_values != 0;
  const int64_t values[] = {only_values ? sizes.batch : 0, sizes.length, sizes.num_values()};
  const int64_t first[] = {sizes.first_taps, 1, sizes.channels};
  const int64_t first_biases[] = {inputs.has_first() ? sizes.channels : 0};
  const int64_t kernel_shape[] = {only_values ? 0 : sizes.taps, sizes.channels, sizes.filters};
  const int64_t biases[] = {only_values ? 0 : sizes.filters};
  Held held[5];
  tiles::Gradients to;
  to.values = allocate<float>(context, 0, values, 3, kFloat, held[0], outcome);
  to.first_kernel = allocate<float>(context, 1, first, 3, kFloat, held[1], outcome);
  to.first_biases = allocate<float>(context, 2, first_biases, 1, kFloat, held[2], outcome);
  to.kernel = allocate<float>(context, 3, kernel_shape, 3, kFloat, held[3], outcome);
  to.biases = allocate<float>(context, 4, biases, 1, kFloat, held[4], outcome);
  if (only_values) {
    to.kernel = to.biases = nullptr;
  } else {
    to.values = nullptr;
  }
  if (!inputs.has_first()) to.first_kernel = to.first_biases = nullptr;
  if (outcome.ok()) {
    run(outcome, [&] {
      const tiles::Convolution convolution(sizes, tiles::chosen_steps(), settings.threads);
      convolution.backward(inputs.values.floats(), inputs.weights(),
                           inputs.biases_or_maxima.floats(), inputs.places.bytes(),
                           inputs.gradient.floats(), to);
    });
  }
  if (!outcome.ok()) tf.fail(context, outcome);
}

void register_one(const char* name, std::initializer_list<const char*> inputs,
                  std::initializer_list<const char*> outputs,
                  std::initializer_list<const char*> attributes, void* (*create)(Construction*),
                  void (*compute)(void*, Context*), Status* status) {
  OpBuilder* operation = tf.new_op(name);
  for (const char* input : inputs) tf.add_input(operation, input);
  for (const char* output : outputs) tf.add_output(operation, output);
  for (const char* attribute : attributes) tf.add_attr(operation, attribute);
  tf.set_shape_function(operation, tf.unknown_shapes);
  tf.register_op(operation, status);
  if (tf.code(status) != 0) return;
  KernelBuilder* kernel = tf.new_kernel(name, "CPU", create, compute, destroy);
  tf.register_kernel(name, kernel, status);
}

}  // namespace

void register_convolve(Status* status) {
  register_one("CandleP1Convolve",
               {"values: float", "first_kernel: float", "first_biases: float", "kernel: float",
                "biases: float"},
               {"maxima: float", "places: uint8"},
               {"pool: int", "rectify: int", "by_tiles: int", "threads: int"}, create<false>, compute, status);
  if (tf.code(status) != 0) return;
  register_one("CandleP1ConvolveGradient",
               {"values: float", "first_kernel: float", "first_biases: float", "kernel: float",
                "maxima: float", "places: uint8", "gradient: float"},
               {"of_values: float", "of_first_kernel: float", "of_first_biases: float",
                "of_kernel: float", "of_biases: float"},
               {"pool: int", "rectify: int", "by_tiles: int", "threads: int",
                "only_values: int"},
               create<true>, compute_gradient, status);
}

}  // namespace tensorflow_c
