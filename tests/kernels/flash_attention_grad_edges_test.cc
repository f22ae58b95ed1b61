// FlashAttentionGrad with every mask in every layout and dtype, at the sizes where blocks, panels and vectors end.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/flash_attention_grad.h"
#include "tests/kernels/attention_grad_call.h"
#include "tests/kernels/kernel_test.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

// Which sizes of a boolean mask are 1 and serve all.
using Broadcast = std::array<bool, 4>;

struct MaskCase {
  const char* name;
  Causal causal = Causal::kNone;
  std::optional<AttentionWindow> window = {};
  std::optional<std::int64_t> prefix = {};
  std::optional<Broadcast> broadcast = {};
};

std::vector<MaskCase> MaskCases() {
  const auto window = [](std::optional<std::int64_t> left, std::optional<std::int64_t> right, Causal anchor) {
    return AttentionWindow{left, right, anchor};
  };
  return {{.name = "none"},
          {.name = "causal_top_left", .causal = Causal::kTopLeft},
          {.name = "causal_bottom_right", .causal = Causal::kBottomRight},
          {.name = "window_top_left", .causal = Causal::kTopLeft, .window = window(15, {}, Causal::kTopLeft)},
          {.name = "window_bottom_right",
           .causal = Causal::kBottomRight,
           .window = window(16, {}, Causal::kBottomRight)},
          {.name = "band_top_left", .window = window(1, 14, Causal::kTopLeft)},
          {.name = "band_bottom_right", .window = window(17, 0, Causal::kBottomRight)},
          {.name = "band_beside_the_diagonal", .window = window(-2, 18, Causal::kTopLeft)},
          {.name = "right_alone", .window = window({}, 3, Causal::kBottomRight)},
          {.name = "prefix_top_left", .causal = Causal::kTopLeft, .prefix = 16},
          {.name = "prefix_bottom_right", .causal = Causal::kBottomRight, .prefix = 1},
          {.name = "prefix_and_right", .window = window({}, -1, Causal::kTopLeft), .prefix = 17},
          {.name = "prefix_and_left",
           .causal = Causal::kTopLeft,
           .window = window(5, {}, Causal::kTopLeft),
           .prefix = 15},
          {.name = "prefix_and_band", .window = window(-2, 18, Causal::kBottomRight), .prefix = 3},
          {.name = "boolean", .broadcast = Broadcast{false, false, false, false}},
          {.name = "boolean_for_all_heads", .broadcast = Broadcast{false, true, false, false}},
          {.name = "boolean_of_keys", .broadcast = Broadcast{true, true, true, false}},
          {.name = "boolean_of_rows", .broadcast = Broadcast{true, false, false, true}},
          {.name = "boolean_and_causal",
           .causal = Causal::kBottomRight,
           .broadcast = Broadcast{true, true, false, false}}};
}

// Sizes of Sq and Skv, each below, at and above those of vectors, fractals and strips.
struct Sizes {
  std::int64_t sq, skv;
};
constexpr Sizes kSizes[] = {{1, 1},   {1, 15},  {1, 33},  {2, 17},   {15, 16}, {16, 16},
                            {16, 17}, {17, 1},  {17, 15}, {31, 65},  {32, 32}, {33, 17},
                            {33, 33}, {64, 65}, {65, 31}, {17, 129}, {129, 18}};

enum class Form { kBnsd, kBsnd, kPacked };
constexpr Form kForms[] = {Form::kBnsd, Form::kBsnd, Form::kPacked};

struct Call {
  AttentionShape shape;
  GradOptions options;
};

// Packed: that sequence, an empty one, a single row, keys without rows, and the sequence the other way round.
Call CallOf(const MaskCase& mask, Form form, const Sizes& sizes, DType dtype) {
  Call call{{2, 2, 1, sizes.sq, sizes.skv, 8, 0, 12}, {.in = dtype, .out = dtype, .forward_out = dtype}};
  GradOptions& o = call.options;
  std::int64_t sequences = 2, rows = sizes.sq, keys = sizes.skv;
  if (form == Form::kBsnd) o.layout = kBsnd;
  if (form == Form::kPacked) {
    const Sizes parts[] = {sizes, {0, 0}, {1, 16}, {0, 3}, {sizes.skv, sizes.sq}};
    o.layout = kBsnd;
    call.shape.batch = 1, call.shape.sq = call.shape.skv = 0;
    for (const Sizes& part : parts) {
      o.q_ends.push_back(call.shape.sq += part.sq), o.kv_ends.push_back(call.shape.skv += part.skv);
      rows = std::max(rows, part.sq), keys = std::max(keys, part.skv);
    }
    sequences = static_cast<std::int64_t>(o.q_ends.size());
  }
  o.causal = mask.causal, o.window = mask.window;
  // Not the same for all.
  for (std::int64_t b = 0; mask.prefix && b < sequences; ++b)
    o.prefix.push_back(std::min(*mask.prefix + b, call.shape.skv));
  if (mask.broadcast) {
    const std::int64_t all[] = {sequences, call.shape.q_heads, rows, keys};
    for (std::size_t d = 0; d < 4; ++d) o.mask.push_back((*mask.broadcast)[d] ? 1 : all[d]);
  }
  return call;
}

class FlashAttentionGradEdgesTest : public ::testing::TestWithParam<MaskCase> {};
INSTANTIATE_TEST_SUITE_P(Masks, FlashAttentionGradEdgesTest, ::testing::ValuesIn(MaskCases()),
                         [](const auto& mask) { return std::string(mask.param.name); });

void ExpectRight(const Device& device, const MaskCase& mask, Form form, const Sizes& sizes, DType dtype) {
  const Call call = CallOf(mask, form, sizes, dtype);
  GradCall grad(call.shape, call.options);
  grad.FillNormal();
  SCOPED_TRACE(Join(mask.name, " form ", static_cast<int>(form)));
  ExpectRight(device, grad);
}

// Every size in every form in one dtype, which is another for its neighbours and the next form.
TEST_P(FlashAttentionGradEdgesTest, OnTheHost) {
  std::size_t dtype = 0;
  for (const Form form : kForms) {
    for (const Sizes& sizes : kSizes) ExpectRight(Host(), GetParam(), form, sizes, kFloatTypes[dtype++ % 3]);
  }
}

// A fourth of them, others for every mask.
TEST_P(FlashAttentionGradEdgesTest, OnTheModel) {
  std::size_t at = std::string(GetParam().name).size(), dtype = 0;
  for (const Form form : kForms) {
    for (const Sizes& sizes : kSizes) {
      if (++at % 4 == 0)
        ExpectRight(NpuWithData(Ascend910B2()), GetParam(), form, sizes, kFloatTypes[dtype++ % 3]);
    }
  }
}

}  // namespace
}  // namespace cubist::testing
