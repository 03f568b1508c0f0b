// A thread that gives signs of life on a socket, whatever the rest of the process does.
//
// It never takes Python's lock, so it runs while a library holds that lock, and it stops when the
// process is stopped. Each sign is a beat: the numbers in a stamp, by which the other end sees
// whether the process advances, in bytes of their own range. They may therefore be sent at any
// moment, also within a message that another thread is sending.
//
//   0x80 to 0xBF   six bits of a number, the lowest ones first
//   0xC0           the end of a number
//   0xFF           the end of a beat
//
// The process may say a last word between them (last_word.h).
//
// As a last resort it ends the process: when the other end has told it to end, or cannot be reached
// any more, and nothing in the process has reacted for some seconds.

#pragma once

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "last_word.h"

namespace heartbeat {

inline std::string encode(const std::int64_t* stamp, std::size_t size) {
  std::string beat;
  for (std::size_t i = 0; i < size; ++i) {
    auto number = static_cast<std::uint64_t>(__atomic_load_n(stamp + i, __ATOMIC_RELAXED));
    for (; number > 0; number >>= 6) beat += static_cast<char>(0x80 | (number & 0x3F));
    beat += static_cast<char>(0xC0);
  }
  return beat += static_cast<char>(0xFF);
}

class Heartbeat {
 public:
  // The socket and the stamp must outlive the thread. `patience_s` is how long the process may take
  // to react, `code` its exit code if it does not.
  Heartbeat(int socket, const std::int64_t* stamp, std::size_t size, double period_s,
            double patience_s, int code)
      : socket_(socket), stamp_(stamp), size_(size), period_(seconds(period_s)),
        patience_(seconds(patience_s)), code_(code), pid_(getpid()) {
    // Signals are for the threads that expect them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    last_word::begin(socket_);
  }

  ~Heartbeat() { stop(); }

  void stop() {
    last_word::end(socket_);
    if (!thread_.joinable()) return;
    if (getpid() != pid_) {  // after a fork there is no such thread
      thread_.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void spare() { spared_ = true; }
  void end_soon() { doomed_ = true; }

  // The error that has ended the connection; 0 while there is none.
  int error() const { return error_; }

 private:
  using Clock = std::chrono::steady_clock;

  static Clock::duration seconds(double number) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(number));
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto next = Clock::now();
    while (!stopped_) {
      beat();
      end_if_ignored();
      next = std::max(next + period_, Clock::now());
      wake_.wait_until(lock, next, [this] { return stopped_; });
    }
  }

  void beat() {
    if (error_) return;
    // What the kernel did not take is sent next time, so that a beat is never cut short.
    if (unsent_.empty()) unsent_ = encode(stamp_, size_);
    const auto sent = send(socket_, unsent_.data(), unsent_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      unsent_.erase(0, static_cast<std::size_t>(sent));
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      error_ = errno;
    }
  }

  // Whether there is an order that nobody has read; lines without a brace are signs of life.
  bool has_order() const {
    char text[4096];
    const auto num = recv(socket_, text, sizeof text, MSG_PEEK | MSG_DONTWAIT);
    return num > 0 && std::memchr(text, '{', static_cast<std::size_t>(num)) != nullptr;
  }

  bool is_cut_off() const {
    return error_ != 0 && error_ != EPIPE && error_ != ECONNRESET && error_ != EBADF;
  }

  void end_if_ignored() {
    if (spared_ || !(doomed_ || is_cut_off() || has_order())) {
      ignored_ = {};
      return;
    }
    const auto now = Clock::now();
    if (ignored_ == Clock::time_point{}) ignored_ = now;
    if (now - ignored_ > patience_) _exit(code_);
  }

  const int socket_;
  const std::int64_t* const stamp_;
  const std::size_t size_;
  const Clock::duration period_, patience_;
  const int code_;
  const pid_t pid_;
  std::atomic<bool> spared_{false}, doomed_{false};
  std::atomic<int> error_{0};
  std::string unsent_;
  Clock::time_point ignored_{};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace heartbeat
