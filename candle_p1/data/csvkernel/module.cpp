// The Python module candle_p1.data._csvkernel; _csvkernel.pyi describes it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "table.h"

namespace nb = nanobind;
using namespace nb::literals;
using csvkernel::Layout;

using Text = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static const char* range(const Text& text, std::size_t start, std::size_t stop) {
  if (start > stop || stop > text.size()) throw std::out_of_range("the range is not in the text");
  return reinterpret_cast<const char*>(text.data());
}

static std::size_t count_rows(Text text, std::size_t start, std::size_t stop,
                              const Layout& layout) {
  const char* data = range(text, start, stop);
  nb::gil_scoped_release released;
  return csvkernel::count_rows(data + start, data + stop, layout.separator);
}

// Whether CANDLE_P1_INSTRUCTIONS allows AVX-512, as it does by default, and the processor has it.
static bool use_avx512() {
  const char* newest = std::getenv("CANDLE_P1_INSTRUCTIONS");
  return (newest == nullptr || std::string_view(newest) == "avx512") && csvkernel::has_avx512();
}

template <class T, class Ends>
static nb::tuple parse_with(Text text, std::size_t start, std::size_t stop, const Layout& layout,
                            Matrix<T> values, Matrix<std::int32_t> codes, std::size_t first_row) {
  const char* data = range(text, start, stop);
  csvkernel::Parser<T, Ends> parser(layout);
  const std::size_t num_text = parser.dictionaries().size(), rows = values.shape(0);
  if (values.shape(1) + num_text != layout.is_text.size() || codes.shape(0) != num_text) {
    throw std::invalid_argument("the arrays do not have the columns of the layout");
  }
  if (num_text > 0 && codes.shape(1) != rows) {
    throw std::invalid_argument("the arrays do not have the same rows");
  }
  const std::size_t capacity = first_row < rows ? rows - first_row : 0;
  std::vector<std::int32_t*> columns;
  for (std::size_t c = 0; c < num_text; ++c) {
    columns.push_back(codes.data() + c * rows + (rows - capacity));
  }
  std::optional<csvkernel::Problem> problem;
  std::size_t num_rows = 0;
  {
    nb::gil_scoped_release released;
    T* first = values.data() + (rows - capacity) * values.shape(1);
    num_rows = parser.parse(data + start, data + stop, first, columns.data(), capacity, problem);
  }
  nb::list names;
  for (const auto& dictionary : parser.dictionaries()) {
    nb::list column;
    for (const auto& name : dictionary.names()) column.append(nb::bytes(name.data(), name.size()));
    names.append(column);
  }
  nb::object found = nb::none();
  if (problem) {
    found = nb::make_tuple(start + problem->line, problem->num_fields, problem->column,
                           nb::bytes(problem->field.data(), problem->field.size()));
  }
  return nb::make_tuple(num_rows, names, found);
}

template <class T>
static nb::tuple parse(Text text, std::size_t start, std::size_t stop, const Layout& layout,
                       Matrix<T> values, Matrix<std::int32_t> codes, std::size_t first_row) {
#if defined(CSVKERNEL_HAS_EIGHTS)
  static const bool avx512 = use_avx512();
  if (avx512) {
    return parse_with<T, csvkernel::EightEnds>(text, start, stop, layout, values, codes, first_row);
  }
#endif
  return parse_with<T, csvkernel::FieldEnds>(text, start, stop, layout, values, codes, first_row);
}

NB_MODULE(_csvkernel, m) {
  // A run ends without a last search for garbage, which would find what nanobind calls leaked.
  nb::set_leak_warnings(false);
  nb::class_<Layout>(m, "Layout")
      .def(
          "__init__",
          [](Layout* self, std::vector<bool> is_text, const std::string& separator,
             std::vector<std::string> missing, bool empty_text) {
            if (separator.size() != 1 || separator == "\n" || separator == "\"") {
              throw std::invalid_argument("the separator is one byte, and not \\n or \"");
            }
            new (self) Layout{separator[0], std::move(is_text), std::move(missing), empty_text};
          },
          "is_text"_a, "separator"_a = ",", "missing"_a = std::vector<std::string>(),
          "empty_text"_a = false);
  m.def("uses_avx512", &use_avx512);
  m.def("count_rows", &count_rows, "text"_a, "start"_a, "stop"_a, "layout"_a);
  // Without conversion, because values written to a converted copy would be lost.
  m.def("parse", &parse<float>, "text"_a, "start"_a, "stop"_a, "layout"_a, "values"_a.noconvert(),
        "codes"_a.noconvert(), "first_row"_a);
  m.def("parse", &parse<double>, "text"_a, "start"_a, "stop"_a, "layout"_a, "values"_a.noconvert(),
        "codes"_a.noconvert(), "first_row"_a);
}
