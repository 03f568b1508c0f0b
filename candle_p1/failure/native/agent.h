// The agent of a rank: a thread that ends the process when its job has failed.
//
// It never takes Python's lock, so it goes on while a library holds that lock, and it stops when the
// process is stopped. Once a second it looks at the launcher of this process. From the start of MPI
// until the rank is connected to the watchdog server, it also looks at the next rank of the node:
// MPI would wait forever for one that is stopped. Looks are counted, not the time between them, in
// which this process may itself have been stopped; so a job that is suspended as a whole goes on.
//
// While it is connected, it sends what the rank reports, a beat each second with how far the rank
// has come, and the numbers of the signals that have arrived, and receives orders; protocol.py
// describes all messages. It ends the process when it is told to; when the connection is lost; and
// when nothing has happened some seconds after a signal or a report. A rank that ends by itself has
// disarmed it before.
//
// There is one way to end the process: Python is given a moment to flush its output, the log goes
// to its file, what a dead launcher and MPI would leave is removed, and a launcher that cannot end
// is killed.

#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "last_word.h"
#include "processes.h"
#include "rank_log.h"

namespace failure {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kFailed = 3;  // exit codes; that of an error of the user is 2
constexpr int kInterrupted = 128 + SIGTERM;
constexpr Seconds kLook{1};       // between two looks and beats
constexpr Seconds kFlush{1};      // for Python to flush its output
constexpr Seconds kFarewell{3};   // for what is left to be sent
constexpr Seconds kAnswer{6};     // for the server to end this process after a report
constexpr Seconds kRecord{5};     // for the record to be completed in place of a dead server
constexpr Seconds kLast{15};      // for the process to end, whatever blocks
constexpr int kLauncherEnds = 3;  // s, for a launcher to end once its ranks have gone

// What has happened to a process, for a message.
inline std::string was_stopped(double seconds) {
  char text[64];
  std::snprintf(text, sizeof text, "was stopped (SIGSTOP) for %g s", seconds);
  return text;
}

// What a connected rank is called, and what is done if its server dies.
struct Watched {
  int socket = -1;
  const std::int64_t* numbers = nullptr;  // how far the rank has come
  std::size_t num_numbers = 0;
  std::string host, name, server;  // "rank 1 (host x)", "the watchdog (host y, pid 7)"
  pid_t server_pid = 0;            // if it is a child of this process
  double stopped_s = 0;            // how long the launcher and the server may be stopped
  double unwind_s = 0;             // for the server to end this process after a signal
};

// Completes the record if the server dies; the number of steps begun is added to the command.
struct Recorder {
  std::vector<std::string> command;
  std::vector<int> inherited;
  bool speaks = false;  // whether this rank says on the screen why the job ends, and waits
};

class Agent {
 public:
  // Messages go to what is the standard error now: a rank may redirect it to a file later.
  // `terminal` is the device whose cursor is to be shown after a message; or empty.
  explicit Agent(std::string terminal)
      : screen_(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)), terminal_(std::move(terminal)), pid_(getpid()) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, wake_) != 0)
      throw std::system_error(errno, std::generic_category(), "socketpair");
    // Signals are for the threads that expect them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // To be deleted by the process that made it, in whose children there is no such thread.
  ~Agent() { stop(); }

  bool is_own() const { return getpid() == pid_; }

  void stop() {
    if (!is_own() || !thread_.joinable()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      watched_ = {};
    }
    changed_.notify_all();
    wake();
    thread_.join();
    for (int* descriptor : {&wake_[0], &wake_[1], &screen_}) close(std::exchange(*descriptor, -1));
  }

  // Where Python writes the numbers of signals.
  int signal_fd() const { return wake_[1]; }

  Launcher launcher() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return launcher_;
  }

  void guard(pid_t parent, std::string session, double stopped_s) {
    std::lock_guard<std::mutex> lock(mutex_);
    launcher_ = Launcher(parent, std::move(session));
    stopped_s_ = stopped_s;
    is_starting_ = true;
  }

  void watch(Watched watched) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_word::use(watched.socket);
    stopped_s_ = watched.stopped_s;
    watched_ = std::move(watched);
    inbox_.clear(), outbox_.clear();
    closing_ = disarmed_ = told_ = is_starting_ = false;
    recorder_ = {};
    wake();
  }

  void set_recorder(Recorder recorder) {
    std::lock_guard<std::mutex> lock(mutex_);
    recorder_ = std::move(recorder);
  }

  // Says goodbye after what is left, and nothing more; the caller then closes the socket. From the
  // goodbye on, the server may end, so the two cannot be done one after the other.
  void unwatch(const std::string& goodbye) {
    if (!is_own()) return;
    last_word::use(-1);
    Lock lock(mutex_);
    closing_ = disarmed_ = true;
    if (watched_.socket >= 0) outbox_ += goodbye;
    if (const int error = send_some()) error_ = error;
    wake();
    changed_.wait_for(lock, kFarewell, [this] { return outbox_.empty(); });
    watched_ = {};
    error_ = 0;
    server_looks_ = 0;
    is_reported_ = false;
    deadline_ = Clock::time_point::max();
    changed_.notify_all();
  }

  // Sends a message before it returns, as far as the kernel takes it at once; the thread sends the
  // rest. It also deals with an error, which the kernel reports once only.
  void send(const std::string& message) {
    if (!is_own()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (watched_.socket < 0) return;
    outbox_ += message;
    if (const int error = send_some()) error_ = error;
    wake();
  }

  void disarm() {
    if (!is_own()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    disarmed_ = true;
  }

  // Waits for an order to end; returns whether it has come.
  bool await_order(double seconds) {
    if (!is_own()) return false;
    Lock lock(mutex_);
    changed_.wait_for(lock, Seconds(seconds),
                      [this] { return told_ || stopped_ || watched_.socket < 0; });
    return told_;
  }

  // Waits until the process is about to end; returns whether it is, or false at `stop`.
  bool await_end() {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return ending_ || stopped_ || closing_; });
    return ending_;
  }

  void set_flushed() {
    std::lock_guard<std::mutex> lock(mutex_);
    flushed_ = true;
    changed_.notify_all();
  }

  // For a process that ends: removes what its launcher has left if that has died.
  void clean() const {
    if (!is_own()) return;  // a child has another parent
    const Launcher launcher = this->launcher();
    if (!launcher.has_died()) return;
    launcher.clean();
    remove_shared_memory();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void wake() const {
    const char none = 0;  // not the number of a signal
    static_cast<void>(write(wake_[1], &none, 1));
  }

  void run() {
    auto next_look = Clock::now() + std::chrono::duration_cast<Clock::duration>(kLook);
    Lock lock(mutex_);
    while (!stopped_) {
      const auto until = disarmed_ ? next_look : std::min(next_look, deadline_);
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      wait(lock, static_cast<int>(std::max<std::int64_t>(0, left.count() + 1)));
      if (stopped_) return;
      if (Clock::now() >= next_look) {
        next_look = Clock::now() + std::chrono::duration_cast<Clock::duration>(kLook);
        look(lock);
        beat();
      }
      flush(lock);
      if (Clock::now() >= deadline_ && !disarmed_) finish(lock, deadline_code_);
    }
  }

  // Waits for signals, orders, room for what is to be sent, or time.
  void wait(Lock& lock, int timeout_ms) {
    pollfd files[2] = {{wake_[0], POLLIN, 0}, {watched_.socket, POLLIN, 0}};
    if (!outbox_.empty()) files[1].events |= POLLOUT;
    const int socket = watched_.socket;
    lock.unlock();
    poll(files, socket < 0 ? 1 : 2, timeout_ms);
    lock.lock();
    if (files[0].revents) take_signals();
    if (files[1].revents & (POLLIN | POLLERR | POLLHUP) && socket == watched_.socket) receive(lock);
  }

  void take_signals() {
    char numbers[512];
    for (ssize_t num; (num = read(wake_[0], numbers, sizeof numbers)) > 0;)
      for (ssize_t i = 0; i < num; ++i) {
        const int number = numbers[i];
        const bool ends = number == SIGHUP || number == SIGINT || number == SIGTERM;
        if (!ends && number != SIGUSR1 && number != SIGUSR2) continue;
        if (watched_.socket >= 0) outbox_ += "{\"signal\": " + std::to_string(number) + "}\n";
        if (ends && watched_.socket >= 0) end_after(Seconds(watched_.unwind_s), kInterrupted);
      }
  }

  void end_after(Seconds seconds, int code) {
    const auto when = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
    if (when < deadline_) deadline_ = when, deadline_code_ = code;
  }

  void beat() {
    if (watched_.socket < 0 || !outbox_.empty()) return;  // what waits is a sign of life, too
    outbox_ += '[';
    for (std::size_t i = 0; i < watched_.num_numbers; ++i)
      outbox_ += (i ? "," : "") +
                 std::to_string(__atomic_load_n(watched_.numbers + i, __ATOMIC_RELAXED));
    outbox_ += "]\n";
  }

  void flush(Lock& lock) {
    if (const int error = send_some()) return lose(lock, error);
    if (closing_ && outbox_.empty()) changed_.notify_all();
  }

  // Sends what the kernel takes; returns the error of the connection, 0 if there is none.
  int send_some() {
    while (watched_.socket >= 0 && !outbox_.empty()) {
      const auto sent =
          ::send(watched_.socket, outbox_.data(), outbox_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
      outbox_.erase(0, static_cast<std::size_t>(sent));
    }
    return 0;
  }

  void receive(Lock& lock) {
    char text[4096];
    const auto num = recv(watched_.socket, text, sizeof text, MSG_DONTWAIT);
    if (num < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (num <= 0) return lose(lock, num < 0 ? errno : 0);
    inbox_.append(text, static_cast<std::size_t>(num));
    for (std::size_t end; (end = inbox_.find('\0')) != std::string::npos;) {
      const std::string order = inbox_.substr(0, end);
      inbox_.erase(0, end + 1);
      if (!order.empty()) obey(lock, order);  // an empty one asks whether this node answers
    }
  }

  // An order is "CODE SPEAK REASON".
  void obey(Lock& lock, const std::string& order) {
    if (told_ || closing_) return;
    int code = kFailed, speaks = 0, begin = 0;
    std::sscanf(order.c_str(), "%d %d %n", &code, &speaks, &begin);
    if (!disarmed_) end_in_any_case(code);
    if (speaks) {
      say("the job ends: " + order.substr(static_cast<std::size_t>(begin)));
      show_cursor();
    }
    told_ = true;
    changed_.notify_all();
    if (!disarmed_) finish(lock, code);
  }

  // The connection to the server has ended.
  void lose(Lock& lock, int error) {
    if (error_) error = error_;
    watched_.socket = -1;
    outbox_.clear();
    if (!told_ && !closing_) end_without_server(lock, error);
    changed_.notify_all();
  }

  void end_without_server(Lock& lock, int error) {
    if (error != 0 && error != EPIPE && error != ECONNRESET) {
      if (disarmed_) return;
      end_in_any_case(kFailed);
      say(watched_.name + " ends: it cannot reach the watchdog any more (" + std::strerror(error) +
          "): the node of rank 0 is lost, or " + watched_.host + " is cut off from the network");
      is_cut_off_ = true;
      finish(lock, kFailed);
    }
    if (!disarmed_) end_in_any_case(kFailed);
    replace_server();
    if (!disarmed_) finish(lock, kFailed);
  }

  // Completes the record, if that is this rank's part.
  void replace_server() {
    if (recorder_.command.empty()) return;
    if (recorder_.speaks) say("the job ends: " + watched_.server + " died");
    auto command = recorder_.command;
    command.push_back(std::to_string(watched_.numbers ? watched_.numbers[0] : 0));
    const pid_t pid = start_detached(command, recorder_.inherited);
    if (pid <= 0 || !recorder_.speaks) return;
    const auto until = Clock::now() + kRecord;
    while (waitpid(pid, nullptr, WNOHANG) == 0 && Clock::now() < until) usleep(10'000);
  }

  void look(Lock& lock) {
    const pid_t server = watched_.server_pid;
    if (server > 0 && stays_stopped(server, server_looks_, stopped_s_)) kill(server, SIGKILL);
    if (!launcher_.is_known() || is_reported_ || (closing_ && watched_.socket >= 0)) return;
    if (launcher_.has_died()) {
      const bool is_script = launcher_.has_script() && !is_gone(launcher_.pid());
      return report(lock, "died", is_script ? launcher_.parent() : launcher_.pid(), true);
    }
    if (stays_stopped(launcher_.pid(), launcher_looks_, stopped_s_)) {
      launcher_.kill_soon(1);
      return report(lock, was_stopped(stopped_s_), launcher_.pid(), true);
    }
    if (!is_starting_) return;  // the server notices ranks that are stopped
    const pid_t sibling = next_sibling(launcher_.parent());
    if (sibling != sibling_) sibling_ = sibling, sibling_looks_ = 0;
    if (sibling > 0 && stays_stopped(sibling, sibling_looks_, stopped_s_)) {
      kill(sibling, SIGKILL);
      report(lock, was_stopped(stopped_s_), sibling, false);
    }
  }

  // Whether a process has been stopped at so many looks that it counts.
  static bool stays_stopped(pid_t pid, double& looks, double limit_s) {
    looks = is_stopped(pid) ? looks + 1 : 0;
    return looks > 1 + limit_s / kLook.count();
  }

  void report(Lock& lock, const std::string& what, pid_t pid, bool is_launcher) {
    is_reported_ = true;
    if (watched_.socket >= 0) {
      outbox_ += "{\"launcher_fault\": {\"what\": \"" + what +
                 "\", \"pid\": " + std::to_string(pid) + "}}\n";
      end_after(kAnswer, kFailed);
      return;
    }
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    say(std::string("the job ends: ") + (is_launcher ? "the launcher" : "a rank") + " (host " + host +
        ", pid " + std::to_string(pid) + ") " + what + " outside of a run");
    finish(lock, kFailed);
  }

  void say(const std::string& text) const {
    const std::string line = "\ncandle-p1: " + text + "\n";
    static_cast<void>(write(screen_, line.data(), line.size()));
  }

  // The progress bar of a rank that was killed had hidden it.
  void show_cursor() const {
    if (terminal_.empty()) return;
    const int device = open(terminal_.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
    if (device < 0) return;
    static_cast<void>(write(device, "\x1b[?25h", 6));
    close(device);
  }

  // What follows may block: a terminal that is paused, a file system that does not answer.
  static void end_in_any_case(int code) {
    std::thread([code] {
      std::this_thread::sleep_for(kLast);
      _exit(code);
    }).detach();
  }

  [[noreturn]] void finish(Lock& lock, int code) {
    end_in_any_case(code);
    ending_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kFlush, [this] { return flushed_; });
    rank_log_write();
    const pid_t server = watched_.server_pid;
    if (!told_ && server > 0 && is_stopped(server)) {
      kill(server, SIGKILL);
      replace_server();
    }
    // A launcher need not end the ranks that are stopped.
    for (const pid_t sibling : siblings(launcher_.parent()))
      if (is_stopped(sibling)) kill(sibling, SIGKILL);
    const bool waits_for_node = is_cut_off_ && !launcher_.session().empty();
    if (waits_for_node || is_stopped(launcher_.pid())) launcher_.kill_soon(kLauncherEnds);
    launcher_.clean();
    remove_shared_memory();
    _exit(code);
  }

  int screen_;
  const std::string terminal_;
  const pid_t pid_;
  int wake_[2];

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  Launcher launcher_;
  double stopped_s_ = 0;
  Watched watched_;
  Recorder recorder_;
  std::string inbox_, outbox_;
  bool stopped_ = false, closing_ = false;       // this thread is to end; the rank says goodbye
  bool disarmed_ = false, told_ = false;         // the process ends by itself; it was told to end
  bool ending_ = false, flushed_ = false;        // it ends now; Python has flushed its output
  bool is_reported_ = false;                     // what has happened to the launcher
  bool is_starting_ = false, is_cut_off_ = false;  // MPI starts; this node has lost the others
  int error_ = 0;                                // of the connection
  double launcher_looks_ = 0, server_looks_ = 0, sibling_looks_ = 0;
  pid_t sibling_ = 0;
  Clock::time_point deadline_ = Clock::time_point::max();
  int deadline_code_ = 0;
  std::thread thread_;  // the last one, because it uses the others
};

}  // namespace failure
