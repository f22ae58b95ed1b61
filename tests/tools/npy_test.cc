#include "tools/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

namespace cubist {
namespace {

class NpyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = ::testing::TempDir() + "cubist_npy_" + test->name() + ".npy";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void WriteFile(const std::string& bytes) { std::ofstream(path_, std::ios::binary) << bytes; }
  std::string ReadFile() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The message without the path.
  std::string ErrorOf(const std::string& bytes) {
    WriteFile(bytes);
    OwnedTensor tensor(DType::kI64, {1});
    const Status status = ReadNpy(path_, &tensor);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(tensor.shape(), (Shape{1})) << "an error leaves the tensor alone";
    const std::string prefix = path_ + ": ";
    EXPECT_EQ(status.message().substr(0, prefix.size()), prefix);
    return status.message().substr(std::min(prefix.size(), status.message().size()));
  }

  std::string path_;
};

// A file of format 1.0 whose header is `text`, unpadded, with `data_bytes` zeros after it.
std::string FileOf(const std::string& text, std::size_t data_bytes) {
  std::string file = "\x93NUMPY";
  file += '\x01';
  file += '\x00';
  file += static_cast<char>(text.size() & 0xff);
  file += static_cast<char>(text.size() >> 8);
  return file + text + std::string(data_bytes, '\0');
}

TEST_F(NpyTest, RoundTripKeepsEveryBitOfEveryDType) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64, DType::kBool}) {
    SCOPED_TRACE(NameOf(dtype));
    OwnedTensor written(dtype, {3, 5, 7});
    for (std::int64_t i = 0; i < written.bytes(); ++i)
      written.data()[i] = static_cast<std::byte>(i * 37 + 11);
    ASSERT_TRUE(WriteNpy(path_, written.view()).ok());
    OwnedTensor read;
    const Status status = ReadNpy(path_, &read);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(read.dtype(), dtype);
    EXPECT_EQ(read.shape(), written.shape());
    EXPECT_EQ(std::memcmp(read.data(), written.data(), static_cast<std::size_t>(written.bytes())), 0);
  }
}

TEST_F(NpyTest, ReadsBytesAsBooleans) {
  WriteFile(FileOf("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", 3));
  OwnedTensor read;
  const Status status = ReadNpy(path_, &read);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(read.dtype(), DType::kBool);
  EXPECT_EQ(read.shape(), (Shape{3}));
}

