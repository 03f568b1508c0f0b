// Averages and copies arrays of the ranks of a node through memory that they share, and updates
// weights by averages.
//
// Ranks go through their arrays in pieces that stay in the caches that they share, so that main memory
// is only read once and written once, however many ranks there are. Two ranks add the other one's
// piece to their own; more ranks divide a piece among themselves, as in a reduce-scatter followed by
// an allgather. Values are added in the order of the ranks, so all of them get the same bits.
//
// An update divides each piece among the ranks, too: a rank averages its share, updates the weights
// of it and their state, and copies those of the others, whose average it never sees. Of a gradient
// that the ranks have as factors, they exchange these first.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "factors.h"
#include "loops.h"

namespace node_memory {

constexpr std::size_t kPieceBytes = 1 << 19;    // what is averaged at a time
constexpr std::size_t kUpdatedBytes = 1 << 17;  // the gradient of what is updated at a time
constexpr std::size_t kBlock = 2048;            // values that are averaged before they are used
constexpr int kMaxArrays = 3;                   // what is updated by one gradient

// A buffer holds a gradient, and the updated share of the arrays: see Thread::updated.
static_assert(kUpdatedBytes + kMaxArrays * (kUpdatedBytes / 2 + 128) <= kPieceBytes);

constexpr int kSpins = 1 << 12;  // looks at a counter before a thread goes to sleep: about 50 us

// What one thread of one rank tells those of the other ranks. A line of the cache each.
struct alignas(64) Place {
  std::atomic<uint32_t> turn;      // how many barriers it has reached
  std::atomic<uint32_t> sleepers;  // how many threads wait for the next one in the kernel
  std::atomic<int64_t> tag;        // what it averages
};

// The buffers of one thread of one rank.
struct alignas(64) Buffers {
  unsigned char pieces[2][kPieceBytes];
};

enum class Result { kDone, kOtherTag, kTimeout };

struct Outcome {
  Result result = Result::kDone;
  int rank = -1;  // which of the others was different or late
};

// What a thread updates: weights and their state, by the average of all ranks' gradients.
struct Updated {
  const float* gradient;                   // this rank's
  const tensorflow_c::Factors* factors;    // in place of it: those of the average
  float* arrays[kMaxArrays];
  int num_arrays;
  std::size_t num;
};

// The bytes of all ranks, one after the other.
struct Gathered {
  std::vector<unsigned char> bytes;
  std::vector<std::size_t> starts;  // of each rank's, and the end
};

inline Updated part_of(const Updated& all, std::size_t begin, std::size_t num) {
  Updated part = all;
  if (part.factors == nullptr) part.gradient += begin;
  part.num = num;
  for (int i = 0; i < all.num_arrays; ++i) part.arrays[i] += begin;
  return part;
}

// Updates arrays by a gradient that is formed of its factors, block by block.
template <typename Apply>
void update_by_factors(const Updated& all, Apply apply) {
  alignas(64) float gradient[kBlock];
  for (std::size_t begin = 0; begin < all.num; begin += kBlock) {
    const Updated block = part_of(all, begin, std::min(kBlock, all.num - begin));
    block.factors->form(block.arrays[0], gradient, block.num);
    apply(block.arrays, gradient, block.num);
  }
}

// Where the share of one of several begins: at a line of the cache.
inline std::size_t bound(std::size_t num, std::size_t number, std::size_t num_shares) {
  return number == num_shares ? num : num / 16 * number / num_shares * 16;
}

// The memory has one Place and one Buffers for each thread of each rank, and begins as zeros.
inline std::size_t num_bytes(int num_ranks, int num_threads) {
  return static_cast<std::size_t>(num_ranks) * num_threads * (sizeof(Place) + sizeof(Buffers));
}

// One thread of a rank, which works together with the same thread of the others.
class Thread {
 public:
  Thread(void* memory, int rank, int num_ranks, int num_threads, int thread, double timeout_s)
      : places_(static_cast<Place*>(memory) + thread * num_ranks),
        buffers_(reinterpret_cast<Buffers*>(static_cast<Place*>(memory) +
                                            num_threads * num_ranks) +
                 thread * num_ranks),
        rank_(rank),
        num_ranks_(num_ranks),
        timeout_s_(timeout_s) {}

