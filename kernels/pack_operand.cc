#include "kernels/pack_operand.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>

#include "kernels/element_type.h"
#include "kernels/pack.h"
#include "kernels/packed_input.h"
#include "kernels/validate.h"

namespace cubist {
namespace {

Role RoleOf(Side side) { return side == Side::kA ? Role::kA : Role::kB; }

// What stands before the matrices: enough to tell any other operand or layout from this one.
struct Header {
  std::array<char, 8> magic{'c', 'u', 'b', 'i', 's', 't', 'p', '1'};
  std::int64_t side = 0, dtype = 0, matrices = 0, rows = 0, cols = 0;
  // Layout: bytes of a matrix, of an element as it is multiplied, columns of a panel, what its rows are padded to, and whether
  // elements stand there as they were given.
  std::int64_t stride = 0, element_bytes = 0, panel = 0, row_multiple = 0, narrow = 0;

  friend bool operator==(const Header&, const Header&) = default;
};
static_assert(sizeof(Header) <= kPackedHeaderBytes && std::has_unique_object_representations_v<Header>);

// Data is always laid out for the host that computes on it; the chip's own layout must have room too.
std::int64_t MatrixBytes(const ChipSpec& chip, Side side, DType dtype, std::int64_t rows, std::int64_t cols) {
  const auto bytes_on = [&](const ChipSpec& c) {
    const std::int64_t bytes = c.PackedBytes(RoleOf(side), dtype, rows, cols);
    return c.KeepsNarrow(RoleOf(side), dtype) ? bytes / c.OperandBytes(dtype) * SizeOf(dtype) : bytes;
  };
  return RoundUp(std::max(bytes_on(chip), bytes_on(HostChip())), kPackedAlignment);
}

Header HeaderOf(const ChipSpec& chip, const PackedOperand& packed) {
  const ChipSpec& host = HostChip();
  Header header;
  header.side = static_cast<std::int64_t>(packed.side),
  header.dtype = static_cast<std::int64_t>(packed.dtype);
  header.matrices = packed.matrices, header.rows = packed.rows, header.cols = packed.cols;
  header.stride = MatrixBytes(chip, packed.side, packed.dtype, packed.rows, packed.cols);
  header.element_bytes = host.OperandBytes(packed.dtype);
  header.panel = host.PackedStep(RoleOf(packed.side), packed.dtype);
  header.row_multiple = host.packing.row_multiple;
  header.narrow = host.KeepsNarrow(RoleOf(packed.side), packed.dtype) ? 1 : 0;
  return header;
}

// The matrices behind the header, as a tensor of floats, one row each.
ConstTensor MatricesOf(const ChipSpec& chip, const PackedOperand& packed) {
  const std::int64_t stride = MatrixBytes(chip, packed.side, packed.dtype, packed.rows, packed.cols);
  const auto* data = static_cast<const std::byte*>(packed.data);
  return {data == nullptr ? nullptr : data + kPackedHeaderBytes, DType::kF32, {packed.matrices, stride / 4}};
}

PackedGm ViewOf(const GmTensor* tensor, const PackedOperand& packed) {
  PackedGm view;
  view.tensor = tensor;
  view.role = RoleOf(packed.side), view.dtype = packed.dtype;
  view.rows = packed.rows, view.cols = packed.cols;
  view.row_part = {0, packed.rows}, view.col_part = {0, packed.cols};
  view.narrow = HostChip().KeepsNarrow(view.role, packed.dtype);
  return view;
}

Status Error(const char* kernel, const char* name, const std::string& what) {
  return InvalidArgument(std::string(kernel) + ": " + name + " " + what);
}

bool IsPackedAligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kPackedAlignment == 0;
}

// Room for what is packed, where it may be read and written.
Status CheckMemory(const char* kernel, const char* name, const void* data, std::int64_t bytes,
                   std::int64_t needed, bool needs_data) {
  if (bytes < needed) {
    return Error(
        kernel, name,
        "has " + std::to_string(bytes) + " bytes, needs " + std::to_string(needed) + " (PackedOperandBytes)");
  }
  if (!needs_data) return {};
  if (data == nullptr) return Error(kernel, name, "has null data");
  if (!IsPackedAligned(data)) {
    return Error(kernel, name, "is not aligned to " + std::to_string(kPackedAlignment) + " bytes");
  }
  return {};
}

template <class T>
Status Run(const Device& device, const PackOperandArgs& args, const PackedOperand& packed, Profile* profile) {
  Launch launch(device, "pack_operand");
  const GmTensor& source = *launch.Input("source", args.source);
  const ConstTensor matrices = MatricesOf(launch.chip(), packed);
  const GmTensor* out = launch.Output(
      "packed", Tensor(const_cast<void*>(matrices.data), DType::kF32, {matrices.size(0), matrices.size(1)}));
  PackInto<T>(launch, source, args.transpose, ViewOf(out, packed));
  return launch.Finish(profile);
}

}  // namespace