TEST_F(NpyTest, WritesTheBytesThatNumPyWrites) {
  const float values[] = {1, 2, 3};
  ASSERT_TRUE(WriteNpy(path_, ConstTensor(values, {3})).ok());
  const std::string file = ReadFile();
  ASSERT_EQ(file.size(), 128u + 12u) << "numpy.save pads this header to 128 bytes";
  EXPECT_EQ(file.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_EQ(file.substr(10, 55), "{'descr': '<f4', 'fortran_order': False, 'shape': (3,),");
  EXPECT_EQ(file[127], '\n');
  EXPECT_EQ(std::memcmp(file.data() + 128, values, 12), 0);
}

TEST_F(NpyTest, EmptyTensorsRoundTrip) {
  for (const Shape& shape : {Shape{0}, Shape{3, 0}, Shape{0, 4}}) {
    OwnedTensor written(DType::kF32, shape);
    ASSERT_TRUE(WriteNpy(path_, written.view()).ok());
    OwnedTensor read;
    ASSERT_TRUE(ReadNpy(path_, &read).ok());
    EXPECT_EQ(read.shape(), shape);
  }
}

TEST_F(NpyTest, WritesStridedTensorsInCOrder) {
  std::vector<std::int32_t> values(24);
  std::iota(values.begin(), values.end(), 0);
  ASSERT_TRUE(WriteNpy(path_, ConstTensor(values.data(), {3, 2, 2}, {1, 12, 5})).ok());
  OwnedTensor read;
  ASSERT_TRUE(ReadNpy(path_, &read).ok());
  const std::vector<std::int32_t> expected = {0, 5, 12, 17, 1, 6, 13, 18, 2, 7, 14, 19};
  EXPECT_EQ(std::memcmp(read.data(), expected.data(), sizeof(std::int32_t) * expected.size()), 0);
}

TEST_F(NpyTest, ReadsFortranOrder) {
  std::string file = FileOf("{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3, 2)}\n", 48);
  for (std::int32_t i = 0; i < 12; ++i) std::memcpy(file.data() + file.size() - 48 + 4 * i, &i, 4);
  WriteFile(file);
  OwnedTensor read;
  const Status status = ReadNpy(path_, &read);
  ASSERT_TRUE(status.ok()) << status.message();
  // Element (i, j, l) stands at i + 2 j + 6 l in the file.
  const std::vector<std::int32_t> expected = {0, 6, 2, 8, 4, 10, 1, 7, 3, 9, 5, 11};
  EXPECT_EQ(std::memcmp(read.data(), expected.data(), 48), 0);
}

TEST_F(NpyTest, ReadsEveryWayToSayBF16) {
  for (const char* descr : {"<V2", "|V2", "<u2"}) {
    WriteFile(FileOf("{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (2,)}\n", 4));
    OwnedTensor read;
    ASSERT_TRUE(ReadNpy(path_, &read).ok()) << descr;
    EXPECT_EQ(read.dtype(), DType::kBF16);
  }
}

TEST_F(NpyTest, ReadsFormatTwoAnyKeyOrderAndDoubleQuotes) {
  const std::string text = "{\"shape\":(1,2 ,),'fortran_order':False , \"descr\" : '<f2' , }  \n";
  std::string file("\x93NUMPY\x02\x00", 8);
  file += static_cast<char>(text.size());
  file += std::string(3, '\0') + text + std::string(4, '\0');
  WriteFile(file);
  OwnedTensor read;
  const Status status = ReadNpy(path_, &read);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(read.dtype(), DType::kF16);
  EXPECT_EQ(read.shape(), (Shape{1, 2}));
}

TEST_F(NpyTest, MalformedFilesSayWhatIsWrong) {
  const auto dict = [](const std::string& descr, const std::string& order, const std::string& shape) {
    return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  };
  const std::string good = dict("'<f4'", "False", "(2, 3)");
  std::string version9 = FileOf(good, 24);
  version9[6] = 9;
  struct {
    const char* what;
    std::string file, message;
  } const cases[] = {
      {"empty", "", R"(is not a .npy file: it does not begin with "\x93NUMPY" and a version)"},
      {"magic", "PK\x03\x04 zip file",
       R"(is not a .npy file: it does not begin with "\x93NUMPY" and a version)"},
      {"version", version9, "has .npy format version 9.0; supported are 1.0, 2.0 and 3.0"},
      {"cut length", std::string("\x93NUMPY\x01\x00\x10", 9), "ends inside its header's length"},
      {"cut header", FileOf(good, 0).substr(0, 40),
       "has a header of 60 bytes; the limit here is 30, where the file ends"},
      {"no dictionary", FileOf("hello", 0), "header has 'h' at character 0, expected '{'"},
      {"cut dictionary", FileOf("{'descr': '<f4'", 0),
       "header has its end at character 15, expected ',' or '}'"},
      {"open quote", FileOf("{'descr: 3}", 0), "header does not end a key"},
      {"bare key", FileOf("{descr: 3}", 0), "header has 'd' at character 1, expected a key in quotes"},
      {"unknown key", FileOf("{'descrr': '<f4'}", 0),
       "header has the unknown key 'descrr'; known are 'descr', 'fortran_order', 'shape'"},
      {"repeated key", FileOf("{'descr': '<f4', 'descr': '<f4'}", 0), "header has the key 'descr' twice"},
      {"missing key", FileOf("{'descr': '<f4', 'shape': (1,)}", 4), "header lacks the key 'fortran_order'"},
      {"text after", FileOf("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", 4),
       "header has 'x' at character 56, expected nothing after '}'"},
      {"double", FileOf(dict("'<f8'", "False", "(1,)"), 8),
       "dtype '<f8' is not supported; supported are '<f4', '<f2', '<i4', '<i8', '|b1' or '|u1' for bool, and "
       "'<V2', '|V2' or '<u2' "
       "for bf16"},
      {"big endian", FileOf(dict("'>f4'", "False", "(1,)"), 4),
       "dtype '>f4' is not supported; supported are '<f4', '<f2', '<i4', '<i8', '|b1' or '|u1' for bool, and "
       "'<V2', '|V2' or '<u2' "
       "for bf16"},
      {"structure", FileOf(dict("[('a', '<f4')]", "False", "(1,)"), 4),
       "header has '[' at character 10, expected a dtype in quotes"},
      {"order", FileOf(dict("'<f4'", "0", "(1,)"), 4),
       "header has '0' at character 34, expected True or False"},
      {"no shape", FileOf(dict("'<f4'", "False", "()"), 4), "shape () has no sizes; 1 to 6 are supported"},
      {"rank", FileOf(dict("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1)"), 4), "shape has more than 6 sizes"},
      {"negative", FileOf(dict("'<f4'", "False", "(2, -3)"), 24),
       "shape has the size -3; sizes are 0 or more"},
      {"not a number", FileOf(dict("'<f4'", "False", "(x,)"), 24),
       "header has 'x' at character 51, expected a size"},
      {"a real", FileOf(dict("'<f4'", "False", "(2.5,)"), 24),
       "header has '.' at character 52, expected ',' or ')'"},
      {"beyond int64", FileOf(dict("'<f4'", "False", "(9223372036854775808,)"), 24),
       "shape has the size '9223372036854775808'; the limit is 2^63 - 1"},
      {"product", FileOf(dict("'<f4'", "False", "(4294967296, 4294967296)"), 24),
       "has shape (4294967296, 4294967296), which takes more than 2^63 - 1 bytes"},
      {"product beside 0", FileOf(dict("'<f4'", "False", "(4294967296, 4294967296, 0)"), 0),
       "has shape (4294967296, 4294967296, 0), which takes more than 2^63 - 1 bytes"},
      {"short", FileOf(good, 23), "has shape (2, 3) of fp32, which takes 24 bytes, but 23 bytes of data"},
      {"long", FileOf(good, 25), "has shape (2, 3) of fp32, which takes 24 bytes, but 25 bytes of data"},
      {"huge", FileOf(dict("'<f4'", "False", "(1000000000000,)"), 4),
       "has shape (1000000000000) of fp32, which takes 4000000000000 bytes, but 4 bytes of data"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    EXPECT_EQ(ErrorOf(c.file), c.message);
  }
}

// Every prefix of a good file, and every change of one byte of its header, is read or refused, never a crash.
TEST_F(NpyTest, DamagedHeadersNeverCrash) {
  const std::string good = FileOf("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", 24);
  for (std::size_t size = 0; size < good.size(); ++size) {
    NpyHeader header;
    EXPECT_FALSE(
        ParseNpyHeader(std::as_bytes(std::span(good.data(), size)), static_cast<std::int64_t>(size), &header)
            .ok());
  }
  std::size_t accepted = 0;
  for (std::size_t at = 0; at < good.size() - 24; ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string damaged = good;
      damaged[at] = static_cast<char>(value);
      NpyHeader header;
      const Status status = ParseNpyHeader(std::as_bytes(std::span(damaged)),
                                           static_cast<std::int64_t>(damaged.size()), &header);
      if (!status.ok()) continue;
      ++accepted;
      EXPECT_EQ(header.data_offset + header.data_bytes, static_cast<std::int64_t>(damaged.size()));
    }
  }
  EXPECT_GE(accepted, good.size() - 24) << "each byte, unchanged, is fine";
}

TEST_F(NpyTest, FilesThatCannotBeReadOrWrittenAreNamed) {
  OwnedTensor tensor(DType::kF32, {1});
  EXPECT_EQ(ReadNpy("/nonexistent/x.npy", &tensor).message(), "/nonexistent/x.npy: no such file");
  EXPECT_EQ(ReadNpy("/dev", &tensor).message(), "/dev: is not a regular file");
  EXPECT_EQ(WriteNpy("/nonexistent/x.npy", tensor.view()).message(), "/nonexistent/x.npy: cannot be written");
}

TEST(OwnedTensorTest, MarksShowWhatWasNotWritten) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64, DType::kBool}) {
    OwnedTensor tensor(dtype, {100, 1000});
    tensor.Mark();
    EXPECT_EQ(tensor.CountMarked(), 100000);
    std::memset(tensor.data() + SizeOf(dtype) * 5, 0, static_cast<std::size_t>(SizeOf(dtype) * 99990));
    EXPECT_EQ(tensor.CountMarked(), 10);
    EXPECT_TRUE(tensor.GuardsIntact());
    tensor.data()[tensor.bytes()] = std::byte{0};
    EXPECT_FALSE(tensor.GuardsIntact());
    tensor.Mark();
    tensor.data()[-1] = std::byte{0};
    EXPECT_FALSE(tensor.GuardsIntact());
  }
}

TEST(OwnedTensorTest, DigestDependsOnEveryByte) {
  OwnedTensor tensor(DType::kBF16, {1 << 20, 1});
  tensor.Mark();
  const std::uint64_t digest = tensor.Digest();
  EXPECT_EQ(tensor.Digest(), digest);
  for (std::int64_t at : {std::int64_t{0}, std::int64_t{1 << 20}, tensor.bytes() - 1}) {
    tensor.data()[at] ^= std::byte{1};
    EXPECT_NE(tensor.Digest(), digest);
    tensor.data()[at] ^= std::byte{1};
  }
  EXPECT_EQ(tensor.Digest(), digest);
}

}  // namespace
}  // namespace cubist
