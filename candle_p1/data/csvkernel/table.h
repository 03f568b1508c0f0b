// Parses lines of separated fields into a matrix of numbers and columns of coded text.
//
// Everything here works on a range of memory that begins with a line and ends after one, and reads
// nothing outside of it; several threads can parse different ranges at the same time.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ends.h"
#include "number.h"

namespace csvkernel {

// The layout of a table.
struct Layout {
  char separator = ',';
  std::vector<bool> is_text;         // for each column
  std::vector<std::string> missing;  // words that stand for a missing number
  bool empty_text = false;           // whether text may be empty or one of these words, which may
                                     // then have blanks around them
};

// What is wrong with the first line that does not match the layout.
struct Problem {
  std::size_t line;        // its offset from the beginning of the memory
  std::size_t num_fields;  // in that line
  std::size_t column;      // of the first wrong field, from 0; if the number of fields is right
  std::string field;       // its content
};

// The distinct values of a column of text, in order of first appearance.
class Dictionary {
 public:
  // The code of a value that is the same as the last one; -1 if it is another.
  std::int32_t code_of_last(std::string_view value) const {
    return last_ >= 0 && names_[static_cast<std::size_t>(last_)] == value ? last_ : -1;
  }

  std::int32_t code(std::string_view value) {
    const auto found = codes_.find(value);
    if (found != codes_.end()) return last_ = found->second;
    last_ = static_cast<std::int32_t>(names_.size());
    names_.emplace_back(value);
    codes_.emplace(names_.back(), last_);  // a deque does not move its strings
    return last_;
  }

  const std::deque<std::string>& names() const { return names_; }

 private:
  std::deque<std::string> names_;
  std::unordered_map<std::string_view, std::int32_t> codes_;
  std::int32_t last_ = -1;
};

// Gives a line's fields one after the other; quotes must be closed within the line.
class Fields {
 public:
  Fields(const char* first, const char* stop, char separator)
      : next_(first), stop_(stop), separator_(separator) {}

  // The beginning of the next field; the end of the line if there is none.
  const char* position() const { return next_; }
  bool at_end() const { return ended_; }

  // Gives the content of the next field; returns false if a quote is not closed.
  bool read(std::string_view& content) {
    if (next_ < stop_ && *next_ == '"') return read_quoted(content);
    const char* end = next_;
    while (end < stop_ && *end != separator_ && *end != '\n') ++end;
    const bool line_ends = end == stop_ || *end == '\n';
    const char* last = line_ends && end > next_ && end[-1] == '\r' ? end - 1 : end;
    content = {next_, static_cast<std::size_t>(last - next_)};
    pass(end);
    return true;
  }

 private:
  bool read_quoted(std::string_view& content) {
    unquoted_.clear();
    const char* p = next_ + 1;
    for (;; ++p) {
      if (p == stop_ || *p == '\n') return false;
      if (*p == '"') {
        if (p + 1 == stop_ || p[1] != '"') break;
        ++p;
      }
      unquoted_.push_back(*p);
    }
    ++p;
    if (p < stop_ && *p == '\r' && (p + 1 == stop_ || p[1] == '\n')) ++p;
    if (p < stop_ && *p != separator_ && *p != '\n') return false;
    content = unquoted_;
    pass(p);
    return true;
  }

  void pass(const char* end) {
    ended_ = end == stop_ || *end == '\n';
    next_ = end == stop_ ? end : end + 1;
  }

  const char* next_;
  const char* stop_;
  char separator_;
  bool ended_ = false;
  std::string unquoted_;
};

inline const char* after_line(const char* p, const char* stop) {
  const void* found = std::memchr(p, '\n', static_cast<std::size_t>(stop - p));
  return found ? static_cast<const char*>(found) + 1 : stop;
}

// Whether a line has only spaces and tabs; such lines are skipped.
inline bool is_blank(const char* p, const char* stop, char separator) {
  while (p < stop && *p != separator && (*p == ' ' || *p == '\t')) ++p;
  if (p < stop && *p == '\r') ++p;
  return p == stop || *p == '\n';
}

inline std::size_t count_rows(const char* first, const char* stop, char separator) {
  std::size_t num_rows = 0;
  while (first < stop) {
    num_rows += !is_blank(first, stop, separator);
    first = after_line(first, stop);
  }
  return num_rows;
}

// Parses the lines of one range. `Ends` is what finds the ends of fields, see ends.h.
template <class T, class Ends = FieldEnds>
class Parser {
 public:
  explicit Parser(const Layout& layout) : layout_(layout) {
    std::size_t num_text = 0;
    for (const bool is_text : layout.is_text) {
      if (runs_.empty() || runs_.back().is_text != is_text) runs_.push_back({is_text, 0});
      ++runs_.back().num_columns;
      num_text += is_text;
    }
    num_numbers_ = layout.is_text.size() - num_text;
    dictionaries_.resize(num_text);
  }

