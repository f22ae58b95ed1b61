#include "tools/npy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace cubist {
namespace {

static_assert(std::endian::native == std::endian::little, ".npy files here are little-endian");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::int64_t kPrefixBytes = 8;  // magic and version

struct Code {
  std::string_view descr;
  DType dtype;
};
// The first code of a dtype is the one that is written.
constexpr Code kCodes[] = {{"<f4", DType::kF32},  {"<f2", DType::kF16},  {"<i4", DType::kI32},
                           {"<i8", DType::kI64},  {"<V2", DType::kBF16}, {"|V2", DType::kBF16},
                           {"<u2", DType::kBF16}, {"|b1", DType::kBool}, {"|u1", DType::kBool}};

// For messages: control characters and the tail of long texts give way.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (char c : text.substr(0, 40)) quoted += c >= ' ' && c <= '~' ? c : '?';
  return quoted + (text.size() > 40 ? "..'" : "'");
}

// The header's text is a Python dictionary of three entries, in any order:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class DictParser {
 public:
  explicit DictParser(std::string_view text) : text_(text) {}

  Status Parse(NpyHeader* header) {
    bool descr = false, order = false, shape = false;
    CUBIST_RETURN_IF_ERROR(Expect('{'));
    while (!Take('}')) {
      std::string_view key;
      CUBIST_RETURN_IF_ERROR(ParseString("a key", &key));
      CUBIST_RETURN_IF_ERROR(Expect(':'));
      bool* seen = key == "descr"           ? &descr
                   : key == "fortran_order" ? &order
                   : key == "shape"         ? &shape
                                            : nullptr;
      if (seen == nullptr) {
        return InvalidArgument(fmt::format(
            "header has the unknown key {}; known are 'descr', 'fortran_order', 'shape'", Quoted(key)));
      }
      if (*seen) return InvalidArgument(fmt::format("header has the key {} twice", Quoted(key)));
      *seen = true;
      if (seen == &descr) CUBIST_RETURN_IF_ERROR(ParseDType(&header->dtype));
      if (seen == &order) CUBIST_RETURN_IF_ERROR(ParseBool(&header->fortran_order));
      if (seen == &shape) CUBIST_RETURN_IF_ERROR(ParseShape(&header->shape));
      if (!Take(',') && Peek() != '}') return Unexpected("',' or '}'");
    }
    if (Peek() != '\0') return Unexpected("nothing after '}'");
    const char* missing = !descr ? "descr" : !order ? "fortran_order" : !shape ? "shape" : nullptr;
    if (missing != nullptr) return InvalidArgument(fmt::format("header lacks the key '{}'", missing));
    return {};
  }

 private:
  // The next character that is not white space, or 0 at the end.
  char Peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Take(char c) {
    if (Peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }
  Status Unexpected(std::string_view wanted) {
    const bool end = Peek() == '\0' && at_ >= text_.size();
    return InvalidArgument(fmt::format("header has {} at character {}, expected {}",
                                       end ? "its end" : Quoted(text_.substr(at_, 1)), at_, wanted));
  }
  Status Expect(char c) { return Take(c) ? Status() : Unexpected(fmt::format("'{}'", c)); }

  Status ParseString(std::string_view what, std::string_view* value) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return Unexpected(fmt::format("{} in quotes", what));
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return InvalidArgument(fmt::format("header does not end {}", what));
    *value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return {};
  }

  Status ParseDType(DType* dtype) {
    std::string_view descr;
    CUBIST_RETURN_IF_ERROR(ParseString("a dtype", &descr));
    for (const Code& code : kCodes) {
      if (code.descr == descr) {
        *dtype = code.dtype;
        return {};
      }
    }
    return InvalidArgument(
        fmt::format("dtype {} is not supported; supported are '<f4', '<f2', '<i4', '<i8', '|b1' or '|u1' for "
                    "bool, and '<V2', '|V2' or '<u2' for bf16",
                    Quoted(descr)));
  }

  Status ParseBool(bool* value) {
    Peek();
    for (const auto& [word, meaning] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        *value = meaning;
        return {};
      }
    }
    return Unexpected("True or False");
  }

  Status ParseShape(Shape* shape) {
    CUBIST_RETURN_IF_ERROR(Expect('('));
    while (!Take(')')) {
      Peek();
      std::int64_t size = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), size);
      if (error == std::errc::result_out_of_range) {
        return InvalidArgument(fmt::format("shape has the size {}; the limit is 2^63 - 1",
                                           Quoted({begin, static_cast<std::size_t>(end - begin)})));
      }
      if (error != std::errc()) return Unexpected("a size");
      if (size < 0) return InvalidArgument(fmt::format("shape has the size {}; sizes are 0 or more", size));
      at_ += static_cast<std::size_t>(end - begin);
      shape->push_back(size);
      if (shape->size() > Tensor::kMaxRank) {
        return InvalidArgument(fmt::format("shape has more than {} sizes", Tensor::kMaxRank));
      }
      if (!Take(',') && Peek() != ')') return Unexpected("',' or ')'");
    }
    if (shape->empty()) {
      return InvalidArgument(fmt::format("shape () has no sizes; 1 to {} are supported", Tensor::kMaxRank));
    }
    return {};
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

