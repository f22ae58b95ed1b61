// The C interface beside the kernels: errors, tensors, devices, profiles, packed operands, states, loss scaling.
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cubist/c/support.h"
#include "cubist/version.h"
#include "kernels/loss_scale.h"
#include "npu_model/chip_constants.h"
#include "npu_model/nearest.h"
#include "tools/profile_fields.h"

struct cubist_loss_scaler {
  cubist::LossScaler scaler;
};

cubist_packed::~cubist_packed() { ::operator delete (memory, std::align_val_t{cubist::kPackedAlignment}); }

namespace cubist::c {
namespace {

thread_local char last_error[2048] = "";

static_assert(CUBIST_MAX_RANK == Tensor::kMaxRank);
static_assert(static_cast<int>(DType::kBool) == CUBIST_BOOL && static_cast<int>(DType::kI64) == CUBIST_I64);
static_assert(static_cast<int>(StatusCode::kOutOfMemory) == CUBIST_OUT_OF_MEMORY);

cubist_tensor Contiguous(void* data, cubist_dtype dtype, std::int32_t rank, const std::int64_t* sizes) {
  cubist_tensor t{};
  if (rank < 1 || rank > CUBIST_MAX_RANK || sizes == nullptr) return t;
  t.data = data, t.dtype = dtype, t.rank = rank;
  std::uint64_t stride = 1;  // Unsigned: an absurd size must not overflow before a kernel names it.
  for (std::int32_t d = rank - 1; d >= 0; --d) {
    t.sizes[d] = sizes[d];
    t.strides[d] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(sizes[d], 1));
  }
  return t;
}

// Makes an object of a handle's type for the caller, where `make(handle)` is well.
template <class Handle, class Make>
cubist_status Create(const char* function, Handle** result, Make make) noexcept {
  return Guarded([&]() -> Status {
    if (result == nullptr) throw BadInput{std::string(function) + ": the place for the handle is null"};
    *result = nullptr;
    auto handle = std::make_unique<Handle>();
    CUBIST_RETURN_IF_ERROR(make(*handle));
    *result = handle.release();
    return {};
  });
}

// Finds one of a profile's fields by the name that it has in JSON.
struct FieldFinder {
  std::string wanted;
  std::optional<double> number = {};
  const char* text = nullptr;
  std::vector<std::string> known = {};  // Names of the fields of the kind that is looked for.
  bool texts = false;

  template <class T>
  void operator()(const char* name, const T& value) {
    constexpr bool kNumber = std::is_arithmetic_v<T>;
    if (kNumber == texts) return;
    known.emplace_back(name);
    if (wanted != name) return;
    if constexpr (kNumber) {
      number = static_cast<double>(value);
    } else {
      text = Text(value);
    }
  }
  template <class Items, class Write>
  void List(const char*, const Items&, Write) {}
  template <class Write>
  void Group(const char*, Write) {}

 private:
  static const char* Text(const std::string& value) { return value.c_str(); }
  static const char* Text(const char* value) { return value; }
};

FieldFinder Find(const Profile& profile, const char* name, bool texts) {
  FieldFinder find{.wanted = name, .texts = texts};
  find("kernel", profile.kernel);
  find("chip", profile.chip);
  WriteProfileFields(find, profile);
  return find;
}

// None where `path` is null.
Status ReadTuning(const char* path, std::shared_ptr<const Tuning>* tuning) {
  if (path == nullptr) return {};
  auto read = std::make_shared<Tuning>();
  CUBIST_RETURN_IF_ERROR(read->Read(path));
  *tuning = std::move(read);
  return {};
}

}  // namespace

cubist_status Fail(cubist_status code, const char* message) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", message);
  return code;
}

cubist_status StatusOf(const Status& status) noexcept {
  return status.ok() ? CUBIST_OK : Fail(static_cast<cubist_status>(status.code()), status.message().c_str());
}

}  // namespace cubist::c

using namespace cubist;
using c::Complete, c::Create, c::Guarded, c::Reader;

const char* cubist_last_error(void) { return c::last_error; }
const char* cubist_version(void) { return Version(); }

cubist_tensor cubist_input(const void* data, cubist_dtype dtype, std::int32_t rank,
                           const std::int64_t* sizes) {
  return c::Contiguous(const_cast<void*>(data), dtype, rank, sizes);
}
cubist_tensor cubist_output(void* data, cubist_dtype dtype, std::int32_t rank, const std::int64_t* sizes) {
  return c::Contiguous(data, dtype, rank, sizes);
}

// ---- Devices

cubist_status cubist_device_host(const cubist_host_options* options, cubist_device** device) {
  return Create("device_host", device, [&](cubist_device& made) -> Status {
    const cubist_host_options defaults = CUBIST_HOST_OPTIONS;
    const cubist_host_options o =
        options == nullptr ? defaults : Complete("device_host", options, defaults, "options");
    if (o.threads < 0 || o.threads > kMostThreads)
      return InvalidArgument("device_host: threads is " + std::to_string(o.threads) + ", needs 0 to " +
                             std::to_string(kMostThreads));
    HostOptions host{.threads = o.threads, .pin = o.pin};
    CUBIST_RETURN_IF_ERROR(c::ReadTuning(o.tuning, &host.tuning));
    made.device = Host(std::move(host));
    return {};
  });
}

