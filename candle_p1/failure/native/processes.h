// What a rank sees of other processes on its node, and what it removes or kills when it ends.

#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

extern char** environ;

namespace failure {

namespace fs = std::filesystem;

// The state of a process as in /proc: 'T' if a signal has stopped it, 't' if a debugger has halted
// it, 'Z' if it has ended; 0 if there is none.
inline char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto end = text.rfind(')');  // of the name, which may hold anything
  return end == std::string::npos || end + 2 >= text.size() ? 0 : text[end + 2];
}

inline bool is_stopped(pid_t pid) { return state_of(pid) == 'T'; }

// When a process began, in the kernel's ticks: the 22nd field of its stat; "" if there is none. With
// its id, this tells it from a later process.
inline std::string begin_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return field;
}

// The parent of a process; 0 if it is not known.
inline pid_t parent_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("PPid:", 0) == 0) return static_cast<pid_t>(std::atoi(line.c_str() + 5));
  return 0;
}

inline bool is_gone(pid_t pid) {
  const char state = state_of(pid);
  return state == 0 || state == 'Z' || state == 'X';
}

// The other children of a process, of which this one is a child.
inline std::set<pid_t> siblings(pid_t parent) {
  std::set<pid_t> children;
  std::error_code error;
  fs::directory_iterator task("/proc/" + std::to_string(parent) + "/task", error);
  for (; !error && task != fs::directory_iterator(); task.increment(error)) {
    std::ifstream file(task->path() / "children");
    for (pid_t pid; file >> pid;) children.insert(pid);
  }
  children.erase(getpid());
  return children;
}

// The next one of them in the order of process ids, cyclically; 0: none.
inline pid_t next_sibling(pid_t parent) {
  const auto all = siblings(parent);
  const auto next = all.upper_bound(getpid());
  if (next != all.end()) return *next;
  return all.empty() ? 0 : *all.begin();
}

// Starts a program in a session of its own, which outlives this process; returns its process id, 0
// if it cannot be started. It inherits these file descriptors.
inline pid_t start_detached(const std::vector<std::string>& command,
                            const std::vector<int>& inherited = {}) {
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  for (const int number : {0, 1, 2})
    posix_spawn_file_actions_addopen(&files, number, "/dev/null", number ? 1 : 0, 0);
  // Copies are not closed in the program. A number that is closed by now has none.
  std::vector<int> copies;
  for (const int number : inherited) copies.push_back(fcntl(number, F_DUPFD, 3));
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  pid_t pid = 0;
  if (posix_spawnp(&pid, words[0], &files, &attributes, words.data(), environ) != 0) pid = 0;
  for (const int copy : copies) close(copy);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  return pid;
}

// Whether a file is one through which Open MPI's ranks of a node exchange messages, by its name.
inline bool is_segment(const std::string& name) {
  return name.rfind("sm_segment.", 0) == 0 || name.rfind("vader_segment.", 0) == 0;
}

// Removes the files of the shared memory through which this process exchanges messages with other
// ranks of its node (Open MPI's). What is mapped stays usable. A launcher ends the other ranks as
// soon as one exits with a code that is not 0, before MPI would remove these files.
inline void remove_shared_memory() {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> found;
  for (std::string line; std::getline(maps, line);) {
    const auto begin = line.find('/');
    if (begin == std::string::npos) continue;
    const auto path = line.substr(begin);
    if (is_segment(fs::path(path).filename().string())) found.insert(path);
  }
  for (const auto& path : found) unlink(path.c_str());  // another rank may have been faster
}

// The launcher of this process, and its daemon on other nodes.
//
// `parent` is the parent of this process: the launcher, or a script around the rank. `session` is
// the directory of Open MPI's launcher on this node, which is named after its process id; empty if
// there is none.
class Launcher {
 public:
  Launcher() = default;
  Launcher(pid_t parent, std::string session) : parent_(parent), session_(std::move(session)) {
    const auto name = fs::path(session_).filename().string();
    const auto dot = name.rfind('.');
    const pid_t named = dot == std::string::npos ? 0 : std::atoi(name.c_str() + dot + 1);
    pid_ = parent;
    while (pid_ > 1 && pid_ != named) pid_ = parent_of(pid_);
    if (pid_ <= 1) pid_ = parent, session_.clear();  // it is none of ours
    begin_ = begin_of(pid_);
  }

  bool is_known() const { return parent_ > 1; }
  pid_t pid() const { return pid_; }
  pid_t parent() const { return parent_; }
  const std::string& session() const { return session_; }
  bool has_script() const { return pid_ != parent_; }  // around the rank

  // The launcher of a scheduler may be invisible in /proc, so that only its child knows of its end.
  bool has_died() const {
    return is_known() && (getppid() != parent_ || (has_script() && is_gone(pid_)));
  }

  // Removes what a launcher that has died would have removed. While its directory is there, a later
  // launcher of the same process id does not start.
  void clean() const {
    if (session_.empty() || !is_gone(pid_)) return;
    std::error_code error;
    fs::remove_all(session_, error);
  }

  // Kills the launcher a moment later, if it is still there: one that is stopped, or has lost a
  // node, does not end by itself, and ignores SIGTERM.
  void kill_soon(int seconds) const {
    if (!is_known() || begin_.empty()) return;
    const char* script = R"(
      sleep "$1"
      now=$(sed 's/.*) //' "/proc/$2/stat" | cut -d' ' -f20)  # when it began
      if [ "$now" = "$3" ]; then kill -KILL "$2"; fi
      if [ -z "$now" ] || [ "$now" = "$3" ]; then rm -rf "$4"; fi)";
    start_detached({"sh", "-c", script, "sh", std::to_string(seconds), std::to_string(pid_), begin_,
                    session_});
  }

 private:
  pid_t parent_ = 0, pid_ = 0;
  std::string session_, begin_;
};

}  // namespace failure
