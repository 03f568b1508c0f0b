// Parses generated and damaged tables with the kernel and with a plain implementation of the same
// rules, and compares the results. It should be compiled with sanitizers, which notice any access
// outside of the given memory: all memory is allocated to the byte.
//
//   fuzz_csvkernel SECONDS [SEED]

#include <chrono>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "table.h"

namespace {

using csvkernel::Layout;
using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t limit) { return random() % limit; }

bool chance(Random& random, unsigned percent) { return below(random, 100) < percent; }

std::string pick(Random& random, std::initializer_list<const char*> choices) {
  return choices.begin()[below(random, choices.size())];
}

std::string digits(Random& random, std::size_t most) {
  std::string text;
  for (std::size_t n = below(random, most + 1); n > 0; --n) text += char('0' + below(random, 10));
  return text;
}

std::string number(Random& random) {
  switch (below(random, 8)) {
    case 0: return digits(random, 1) + "0";
    case 1: return digits(random, 25) + "." + digits(random, 25);
    case 2: return "-" + digits(random, 3) + "." + digits(random, 6);
    case 3: return digits(random, 2) + "." + digits(random, 3) + "e" + pick(random, {"-", "+", ""}) + digits(random, 4);
    case 4: return pick(random, {"inf", "-nan", "Infinity", "1e999", "-1e-999", "na", " na", "na ", " ", "", ".", "-", "+", "0x1", "1_0", "nan(1)"});
    case 5: return pick(random, {" ", "\t"}) + digits(random, 3) + pick(random, {" ", ""});
    case 6: return "\"" + digits(random, 3) + pick(random, {"\"", "", "\"\""});
    default: return std::string(1, char('0' + below(random, 10)));
  }
}

std::string word(Random& random) {
  std::string text = pick(random, {"a", "bb", "TCGA-1", "\"q\"", "\"a,b\"", "\"x\"\"y\"", "na", "", "é"});
  if (chance(random, 2)) text += std::string(below(random, 6000), 'x');  // longer than is looked at at once
  return chance(random, 10) ? text + text : text;
}

struct Reference {
  std::vector<double> numbers;
  std::vector<std::vector<std::string>> text;
  std::size_t num_rows = 0, num_lines = 0;  // num_lines: lines that are not blank
  bool fits = true;
  std::size_t bad_line = 0;
};

std::vector<std::string> split(const std::string& line, char separator, bool& well_formed) {
  std::vector<std::string> fields;
  std::size_t i = 0;
  for (;;) {
    std::string field;
    if (i < line.size() && line[i] == '"') {
      for (++i;; ++i) {
        if (i >= line.size()) {
          well_formed = false;
          return fields;
        }
        if (line[i] == '"') {
          if (i + 1 < line.size() && line[i + 1] == '"') {
            ++i;
          } else {
            break;
          }
        }
        field += line[i];
      }
      ++i;
      if (i + 1 == line.size() && line[i] == '\r') ++i;
      if (i < line.size() && line[i] != separator) {
        well_formed = false;
        return fields;
      }
    } else {
      for (; i < line.size() && line[i] != separator; ++i) field += line[i];
      if (i == line.size() && !field.empty() && field.back() == '\r') field.pop_back();
    }
    fields.push_back(field);
    if (i >= line.size()) return fields;
    ++i;
  }
}

std::string stripped(const std::string& field) {
  const std::string spaces = " \t\v\f";
  const std::size_t first = field.find_first_not_of(spaces);
  return first == std::string::npos ? "" : field.substr(first, field.find_last_not_of(spaces) - first + 1);
}

bool to_number(const std::string& field, double& value) {
  const std::string text = stripped(field);
  if (text.empty()) return false;
  if (text.find_first_of("xX(\r") != std::string::npos || text.find('\0') != std::string::npos) {
    return false;
  }
  char* end = nullptr;
  value = std::strtod(text.c_str(), &end);
  return end == text.c_str() + text.size() && !csvkernel::is_space(text.front());
}

template <class T>
Reference read_plainly(const std::string& text, const Layout& layout) {
  Reference read;
  std::size_t num_text = 0;
  for (const bool is_text : layout.is_text) num_text += is_text;
  read.text.resize(num_text);
  for (std::size_t start = 0; start < text.size();) {
    std::size_t end = text.find('\n', start);
    if (end == std::string::npos) end = text.size();
    const std::string line = text.substr(start, end - start);
    bool blank = true;
    const bool returns = !line.empty() && line.back() == '\r';
    for (const char c : line.substr(0, line.size() - returns)) blank = blank && (c == ' ' || c == '\t') && c != layout.separator;
    if (!blank) {
      ++read.num_lines;
      bool fits = read.fits;
      if (fits) {
        const auto fields = split(line, layout.separator, fits);
        fits = fits && fields.size() == layout.is_text.size();
        std::vector<double> numbers;
        std::vector<std::string> words;
        for (std::size_t c = 0; fits && c < fields.size(); ++c) {
          bool missing = false;
          for (const auto& each : layout.missing) {
            missing = missing || each == (layout.empty_text ? stripped(fields[c]) : fields[c]);
          }
          if (layout.is_text[c]) {
            const bool plain = fields[c].find_first_of(std::string("\r\0", 2)) == std::string::npos;
            fits = plain && (layout.empty_text || (!missing && !fields[c].empty()));
            words.push_back(fields[c]);
          } else {
            double value = std::numeric_limits<double>::quiet_NaN();
            if (!missing) {
              fits = to_number(fields[c], value) && std::isfinite(static_cast<T>(value));
            }
            numbers.push_back(value);
          }
        }
        if (fits) {
          ++read.num_rows;
          read.numbers.insert(read.numbers.end(), numbers.begin(), numbers.end());
          for (std::size_t c = 0; c < num_text; ++c) read.text[c].push_back(words[c]);
        } else {
          read.fits = false;
          read.bad_line = start;
        }
      }
    }
    start = end + 1;
  }
  return read;
}