cubist_status cubist_device_npu(const char* chip, const cubist_npu_options* options, cubist_device** device) {
  return Create("device_npu", device, [&](cubist_device& made) -> Status {
    const cubist_npu_options defaults = CUBIST_NPU_OPTIONS;
    const cubist_npu_options o =
        options == nullptr ? defaults : Complete("device_npu", options, defaults, "options");
    const Reader reader("device_npu");
    ChipSpec spec;
    CUBIST_RETURN_IF_ERROR(FindChip(&reader.NotNull("chip", chip), &spec));
    if (o.constant_count > 0) {
      reader.NotNull("constants", o.constants), reader.NotNull("values", o.values);
      for (std::size_t i = 0; i < o.constant_count; ++i)
        CUBIST_RETURN_IF_ERROR(
            SetConstant(&spec, &reader.NotNull("a name in constants", o.constants[i]), o.values[i]));
    }
    NpuOptions npu;
    npu.with_data = !o.without_data;
    npu.policy = o.per_tile_flags ? sync::Policy::kPerTile : sync::Policy::kMinimal;
    npu.timeline = o.timeline;
    CUBIST_RETURN_IF_ERROR(c::ReadTuning(o.tuning, &npu.tuning));
    made.device = Npu(spec, std::move(npu));
    return {};
  });
}

void cubist_device_destroy(cubist_device* device) { delete device; }

// ---- Profiles

cubist_status cubist_profile_create(cubist_profile** profile) {
  return Create("profile_create", profile, [](cubist_profile&) { return Status(); });
}
void cubist_profile_destroy(cubist_profile* profile) { delete profile; }

cubist_status cubist_profile_number(const cubist_profile* profile, const char* name, double* value) {
  return Guarded([&]() -> Status {
    const Reader reader("profile_number");
    reader.NotNull("name", name), reader.NotNull("value", value);
    const c::FieldFinder found = c::Find(reader.NotNull("profile", profile).profile, name, /*texts=*/false);
    if (!found.number)
      throw reader.Error("name", "is '" + found.wanted + "'; " + KnownAndNearest(found.wanted, found.known));
    *value = *found.number;
    return {};
  });
}

cubist_status cubist_profile_text(const cubist_profile* profile, const char* name, const char** value) {
  return Guarded([&]() -> Status {
    const Reader reader("profile_text");
    reader.NotNull("name", name), reader.NotNull("value", value);
    const c::FieldFinder found = c::Find(reader.NotNull("profile", profile).profile, name, /*texts=*/true);
    if (found.text == nullptr)
      throw reader.Error("name", "is '" + found.wanted + "'; " + KnownAndNearest(found.wanted, found.known));
    *value = found.text;
    return {};
  });
}

cubist_status cubist_profile_write_timeline(const cubist_profile* profile, const char* path) {
  return Guarded([&] {
    const Reader reader("profile_write_timeline");
    return reader.NotNull("profile", profile).profile.WriteTimeline(&reader.NotNull("path", path));
  });
}

// ---- Packed operands

cubist_status cubist_pack_operand(const cubist_device* device, const cubist_pack_args* args,
                                  cubist_packed** packed, cubist_profile* profile) {
  return Create("pack_operand", packed, [&](cubist_packed& made) {
    const cubist_pack_args defaults = CUBIST_PACK_ARGS;
    const cubist_pack_args a = Complete("pack_operand", args, defaults);
    const Reader reader("pack_operand");
    const Device& on = reader.NotNull("device", device).device;
    PackOperandArgs to;
    to.source = reader.Output("source", a.source);
    to.side = reader.Enum<Side>("side", a.side, CUBIST_SIDE_B);
    to.transpose = a.transpose;
    if (const ConstTensor& s = to.source; s.rank == 2 || s.rank == 3) {
      std::int64_t rows = s.size(s.rank - 2), cols = s.size(s.rank - 1);
      if (to.transpose) std::swap(rows, cols);
      to.bytes = PackedOperandBytes(on, to.side, s.dtype, rows, cols, s.rank == 3 ? s.size(0) : 1);
    }
    const auto room = static_cast<std::size_t>(std::max<std::int64_t>(to.bytes, 1));
    to.data = made.memory = ::operator new (room, std::align_val_t{kPackedAlignment});
    return PackOperand(on, to, &made.view, profile == nullptr ? nullptr : &profile->profile);
  });
}

std::int64_t cubist_packed_bytes(const cubist_packed* packed) {
  return packed == nullptr ? 0 : packed->view.bytes;
}
void cubist_packed_destroy(cubist_packed* packed) { delete packed; }

// ---- States

cubist_status cubist_block_state_create(cubist_block_state** state) {
  return Create("block_state_create", state, [](cubist_block_state&) { return Status(); });
}
void cubist_block_state_destroy(cubist_block_state* state) { delete state; }

cubist_status cubist_loss_scaler_create(const cubist_loss_scale_options* options,
                                        cubist_loss_scaler** scaler) {
  return Create("loss_scaler_create", scaler, [&](cubist_loss_scaler& made) -> Status {
    const cubist_loss_scale_options defaults = CUBIST_LOSS_SCALE_OPTIONS;
    const auto o =
        options == nullptr ? defaults : Complete("loss_scaler_create", options, defaults, "options");
    made.scaler = LossScaler({.initial = o.initial,
                              .growth = o.growth,
                              .backoff = o.backoff,
                              .growth_interval = o.growth_interval,
                              .least = o.least,
                              .most = o.most});
    return made.scaler.status();
  });
}
void cubist_loss_scaler_destroy(cubist_loss_scaler* scaler) { delete scaler; }
float cubist_loss_scaler_scale(const cubist_loss_scaler* scaler) {
  return scaler == nullptr ? std::numeric_limits<float>::quiet_NaN() : scaler->scaler.scale();
}

cubist_status cubist_loss_scaler_unscale(cubist_loss_scaler* scaler, const cubist_tensor* gradients,
                                         std::size_t count, bool* apply) {
  return Guarded([&] {
    Reader reader("loss_scaler_unscale");
    reader.NotNull("scaler", scaler), reader.NotNull("apply", apply);
    return scaler->scaler.Unscale(reader.Outputs("gradients", gradients, count), apply);
  });
}