  // Returns once all ranks are here with the same tag. An exchange of at least one value must follow:
  // its barrier comes after all have compared their tags.
  Outcome meet(int64_t tag) {
    places_[rank_].tag.store(tag, std::memory_order_relaxed);
    Outcome outcome = wait_for_all();
    for (int i = 0; i < num_ranks_ && outcome.result == Result::kDone; ++i) {
      if (places_[i].tag.load(std::memory_order_relaxed) != tag) outcome = {Result::kOtherTag, i};
    }
    return outcome;
  }

  // Writes the averages of all ranks' values, in place if the two are the same.
  template <typename Value>
  Outcome average(const Value* values, Value* averages, std::size_t num) {
    constexpr std::size_t piece = kPieceBytes / sizeof(Value);
    for (std::size_t begin = 0; begin < num; begin += piece) {
      const std::size_t size = std::min(piece, num - begin);
      const Outcome outcome = num_ranks_ == 2
                                  ? average_of_two(values + begin, averages + begin, size)
                                  : average_piece(values + begin, averages + begin, size);
      if (outcome.result != Result::kDone) return outcome;
    }
    return {};
  }

  // Copies the root's values to all other ranks.
  template <typename Value>
  Outcome broadcast(Value* values, std::size_t num, int root) {
    constexpr std::size_t piece = kPieceBytes / sizeof(Value);
    for (std::size_t begin = 0; begin < num; begin += piece) {
      const std::size_t num_bytes = std::min(piece, num - begin) * sizeof(Value);
      Value* shared = buffer<Value>(root, next_turn());
      if (rank_ == root) std::memcpy(shared, values + begin, num_bytes);
      const Outcome outcome = wait_for_all();
      if (outcome.result != Result::kDone) return outcome;
      if (rank_ != root) std::memcpy(values + begin, shared, num_bytes);
    }
    return {};
  }

  // Puts together what all ranks have, a number of bytes each.
  Outcome gather(const void* mine, std::size_t num, Gathered& all) {
    std::vector<std::size_t> sizes(num_ranks_);
    Outcome outcome = share(&num, sizeof num, [&](int rank, const void* theirs) {
      std::memcpy(&sizes[rank], theirs, sizeof num);
    });
    if (outcome.result != Result::kDone) return outcome;
    all.starts.assign(1, 0);
    for (std::size_t size : sizes) all.starts.push_back(all.starts.back() + size);
    all.bytes.resize(all.starts.back());
    const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
    for (std::size_t begin = 0; begin < most && outcome.result == Result::kDone;
         begin += kPieceBytes) {
      const auto rest = [&](int rank) {
        return std::min(kPieceBytes, sizes[rank] - std::min(sizes[rank], begin));
      };
      const auto* piece = static_cast<const unsigned char*>(mine) + begin;
      outcome = share(piece, rest(rank_), [&](int rank, const void* theirs) {
        std::memcpy(all.bytes.data() + all.starts[rank] + begin, theirs, rest(rank));
      });
    }
    // What follows may begin with either of the buffers, which all ranks must have read by then.
    return outcome.result == Result::kDone ? wait_for_all() : outcome;
  }

  // Updates arrays by apply(arrays, average, num), each value on one rank, and copies what the other
  // ranks have updated. Adds to `apart_s` the time in which it did not wait, or copy for others.
  template <typename Apply>
  Outcome update(const std::vector<Updated>& all, Apply apply, double& apart_s) {
    std::vector<Updated> pieces;
    for (const Updated& each : all) {
      constexpr std::size_t most = kUpdatedBytes / sizeof(float);
      for (std::size_t begin = 0; begin < each.num; begin += most) {
        pieces.push_back(part_of(each, begin, std::min(most, each.num - begin)));
      }
    }
    // Three steps of three pieces go on between two barriers. So two buffers, used in turn, are
    // enough: what was written into one is read before the next barrier but one.
    const std::size_t num = pieces.size();
    for (std::size_t i = 0; i < num + 2; ++i) {
      if (i < num) offer(pieces[i], i % 2);
      if (i >= 1 && i <= num) {
        const auto begin = std::chrono::steady_clock::now();
        update_share(pieces[i - 1], (i - 1) % 2, apply);
        apart_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      }
      if (i >= 2) collect(pieces[i - 2], i % 2);
      if (i == num + 1) break;
      const Outcome outcome = wait_for_all();
      if (outcome.result != Result::kDone) return outcome;
    }
    return {};
  }