  // Parses [first, stop) into rows of numbers, starting at `values`, and codes of text, starting at
  // codes[c] for column c. There is space for `capacity` rows.
  //
  // Returns the number of rows parsed; if there are more lines, `problem` says what is wrong.
  std::size_t parse(const char* first, const char* stop, T* values, std::int32_t* const* codes,
                    std::size_t capacity, std::optional<Problem>& problem) {
    std::size_t row = 0;
    const char* line = first;
    Ends ends(first, stop, layout_.separator);
    [[maybe_unused]] std::size_t next_try = 0;
    while (line < stop) {
      if constexpr (Ends::kHasEights) {
        if (row >= next_try && row + kRows <= capacity) {
          if (const char* next = parse_short_rows(ends, values, codes, row)) {
            line = next;
            values += kRows * num_numbers_;
            row += kRows;
            continue;
          }
          next_try = row + kRows;
        }
      }
      if (is_blank(line, stop, layout_.separator)) {
        line = after_line(line, stop);
        ends.restart(line);
        continue;
      }
      const char* next = row < capacity ? parse_row(line, stop, ends, values, codes, row) : nullptr;
      if (next == nullptr) {
        problem = diagnose(line, stop);
        problem->line = static_cast<std::size_t>(line - first);
        break;
      }
      line = next;
      values += num_numbers_;
      ++row;
    }
    return row;
  }

  const std::vector<Dictionary>& dictionaries() const { return dictionaries_; }

 private:
  static constexpr std::size_t kRows = 8, kShort = 16;

  struct Run {
    bool is_text;
    std::size_t num_columns;
  };

  // Parses the next kRows lines at once, if there are few columns and all fields are plain;
  // otherwise returns nullptr, and the lines must be parsed one by one. A line that is not blank has
  // a number or a separator, so blank lines are not plain.
  const char* parse_short_rows(Ends& ends, T* values, std::int32_t* const* codes, std::size_t row) {
    const std::size_t num_columns = layout_.is_text.size();
    if (num_columns > kShort || num_numbers_ == 0) return nullptr;
    const std::uint32_t* end = ends.peek(kRows * num_columns);
    if (end == nullptr) return nullptr;
    const char* const base = ends.base();
    std::uint32_t befores[kRows * kShort], numbers[kRows * kShort];
    std::size_t num = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
      const std::uint32_t* const last = end + (num_columns - 1);
      std::size_t text_column = 0;
      for (const Run& run : runs_) {
        for (std::size_t k = 0; k < run.num_columns; ++k, ++end) {
          if ((base[*end] == '\n') != (end == last)) return nullptr;
          if (run.is_text) {
            const char* const first = base + (end[-1] + 1);
            const std::string_view content(first, static_cast<std::size_t>(base + *end - first));
            std::int32_t code = dictionaries_[text_column].code_of_last(content);
            if (code < 0) {
              if (content.empty() || content.front() == '"' || !is_text_present(content)) return nullptr;
              code = dictionaries_[text_column].code(content);
            }
            codes[text_column++][row + i] = code;
          } else {
            befores[num] = end[-1];
            numbers[num++] = *end;
          }
        }
      }
    }
    for (std::size_t i = 0; i < num; i += 8) {
      if (!ends.read_eight(befores + i, numbers + i, values + i)) return nullptr;
    }
    ends.skip(kRows * num_columns);
    return base + end[-1] + 1;
  }

  // Returns where the next line begins; nullptr if this one does not match the layout. The next of
  // `ends` is that of the first field, and then of the next line's.
  const char* parse_row(const char* p, const char* stop, Ends& ends, T* out,
                        std::int32_t* const* codes, std::size_t row) {
    std::size_t text_column = 0;
    bool ended = false;
    for (const Run& run : runs_) {
      if (ended) return nullptr;  // too few fields
      if (!run.is_text) {
        p = parse_numbers(p, stop, ends, out, run.num_columns, ended);
        if (p == nullptr) return nullptr;
        out += run.num_columns;
        continue;
      }
      for (std::size_t i = 0; i < run.num_columns; ++i, ++text_column) {
        if (ended) return nullptr;
        p = parse_text(p, stop, ends, dictionaries_[text_column], codes[text_column][row], ended);
        if (p == nullptr) return nullptr;
      }
    }
    return ended ? p : nullptr;
  }