std::uint64_t LittleEndian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

// Copies elements of Fortran order to C order. The sizes fit the file, so no product overflows.
void FortranToC(const std::byte* from, std::int64_t element_bytes, const Shape& shape, std::byte* to) {
  const std::size_t rank = shape.size();
  std::vector<std::int64_t> index(rank), stride(rank);
  std::int64_t count = 1;
  for (std::size_t d = 0; d < rank; ++d) {
    stride[d] = count;
    count *= shape[d];
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t source = 0;
    for (std::size_t d = 0; d < rank; ++d) source += index[d] * stride[d];
    std::memcpy(to + i * element_bytes, from + source * element_bytes,
                static_cast<std::size_t>(element_bytes));
    for (std::size_t d = rank; d-- > 0 && ++index[d] == shape[d];) index[d] = 0;
  }
}

Status ReadOpened(std::ifstream& file, std::int64_t file_bytes, OwnedTensor* tensor) {
  std::vector<std::byte> head(static_cast<std::size_t>(std::min(file_bytes, kMaxNpyHeaderBytes)));
  file.read(reinterpret_cast<char*>(head.data()), static_cast<std::streamsize>(head.size()));
  if (!file) return InvalidArgument("cannot be read");

  NpyHeader header;
  CUBIST_RETURN_IF_ERROR(ParseNpyHeader(head, file_bytes, &header));

  OwnedTensor read(header.dtype, header.shape);
  file.seekg(header.data_offset);
  file.read(reinterpret_cast<char*>(read.data()), header.data_bytes);
  if (!file) return InvalidArgument(fmt::format("its {} bytes of data cannot be read", header.data_bytes));
  if (header.fortran_order) {
    OwnedTensor turned(header.dtype, header.shape);
    FortranToC(read.data(), SizeOf(header.dtype), header.shape, turned.data());
    read = std::move(turned);
  }
  *tensor = std::move(read);
  return {};
}

std::string HeaderText(const ConstTensor& tensor) {
  const auto code = std::find_if(std::begin(kCodes), std::end(kCodes),
                                 [&](const Code& c) { return c.dtype == tensor.dtype; });
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': (", code->descr);
  for (int d = 0; d < tensor.rank; ++d) text += fmt::format("{},", tensor.size(d));
  text += "), }";
  // The data begins at a multiple of 64 bytes; the text ends in a newline.
  const std::size_t prefix = kPrefixBytes + 2;
  text.resize(
      static_cast<std::size_t>(RoundUp(static_cast<std::int64_t>(prefix + text.size() + 1), 64)) - prefix,
      ' ');
  text.back() = '\n';
  return text;
}