Status CheckPacked(const Device& device, const char* kernel, const char* name, const PackedOperand& packed) {
  CUBIST_RETURN_IF_ERROR(device.status());
  if (packed.matrices < 0 || packed.rows < 0 || packed.cols < 0) {
    return Error(kernel, name, "has negative sizes");
  }
  CUBIST_RETURN_IF_ERROR(CheckChoice(kernel, (std::string(name) + ".side").c_str(), packed.side, Side::kB));
  const std::int64_t needed =
      PackedOperandBytes(device, packed.side, packed.dtype, packed.rows, packed.cols, packed.matrices);
  if (needed == 0) return Error(kernel, name, "spans more than 2^62 bytes");
  CUBIST_RETURN_IF_ERROR(CheckMemory(kernel, name, packed.data, packed.bytes, needed, device.computes()));
  if (!device.computes()) return {};
  Header found;
  std::memcpy(static_cast<void*>(&found), packed.data, sizeof(found));
  if (found.magic != Header().magic) return Error(kernel, name, "holds no packed operand");
  if (found != HeaderOf(device.chip(), packed)) {
    return Error(kernel, name,
                 "was packed for another layout or shape: it holds " + std::to_string(found.matrices) +
                     " x " + std::to_string(found.rows) + " x " + std::to_string(found.cols) + " " +
                     NameOf(static_cast<DType>(found.dtype)) + " in panels of " +
                     std::to_string(found.panel) + ", needs " + std::to_string(packed.matrices) + " x " +
                     std::to_string(packed.rows) + " x " + std::to_string(packed.cols) + " " +
                     NameOf(packed.dtype) + " in panels of " +
                     std::to_string(HostChip().PackedStep(RoleOf(packed.side), packed.dtype)));
  }
  return {};
}

PackedStamp::PackedStamp(const Device& device, const PackedOperand& packed)
    : bytes_(
          PackedOperandBytes(device, packed.side, packed.dtype, packed.rows, packed.cols, packed.matrices)) {
  const Header header = HeaderOf(device.chip(), packed);
  std::memcpy(header_.data(), &header, sizeof(header));
}

bool PackedStamp::IsOn(const PackedOperand& packed) const {
  return packed.data != nullptr && packed.bytes >= bytes_ && IsPackedAligned(packed.data) &&
         std::memcmp(packed.data, header_.data(), sizeof(Header)) == 0;
}

PackedGm PackedInput(Launch& launch, const char* name, const PackedOperand& packed) {
  return ViewOf(launch.Input(name, MatricesOf(launch.chip(), packed)), packed);
}

std::int64_t PackedOperandBytes(const Device& device, Side side, DType dtype, std::int64_t rows,
                                std::int64_t cols, std::int64_t matrices) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  if (!device.status().ok() || side > Side::kB || rows < 0 || cols < 0 || matrices < 0) return 0;
  // Padding and widening add at most a panel and a fractal each way, and a factor of two.
  std::int64_t elements = 0, total = 0;
  if (__builtin_mul_overflow(rows + 64, cols + 1024, &elements) ||
      __builtin_mul_overflow(elements, std::max<std::int64_t>(matrices, 1), &total) || total > kMost / 8) {
    return 0;
  }
  return kPackedHeaderBytes + matrices * MatrixBytes(device.chip(), side, dtype, rows, cols);
}

Status PackOperand(const Device& device, const PackOperandArgs& args, PackedOperand* packed,
                   Profile* profile) try {
  constexpr const char* kKernel = "pack_operand";
  CUBIST_RETURN_IF_ERROR(device.status());
  if (packed == nullptr) return InvalidArgument(std::string(kKernel) + ": packed is a null pointer");
  CUBIST_RETURN_IF_ERROR(CheckChoice(kKernel, "side", args.side, Side::kB));
  const Argument source{kKernel, "source", args.source};
  if (args.source.rank == 3) {
    CUBIST_RETURN_IF_ERROR(CheckShape(source, {{"matrices"}, {"rows"}, {"columns"}}));
  } else {
    CUBIST_RETURN_IF_ERROR(CheckShape(source, {{"rows"}, {"columns"}}));
  }
  CUBIST_RETURN_IF_ERROR(CheckDType(source, kFloatTypes));
  CUBIST_RETURN_IF_ERROR(CheckStorage(source, device.computes()));

  PackedOperand result;
  result.data = args.data, result.bytes = args.bytes;
  result.side = args.side, result.dtype = args.source.dtype;
  result.matrices = args.source.rank == 3 ? args.source.size(0) : 1;
  result.rows = args.source.size(args.source.rank - (args.transpose ? 1 : 2));
  result.cols = args.source.size(args.source.rank - (args.transpose ? 2 : 1));
  const std::int64_t needed =
      PackedOperandBytes(device, result.side, result.dtype, result.rows, result.cols, result.matrices);
  if (needed == 0) return source.Error("spans more than 2^62 bytes");
  CUBIST_RETURN_IF_ERROR(CheckMemory(kKernel, "data", args.data, args.bytes, needed, device.computes()));
  CUBIST_RETURN_IF_ERROR(
      CheckApart({kKernel, "data", ConstTensor(args.data, DType::kF32, {needed / 4})}, source));

  CUBIST_RETURN_IF_ERROR(
      WithFloatType(result.dtype, [&]<class T>(T) { return Run<T>(device, args, result, profile); }));
  if (device.computes()) {
    const Header header = HeaderOf(device.chip(), result);
    std::memcpy(args.data, &header, sizeof(header));
  }
  *packed = result;
  return {};
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace cubist
