// The Python module candle_p1.failure._native; _native.pyi describes it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "agent.h"

namespace nb = nanobind;
using namespace nb::literals;

using Numbers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using Released = nb::call_guard<nb::gil_scoped_release>;

std::string text_of(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

// Keeps the memory of the numbers as long as the thread may read it.
class Agent {
 public:
  explicit Agent(std::string terminal) : agent_(new failure::Agent(std::move(terminal))) {}
  Agent(const Agent&) = delete;

  // A child by fork has no thread to end, and must leave what that waits for.
  ~Agent() {
    if (agent_->is_own()) delete agent_;
  }

  failure::Agent* operator->() const { return agent_; }

  void watch(int socket, Numbers numbers, std::string host, std::string name, std::string server,
             int server_pid, double stopped_s, double unwind_s) {
    agent_->watch({socket, numbers.data(), numbers.size(), std::move(host), std::move(name),
                   std::move(server), server_pid, stopped_s, unwind_s});
    numbers_ = std::move(numbers);
  }

  void set_recorder(nb::list words, std::vector<int> inherited, bool speaks) {
    std::vector<std::string> command;
    for (nb::handle word : words) command.push_back(text_of(nb::cast<nb::bytes>(word)));
    agent_->set_recorder({std::move(command), std::move(inherited), speaks});
  }

 private:
  failure::Agent* agent_;
  Numbers numbers_;
};

NB_MODULE(_native, module) {
  // A run ends without a last search for garbage, which would find what nanobind calls leaked.
  nb::set_leak_warnings(false);
  nb::class_<Agent>(module, "Agent")
      .def(nb::init<std::string>(), "terminal"_a)
      .def(
          "guard",
          [](Agent& agent, int parent, nb::bytes session, double stopped_s) {
            agent->guard(parent, text_of(session), stopped_s);
          },
          "parent"_a, "session"_a, "stopped_s"_a)
      .def_prop_ro("launcher",
                   [](Agent& agent) {
                     const failure::Launcher launcher = agent->launcher();
                     const std::string& session = launcher.session();
                     return nb::make_tuple(launcher.pid(), nb::bytes(session.data(), session.size()));
                   })
      .def("watch", &Agent::watch, "socket"_a, "numbers"_a, nb::kw_only(), "host"_a, "name"_a,
           "server"_a, "server_pid"_a, "stopped_s"_a, "unwind_s"_a)
      .def("set_recorder", &Agent::set_recorder, "command"_a, "inherited"_a, nb::kw_only(),
           "speaks"_a)
      .def("send", [](Agent& agent, nb::bytes message) { agent->send(text_of(message)); },
           "message"_a)
      .def("disarm", [](Agent& agent) { agent->disarm(); })
      .def("await_order", [](Agent& agent, double seconds) { return agent->await_order(seconds); },
           "seconds"_a, Released())
      .def("await_end", [](Agent& agent) { return agent->await_end(); }, Released())
      .def("set_flushed", [](Agent& agent) { agent->set_flushed(); })
      .def("unwatch",
           [](Agent& agent, nb::bytes goodbye) {
             const std::string text = text_of(goodbye);
             nb::gil_scoped_release released;
             agent->unwatch(text);
           },
           "goodbye"_a)
      .def("clean", [](Agent& agent) { agent->clean(); })
      .def("stop", [](Agent& agent) { agent->stop(); }, Released())
      .def_prop_ro("signal_fd", [](Agent& agent) { return agent->signal_fd(); });
  module.attr("FAILED") = failure::kFailed;
  module.attr("INTERRUPTED") = failure::kInterrupted;
  module.attr("BEAT_S") = failure::kLook.count();
  module.attr("LAUNCHER_S") = failure::kLauncherEnds;
  module.def("was_stopped", &failure::was_stopped, "seconds"_a);
  module.def(
      "process_state",
      [](int pid) {
        const char state = failure::state_of(pid);
        return state ? std::string(1, state) : std::string();
      },
      "pid"_a);
  module.def("is_gone", &failure::is_gone, "pid"_a);
  module.def("is_segment", &failure::is_segment, "name"_a);
  module.def("remove_shared_memory", &failure::remove_shared_memory);
  module.def(
      "rank_log_begin",
      [](nb::bytes file, int screen) { return failure::rank_log_begin(file.c_str(), screen); },
      "file"_a, "screen"_a);
  module.def("rank_log_write", &failure::rank_log_write, Released());
  module.def("rank_log_end", &failure::rank_log_end);
}