  // Returns where the next field begins; nullptr if there is no text.
  const char* parse_text(const char* p, const char* stop, Ends& ends, Dictionary& dictionary,
                         std::int32_t& code, bool& ended) {
    const char* const field_end = ends.next();
    if (field_end != nullptr && *p != '"') {
      ended = *field_end == '\n';
      const bool has_return = ended && field_end > p && field_end[-1] == '\r';
      const char* const last = field_end - has_return;
      const std::string_view content(p, static_cast<std::size_t>(last - p));
      code = dictionary.code_of_last(content);
      if (code < 0) {
        if (!is_text_present(content)) return nullptr;
        code = dictionary.code(content);
      }
      return field_end + 1;
    }
    Fields fields(p, stop, layout_.separator);
    std::string_view content;
    if (!fields.read(content) || !is_text_present(content)) return nullptr;
    code = dictionary.code(content);
    p = fields.position();
    ended = fields.at_end();
    if (p - 1 != field_end) ends.restart(p);  // a quoted separator
    return p;
  }

  // Returns where the next field begins; nullptr if there are not so many numbers.
  const char* parse_numbers(const char* p, const char* stop, Ends& ends, T* out,
                            std::size_t num_columns, bool& ended) {
    const T* const end = out + num_columns;
    const char separator = layout_.separator;  // kept in a register
    [[maybe_unused]] const T* next_try = out;
    while (out < end) {
      if (ended) return nullptr;
      if constexpr (Ends::kHasEights) {
        if (out >= next_try) {
          p = ends.parse_numbers(p, out, end);
          next_try = out + 8;
        }
      }
      const char* const field_end = ends.next();
      if (field_end != nullptr && field_end - p < kWindow && stop - p >= kWindow) {
        const Window window(p);
        const auto length = static_cast<int>(field_end - p);
        if (length == 1 && end - out >= 8 && window.is_eight_digits(separator)) {
          window.store_eight_digits(out);
          out += 8;
          p += 16;
          ends.restart(p);
          continue;
        }
        double value = 0;
        if (window.parse(length, value)) {
          *out++ = static_cast<T>(value);
          ended = *field_end == '\n';
          p = field_end + 1;
          continue;
        }
      }
      p = parse_unusual_number(p, stop, *out, ended);
      if (p == nullptr) return nullptr;
      ++out;
      if (p - 1 != field_end) ends.restart(p);  // a quoted separator
    }
    return p;
  }

  // Returns where the next field begins; nullptr if this one is no number. Inlined, it made the loop
  // over plain numbers up to 45 % slower.
  [[gnu::noinline]] const char* parse_unusual_number(const char* p, const char* stop, T& out,
                                                     bool& ended) const {
    Fields fields(p, stop, layout_.separator);
    std::string_view content;
    if (!fields.read(content) || !parse_field(content, out)) return nullptr;
    ended = fields.at_end();
    return fields.position();
  }

  bool parse_field(std::string_view content, T& out) const {
    double value;
    if (is_missing(content)) {
      out = std::numeric_limits<T>::quiet_NaN();
      return true;
    }
    if (!parse_any_number(content, value)) return false;
    out = static_cast<T>(value);
    return std::isfinite(out);
  }

  bool is_missing(std::string_view content) const {
    if (layout_.empty_text) content = strip(content);
    return std::find(layout_.missing.begin(), layout_.missing.end(), content) !=
           layout_.missing.end();
  }

  // Whether a field has text; other readers end a line at \r, and a field at \0.
  bool is_text_present(std::string_view content) const {
    const bool plain = content.find('\r') == content.npos && content.find('\0') == content.npos;
    return plain && (layout_.empty_text || (!content.empty() && !is_missing(content)));
  }

  // Reads a wrong line once more to find out what is wrong.
  Problem diagnose(const char* line, const char* stop) const {
    Problem problem{0, 0, 0, {}};
    bool found = false;
    Fields fields(line, stop, layout_.separator);
    while (!fields.at_end()) {
      std::string_view content;
      const char* from = fields.position();
      const bool whole = fields.read(content);
      if (!whole) content = {from, static_cast<std::size_t>(after_line(from, stop) - from)};
      const std::size_t column = problem.num_fields++;
      T ignored;
      const bool is_text = column < layout_.is_text.size() && layout_.is_text[column];
      if (!found && !(whole && (is_text ? is_text_present(content) : parse_field(content, ignored)))) {
        found = true;
        problem.column = column;
        problem.field = content.substr(0, 200);
      }
      if (!whole) {  // fields after an unclosed quote cannot be counted
        problem.num_fields = std::max(problem.num_fields, layout_.is_text.size());
        break;
      }
    }
    return problem;
  }

  const Layout& layout_;
  std::vector<Run> runs_;
  std::size_t num_numbers_ = 0;
  std::vector<Dictionary> dictionaries_;
};

}  // namespace csvkernel