 private:
  Updated share_of(const Updated& piece, int rank) const {
    const std::size_t begin = bound(piece.num, rank);
    return part_of(piece, begin, bound(piece.num, rank + 1) - begin);
  }

  // The first part of a buffer has a rank's gradient, the second one what it has updated.
  float* offered(int rank, std::size_t number) const { return buffer<float>(rank, number); }
  float* updated(int rank, std::size_t number, int array, std::size_t share) const {
    return offered(rank, number) + kUpdatedBytes / sizeof(float) + array * share;
  }

  // Calls take(rank, values) with what every rank passes, at most a piece.
  template <typename Take>
  Outcome share(const void* mine, std::size_t num_bytes, Take take) {
    const uint32_t turn = next_turn();
    if (num_bytes > 0) std::memcpy(buffer<unsigned char>(rank_, turn), mine, num_bytes);
    const Outcome outcome = wait_for_all();
    for (int i = 0; i < num_ranks_ && outcome.result == Result::kDone; ++i) {
      take(i, buffer<unsigned char>(i, turn));
    }
    return outcome;
  }

  void offer(const Updated& piece, std::size_t number) const {
    if (piece.factors != nullptr) return;
    for (int i = 0; i < num_ranks_; ++i) {
      if (i == rank_) continue;
      const Updated share = share_of(piece, i);
      std::memcpy(offered(rank_, number) + bound(piece.num, i), share.gradient,
                  share.num * sizeof(float));
    }
  }

  template <typename Apply>
  void update_share(const Updated& piece, std::size_t number, Apply apply) const {
    const Updated share = share_of(piece, rank_);
    const std::size_t first = bound(piece.num, rank_);
    if (share.factors != nullptr) update_by_factors(share, apply);
    alignas(64) float average[kBlock];
    for (std::size_t begin = 0; begin < share.num && share.factors == nullptr; begin += kBlock) {
      const std::size_t num = std::min(kBlock, share.num - begin);
      const auto values = [&](int rank) {
        return rank == rank_ ? share.gradient + begin : offered(rank, number) + first + begin;
      };
      add_floats(average, values(0), values(1), num, num_ranks_ == 2 ? 0.5f : 1.0f);
      for (int i = 2; i < num_ranks_; ++i) {
        add_floats(average, average, values(i), num,
                   i + 1 == num_ranks_ ? 1.0f / static_cast<float>(num_ranks_) : 1.0f);
      }
      apply(part_of(share, begin, num).arrays, average, num);
    }
    for (int i = 0; i < share.num_arrays; ++i) {
      std::memcpy(updated(rank_, number, i, share.num), share.arrays[i], share.num * sizeof(float));
    }
  }

  void collect(const Updated& piece, std::size_t number) const {
    for (int i = 0; i < num_ranks_; ++i) {
      if (i == rank_) continue;
      const Updated share = share_of(piece, i);
      for (int array = 0; array < share.num_arrays; ++array) {
        copy_past_caches(share.arrays[array], updated(i, number, array, share.num), share.num);
      }
    }
  }

  // Memory that is not read before it leaves the caches is written without being read first.
  static void copy_past_caches(float* to, const float* from, std::size_t num) {
    std::size_t i = 0;
#if defined(__x86_64__)
    if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
      for (; i + 4 <= num; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
      _mm_sfence();  // before anyone is told
    }
#endif
    std::memcpy(to + i, from + i, (num - i) * sizeof(float));
  }

  // There is one barrier: whoever has passed the next one has read what was written before this one,
  // so two buffers, used in turn, are enough.
  template <typename Value>
  Outcome average_of_two(const Value* values, Value* averages, std::size_t num) {
    const uint32_t turn = next_turn();
    std::memcpy(buffer<Value>(rank_, turn), values, num * sizeof(Value));
    const Outcome outcome = wait_for_all();
    if (outcome.result == Result::kDone) {
      add(averages, values, buffer<Value>(1 - rank_, turn), num, Value(0.5));
    }
    return outcome;
  }

