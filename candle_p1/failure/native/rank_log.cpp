// The output of a rank, of which there is a file only once there is any.
//
// Standard output and error go to memory. rank_log_write moves what is there to the file, to which
// later output then goes. A process that dies of an error in C or C++ does so in the handler of the
// signal, so that its last words are not lost; everything here may be called there (see
// signal-safety(7)).

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "rank_log.h"

namespace failure {
namespace {

constexpr int kFatal[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
constexpr long kPatience = 1000;  // ms

char path[4096];
int memory = -1;    // what the output goes to at first; -1: the log has not begun, or has ended
int fallback = -1;  // where it goes if the file cannot be opened
off_t position;     // how much of the memory has been moved
bool moved;         // whether output goes to the file by now
std::atomic_flag busy = ATOMIC_FLAG_INIT;
struct sigaction before[sizeof(kFatal) / sizeof(kFatal[0])];

void copy_to(int file) {
  char block[4096];
  ssize_t size;
  while ((size = pread(memory, block, sizeof(block), position)) > 0) {
    const ssize_t written = write(file, block, size);
    if (written < 0 && errno != EINTR) return;
    if (written > 0) position += written;
  }
}

bool has_more() {
  struct stat status;
  return fstat(memory, &status) == 0 && status.st_size > position;
}

// Moves the output to the file. Returns 0 if there was none, 1 if it is there, and a negative error
// number if it went to the fallback, because the file cannot be opened.
int move() {
  if (memory < 0 || !has_more()) return moved;
  int opened = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const int error = opened < 0 ? errno : 0;
  const int file = opened < 0 ? fallback : opened;
  copy_to(file);
  if (!moved) {
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    moved = true;
    copy_to(file);  // what was written meanwhile
  }
  if (opened >= 0) close(opened);
  return error ? -error : 1;
}

// Waits, but not for ever, for another thread that moves the output.
bool enter() {
  for (long waited = 0; busy.test_and_set(std::memory_order_acquire); ++waited) {
    if (waited == kPatience) return false;
    const timespec millisecond = {0, 1000000};
    nanosleep(&millisecond, nullptr);
  }
  return true;
}

void leave() { busy.clear(std::memory_order_release); }

void handle(int number, siginfo_t* info, void*) {
  if (enter()) {
    move();
    leave();
  }
  for (size_t i = 0; i < sizeof(kFatal) / sizeof(kFatal[0]); ++i)
    if (kFatal[i] == number) sigaction(number, &before[i], nullptr);
  // An instruction that has failed fails again, now for the handler that was there before.
  if (info == nullptr || info->si_code <= 0) raise(number);
}

}  // namespace

int rank_log_begin(const char* file, int screen) {
  if (memory >= 0) return EBUSY;
  if (strlen(file) >= sizeof(path)) return ENAMETOOLONG;
  strcpy(path, file);
  const int made = memfd_create("candle-p1-rank-log", MFD_CLOEXEC);
  if (made < 0) return errno;
  fallback = screen;
  position = 0;
  moved = false;
  memory = made;
  dup2(memory, STDOUT_FILENO);
  dup2(memory, STDERR_FILENO);
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < sizeof(kFatal) / sizeof(kFatal[0]); ++i)
    sigaction(kFatal[i], &action, &before[i]);
  return 0;
}

int rank_log_write() {
  if (!enter()) return 0;
  const int outcome = move();
  leave();
  return outcome;
}

void rank_log_end() {
  if (!enter()) return;
  for (size_t i = 0; i < sizeof(kFatal) / sizeof(kFatal[0]); ++i) {
    struct sigaction now;
    if (sigaction(kFatal[i], nullptr, &now) == 0 && now.sa_sigaction == handle)
      sigaction(kFatal[i], &before[i], nullptr);
  }
  if (memory >= 0) close(memory);
  memory = -1;
  leave();
}

}  // namespace failure