// Writes the elements in C order, a row of the last dimension at a time.
void WriteElements(std::ofstream& file, const ConstTensor& tensor) {
  const std::int64_t element_bytes = SizeOf(tensor.dtype), cols = tensor.size(tensor.rank - 1);
  if (tensor.count() == 0) return;
  std::vector<char> row(static_cast<std::size_t>(cols * element_bytes));
  std::array<std::int64_t, Tensor::kMaxRank> index{};
  for (std::int64_t r = 0; r < tensor.count() / cols; ++r) {
    std::int64_t offset = 0;
    for (int d = 0; d < tensor.rank - 1; ++d) offset += index[static_cast<std::size_t>(d)] * tensor.stride(d);
    for (std::int64_t j = 0; j < cols; ++j) {
      const auto* from = static_cast<const char*>(tensor.data) +
                         (offset + j * tensor.stride(tensor.rank - 1)) * element_bytes;
      std::memcpy(row.data() + j * element_bytes, from, static_cast<std::size_t>(element_bytes));
    }
    file.write(row.data(), static_cast<std::streamsize>(row.size()));
    for (int d = tensor.rank - 1; d-- > 0 && ++index[static_cast<std::size_t>(d)] == tensor.size(d);) {
      index[static_cast<std::size_t>(d)] = 0;
    }
  }
}

}  // namespace

Status ParseNpyHeader(std::span<const std::byte> head, std::int64_t file_bytes, NpyHeader* header) {
  if (head.size() < kPrefixBytes || std::memcmp(head.data(), kMagic.data(), kMagic.size()) != 0) {
    return InvalidArgument(R"(is not a .npy file: it does not begin with "\x93NUMPY" and a version)");
  }
  const int major = std::to_integer<int>(head[6]), minor = std::to_integer<int>(head[7]);
  if (major < 1 || major > 3 || minor != 0) {
    return InvalidArgument(
        fmt::format("has .npy format version {}.{}; supported are 1.0, 2.0 and 3.0", major, minor));
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t text_at = kPrefixBytes + length_bytes;
  if (head.size() < text_at) return InvalidArgument("ends inside its header's length");
  const std::uint64_t text_bytes = LittleEndian(head.subspan(kPrefixBytes, length_bytes));
  if (text_bytes > head.size() - text_at) {
    return InvalidArgument(fmt::format("has a header of {} bytes; the limit here is {}{}", text_bytes,
                                       head.size() - text_at,
                                       file_bytes <= kMaxNpyHeaderBytes ? ", where the file ends" : ""));
  }

  NpyHeader parsed;
  const auto* text = reinterpret_cast<const char*>(head.data() + text_at);
  CUBIST_RETURN_IF_ERROR(DictParser({text, static_cast<std::size_t>(text_bytes)}).Parse(&parsed));
  parsed.data_offset = static_cast<std::int64_t>(text_at + text_bytes);
  parsed.data_bytes = BytesOf(parsed.dtype, parsed.shape);
  if (parsed.data_bytes < 0) {
    return InvalidArgument(
        fmt::format("has shape {}, which takes more than 2^63 - 1 bytes", ToString(parsed.shape)));
  }
  if (const std::int64_t there = file_bytes - parsed.data_offset; there != parsed.data_bytes) {
    return InvalidArgument(fmt::format("has shape {} of {}, which takes {} bytes, but {} bytes of data",
                                       ToString(parsed.shape), NameOf(parsed.dtype), parsed.data_bytes,
                                       there));
  }
  *header = std::move(parsed);
  return {};
}

Status ReadNpy(const std::string& path, OwnedTensor* tensor) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return InvalidArgument(fmt::format("{}: no such file", path));
  if (!std::filesystem::is_regular_file(path, error)) {
    return InvalidArgument(fmt::format("{}: is not a regular file", path));
  }
  const auto file_bytes = static_cast<std::int64_t>(std::filesystem::file_size(path, error));
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return InvalidArgument(fmt::format("{}: cannot be opened", path));
  const Status status = ReadOpened(file, file_bytes, tensor);
  return status.ok() ? status : Status(status.code(), fmt::format("{}: {}", path, status.message()));
}

Status WriteNpy(const std::string& path, const ConstTensor& tensor) {
  const std::string text = HeaderText(tensor);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const char version_and_length[] = {1, 0, static_cast<char>(text.size() & 0xff),
                                     static_cast<char>(text.size() >> 8)};
  file.write(kMagic.data(), kMagic.size());
  file.write(version_and_length, sizeof(version_and_length));
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  WriteElements(file, tensor);
  file.close();
  if (!file) return InvalidArgument(fmt::format("{}: cannot be written", path));
  return {};
}

}  // namespace cubist