  // The first buffer of a rank has its values, the second one its share of the averages.
  template <typename Value>
  Outcome average_piece(const Value* values, Value* averages, std::size_t num) {
    std::memcpy(buffer<Value>(rank_, 0), values, num * sizeof(Value));
    Outcome outcome = wait_for_all();
    if (outcome.result != Result::kDone) return outcome;
    const std::size_t begin = bound(num, rank_), share = bound(num, rank_ + 1) - begin;
    Value* sums = buffer<Value>(rank_, 1) + begin;
    std::memcpy(sums, buffer<Value>(0, 0) + begin, share * sizeof(Value));
    for (int i = 1; i < num_ranks_; ++i) {
      const Value factor = i + 1 == num_ranks_ ? Value(1) / static_cast<Value>(num_ranks_) : 1;
      add(sums, sums, buffer<Value>(i, 0) + begin, share, factor);
    }
    outcome = wait_for_all();
    for (int i = 0; i < num_ranks_ && outcome.result == Result::kDone; ++i) {
      const std::size_t first = bound(num, i);
      std::memcpy(averages + first, buffer<Value>(i, 1) + first,
                  (bound(num, i + 1) - first) * sizeof(Value));
    }
    return outcome;
  }

  std::size_t bound(std::size_t num, int rank) const {
    return node_memory::bound(num, rank, num_ranks_);
  }

  template <typename Value>
  Value* buffer(int rank, uint32_t number) const {
    return reinterpret_cast<Value*>(buffers_[rank].pieces[number % 2]);
  }

  static void add(float* sums, const float* values, const float* others, std::size_t num,
                  float factor) {
    add_floats(sums, values, others, num, factor);
  }

  static void add(double* sums, const double* values, const double* others, std::size_t num,
                  double factor) {
    for (std::size_t i = 0; i < num; ++i) sums[i] = (values[i] + others[i]) * factor;
  }

  // Without __restrict for the values, which may be the sums.
  FOR_EVERY_PROCESSOR static void add_floats(float* sums, const float* values,
                                             const float* __restrict others, std::size_t num,
                                             float factor) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < num; ++i) sums[i] = (values[i] + others[i]) * factor;
  }

  uint32_t next_turn() const {
    return places_[rank_].turn.load(std::memory_order_relaxed) + 1;
  }

  Outcome wait_for_all() {
    Place& mine = places_[rank_];
    const uint32_t turn = next_turn();
    mine.turn.store(turn);
    if (mine.sleepers.load() != 0) futex(mine.turn, FUTEX_WAKE, INT32_MAX, nullptr);
    for (int i = 0; i < num_ranks_; ++i) {
      if (!wait_for(places_[i], turn)) return {Result::kTimeout, i};
    }
    return {};
  }

  // Returns whether it came in time.
  bool wait_for(Place& other, uint32_t turn) const {
    for (int i = 0; i < kSpins; ++i) {
      if (has_reached(other.turn.load(std::memory_order_acquire), turn)) return true;
      pause();
    }
    const auto begin = std::chrono::steady_clock::now();
    other.sleepers.fetch_add(1);
    bool is_there = false;
    while (true) {
      const uint32_t seen = other.turn.load();
      is_there = has_reached(seen, turn);
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
      if (is_there || (timeout_s_ > 0 && waited.count() > timeout_s_)) break;
      const timespec at_most{1, 0};
      futex(other.turn, FUTEX_WAIT, seen, &at_most);
    }
    other.sleepers.fetch_sub(1);
    return is_there;
  }

  // The counters start again at zero after 2^32.
  static bool has_reached(uint32_t turn, uint32_t wanted) {
    return static_cast<int32_t>(turn - wanted) >= 0;
  }

  static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
                    const timespec* at_most) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, at_most, nullptr, 0);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Place* places_;
  Buffers* buffers_;
  int rank_;
  int num_ranks_;
  double timeout_s_;
};

}  // namespace node_memory