[[noreturn]] void fail(const char* what, const std::string& text, std::uint64_t seed) {
  std::fprintf(stderr, "seed %llu: %s\n<<<%s>>>\n", static_cast<unsigned long long>(seed), what,
               text.c_str());
  std::exit(1);
}

template <class T>
bool same(T value, double expected) {
  const T wanted = static_cast<T>(expected);
  if (std::isnan(wanted)) return std::isnan(value);
  return std::memcmp(&value, &wanted, sizeof(T)) == 0;
}

template <class T, class Ends>
void check_with(const std::string& text, const Layout& layout, std::uint64_t seed) {
  const Reference expected = read_plainly<T>(text, layout);
  // An exact copy, so that any access beyond its ends is noticed.
  const std::unique_ptr<char[]> memory(new char[text.size() + (text.empty() ? 1 : 0)]);
  std::copy(text.begin(), text.end(), memory.get());
  const char *first = memory.get(), *stop = first + text.size();

  const std::size_t capacity = csvkernel::count_rows(first, stop, layout.separator);
  if (capacity != expected.num_lines) fail("the number of rows", text, seed);
  std::size_t num_text = expected.text.size(), num_numbers = layout.is_text.size() - num_text;
  std::unique_ptr<T[]> values(new T[capacity * num_numbers + 1]);
  std::vector<std::unique_ptr<std::int32_t[]>> codes;
  std::vector<std::int32_t*> columns;
  for (std::size_t c = 0; c < num_text; ++c) {
    codes.emplace_back(new std::int32_t[capacity + 1]);
    columns.push_back(codes.back().get());
  }
  csvkernel::Parser<T, Ends> parser(layout);
  std::optional<csvkernel::Problem> problem;
  const std::size_t rows = parser.parse(first, stop, values.get(), columns.data(), capacity, problem);
  if (problem.has_value() == expected.fits) fail("whether it fits", text, seed);
  if (rows != expected.num_rows) fail("the rows parsed", text, seed);
  if (problem && problem->line != expected.bad_line) fail("the line that does not fit", text, seed);
  for (std::size_t i = 0; i < rows * num_numbers; ++i) {
    if (!same(values[i], expected.numbers[i])) fail("a value", text, seed);
  }
  for (std::size_t c = 0; c < num_text; ++c) {
    for (std::size_t row = 0; row < rows; ++row) {
      const auto& names = parser.dictionaries()[c].names();
      if (names[static_cast<std::size_t>(columns[c][row])] != expected.text[c][row]) {
        fail("a text", text, seed);
      }
    }
  }
}

template <class T>
void check(const std::string& text, const Layout& layout, std::uint64_t seed) {
  check_with<T, csvkernel::FieldEnds>(text, layout, seed);
#if defined(CSVKERNEL_HAS_EIGHTS)
  if (csvkernel::has_avx512()) check_with<T, csvkernel::EightEnds>(text, layout, seed);
#endif
}

void run(std::uint64_t seed) {
  Random random(seed);
  Layout layout;
  layout.separator = pick(random, {",", "\t", ";"})[0];
  const bool wide = chance(random, 50);
  for (std::size_t n = 1 + below(random, wide ? 150 : 6); n > 0; --n) {
    layout.is_text.push_back(chance(random, wide ? 3 : 30));
  }
  if (chance(random, 50)) layout.missing = {"na", "", "-"};
  layout.empty_text = chance(random, 30);
  const unsigned clean = chance(random, 50) ? 100 : 97;
  std::string text;
  // Enough rows for several groups of those that are parsed at once, and single digits for long runs.
  const unsigned digit = chance(random, 30) ? 95 : 0;
  for (std::size_t row = below(random, chance(random, 20) ? 60 : 12); row > 0; --row) {
    for (std::size_t c = 0; c < layout.is_text.size(); ++c) {
      if (c > 0) text += layout.separator;
      const bool odd = !chance(random, clean);
      text += layout.is_text[c] != odd ? (odd ? word(random) : std::string(1, char('a' + below(random, 26))))
              : odd                    ? number(random)
              : chance(random, digit)  ? std::string(1, char('0' + below(random, 10)))
                                       : digits(random, 2) + "1." + digits(random, 6);
    }
    text += pick(random, {"\n", "\n", "\n", "\r\n", "\n\n", "\n \n", ""});
  }
  for (std::size_t n = chance(random, 30) ? below(random, 4) : 0; n > 0 && !text.empty(); --n) {
    const std::size_t place = below(random, text.size());
    switch (below(random, 3)) {
      case 0: text[place] = char(below(random, 256)); break;
      case 1: text.erase(place, 1 + below(random, 5)); break;
      default: text.insert(place, 1, pick(random, {",", "\n", "\"", ".", "-", "\r", "5"})[0]);
    }
  }
  check<float>(text, layout, seed);
  check<double>(text, layout, seed);
}

}  // namespace

int main(int argc, char** argv) {
  std::setlocale(LC_ALL, "C");
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  const std::uint64_t first = seed;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  do {
    for (int i = 0; i < 100; ++i) run(seed++);
  } while (elapsed() < seconds);
  std::printf("%llu tables from seed %llu on in %.0f s: nothing found\n",
              static_cast<unsigned long long>(seed - first), static_cast<unsigned long long>(first),
              elapsed());
}
