// A process that ends by itself says so with its last word on a socket: a message.
//
// Libraries end the process by exit or abort when another one of the job has gone. A process that
// was killed, has crashed or has lost its machine says nothing, by which it is known to have been
// the first, even where its connection is closed a little later than those of the others. Nothing
// but _exit ends a process by itself without a word.

#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace failure::last_word {

constexpr char kMessage[] = "{\"last_word\": true}\n";

inline std::atomic<int> socket{-1};
inline pid_t owner = 0;
inline struct sigaction before;

inline void say() {
  const int last = socket.exchange(-1);
  if (last >= 0 && getpid() == owner)
    send(last, kMessage, sizeof kMessage - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

inline void handle(int number, siginfo_t*, void*) {
  const int error = errno;
  say();
  sigaction(number, &before, nullptr);
  raise(number);  // for the handler that was there before
  errno = error;
}

inline bool install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return std::atexit(say) == 0 && sigaction(SIGABRT, &action, &before) == 0;
}

// From now on, the word is said on this socket; -1: it is not said any more.
inline void use(int connection) {
  static const bool installed = install();
  static_cast<void>(installed);
  owner = getpid();
  socket = connection;
}

}  // namespace failure::last_word
