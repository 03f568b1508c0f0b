// A TensorFlow operation that reads the clock once its input is there.
//
// TensorFlow's own, Timestamp, is refused where its operations are to be deterministic. This one is
// registered through TensorFlow's C interface (tensorflow/c/ops.h, tensorflow/c/kernels.h), whose
// functions are looked up in the library that is loaded: it is compiled without TensorFlow and
// serves every version. It has no state, so TensorFlow puts no order between two readings.

#include <dlfcn.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace {

constexpr char kLibrary[] = "libtensorflow_framework.so.2";
constexpr int kDouble = 2;  // TF_DOUBLE

// What the C interface keeps opaque.
struct OpBuilder;
struct KernelBuilder;
struct Context;
struct ShapeContext;
struct ShapeHandle;
struct Status;
struct Tensor;

struct TensorFlow {
  OpBuilder* (*new_op)(const char*);
  void (*add_attr)(OpBuilder*, const char*);
  void (*add_input)(OpBuilder*, const char*);
  void (*add_output)(OpBuilder*, const char*);
  void (*set_shape_function)(OpBuilder*, void (*)(ShapeContext*, Status*));
  void (*register_op)(OpBuilder*, Status*);
  ShapeHandle* (*scalar)(ShapeContext*);
  void (*set_shape)(ShapeContext*, int, ShapeHandle*, Status*);
  void (*delete_shape)(ShapeHandle*);
  KernelBuilder* (*new_kernel)(const char*, const char*, void* (*)(void*),
                               void (*)(void*, Context*), void (*)(void*));
  void (*register_kernel)(const char*, KernelBuilder*, Status*);
  Tensor* (*allocate_output)(Context*, int, int, const int64_t*, int, std::size_t, Status*);
  void* (*data)(const Tensor*);
  void (*delete_tensor)(Tensor*);
  void (*fail)(Context*, Status*);
  Status* (*new_status)();
  void (*delete_status)(Status*);
  int (*code)(const Status*);
  const char* (*message)(const Status*);
};

TensorFlow tf;

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library) {
  return find(library, "TF_NewOpDefinitionBuilder", tf.new_op) &&
         find(library, "TF_OpDefinitionBuilderAddAttr", tf.add_attr) &&
         find(library, "TF_OpDefinitionBuilderAddInput", tf.add_input) &&
         find(library, "TF_OpDefinitionBuilderAddOutput", tf.add_output) &&
         find(library, "TF_OpDefinitionBuilderSetShapeInferenceFunction", tf.set_shape_function) &&
         find(library, "TF_RegisterOpDefinition", tf.register_op) &&
         find(library, "TF_ShapeInferenceContextScalar", tf.scalar) &&
         find(library, "TF_ShapeInferenceContextSetOutput", tf.set_shape) &&
         find(library, "TF_DeleteShapeHandle", tf.delete_shape) &&
         find(library, "TF_NewKernelBuilder", tf.new_kernel) &&
         find(library, "TF_RegisterKernelBuilder", tf.register_kernel) &&
         find(library, "TF_AllocateOutput", tf.allocate_output) &&
         find(library, "TF_TensorData", tf.data) &&
         find(library, "TF_DeleteTensor", tf.delete_tensor) &&
         find(library, "TF_OpKernelContext_Failure", tf.fail) &&
         find(library, "TF_NewStatus", tf.new_status) &&
         find(library, "TF_DeleteStatus", tf.delete_status) &&
         find(library, "TF_GetCode", tf.code) && find(library, "TF_Message", tf.message);
}

void infer_shape(ShapeContext* context, Status* status) {
  ShapeHandle* scalar = tf.scalar(context);
  tf.set_shape(context, 0, scalar, status);
  tf.delete_shape(scalar);
}

// Writes CLOCK_MONOTONIC, as Python's time.perf_counter reads it, in seconds.
void compute(void*, Context* context) {
  Status* status = tf.new_status();
  Tensor* output = tf.allocate_output(context, 0, kDouble, nullptr, 0, sizeof(double), status);
  if (tf.code(status) == 0) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *static_cast<double*>(tf.data(output)) = now.tv_sec + 1e-9 * now.tv_nsec;
    tf.delete_tensor(output);
  } else {
    tf.fail(context, status);
  }
  tf.delete_status(status);
}

// Runs when tf.load_op_library loads this file, which then finds the operation.
__attribute__((constructor)) void register_operation() {
  void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr || !find_all(library)) return;
  Status* status = tf.new_status();
  OpBuilder* operation = tf.new_op("CandleP1Clock");
  tf.add_attr(operation, "T: type");
  tf.add_input(operation, "after: T");
  tf.add_output(operation, "seconds: double");
  tf.set_shape_function(operation, infer_shape);
  tf.register_op(operation, status);
  if (tf.code(status) == 0) {
    KernelBuilder* kernel = tf.new_kernel("CandleP1Clock", "CPU", nullptr, compute, nullptr);
    tf.register_kernel("CandleP1Clock", kernel, status);
  }
  if (tf.code(status) != 0) std::fprintf(stderr, "CandleP1Clock: %s\n", tf.message(status));
  tf.delete_status(status);
}

}  // namespace
