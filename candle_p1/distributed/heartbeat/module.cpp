// The Python module candle_p1.distributed._heartbeat; _heartbeat.pyi describes it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "heartbeat.h"

namespace nb = nanobind;
using namespace nb::literals;

using Stamp = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;

// Keeps the memory of the stamp as long as the thread may read it.
class Heartbeat {
 public:
  Heartbeat(int socket, Stamp stamp, double period_s, double patience_s, int code)
      : stamp_(std::move(stamp)),
        beating_(socket, stamp_.data(), stamp_.size(), period_s, patience_s, code) {}

  void stop() {
    nb::gil_scoped_release released;
    beating_.stop();
  }
  void spare() { beating_.spare(); }
  void end_soon() { beating_.end_soon(); }
  int error() const { return beating_.error(); }

 private:
  Stamp stamp_;
  heartbeat::Heartbeat beating_;
};

NB_MODULE(_heartbeat, module) {
  // A run ends without a last search for garbage, which would find what nanobind calls leaked.
  nb::set_leak_warnings(false);
  nb::class_<Heartbeat>(module, "Heartbeat")
      .def(nb::init<int, Stamp, double, double, int>(), "socket"_a, "stamp"_a, nb::kw_only(),
           "period_s"_a, "patience_s"_a, "code"_a)
      .def("stop", &Heartbeat::stop)
      .def("spare", &Heartbeat::spare)
      .def("end_soon", &Heartbeat::end_soon)
      .def_prop_ro("error", &Heartbeat::error);
}
