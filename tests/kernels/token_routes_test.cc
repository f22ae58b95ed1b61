// TokenPermute and TokenUnpermute where routes are more than expert ids: routing maps with ragged rows, tokens that do not
// count, placed experts, counts of devices and nodes, capacities by probability, padding by tokens. Against what the
// definitions say, on both executors.
#include "reference/token_routes.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/token_permute.h"
#include "kernels/token_permute_grad.h"
#include "reference/bounds.h"
#include "reference/token_permute.h"
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/routes_in_parts.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/shapes.h"

namespace cubist::testing {
namespace {

std::vector<double> AsDoubles(const std::vector<std::int32_t>& values) {
  return {values.begin(), values.end()};
}

struct Form {
  bool map = true, valid = false, places = false, pad_with_tokens = false;
  CapacityKeeps keeps = CapacityKeeps::kFirst;
  std::int64_t capacity = 0, row_multiple = 1, num_out_tokens = 0;
  std::optional<Range> rows = {};
  DType dtype = DType::kBF16, probs = DType::kF32;
  bool equal_probs = false;
  int nan_probs = 0;  // Of a hundred.

  std::string Name() const {
    return Join(map ? "map " : "ids ", valid ? "valid " : "", places ? "places " : "",
                pad_with_tokens ? "tokens as pads " : "",
                keeps == CapacityKeeps::kHighest ? "highest of " : "", capacity, " multiple ", row_multiple,
                " out ", num_out_tokens, rows.has_value() ? Join(" rows ", rows->begin, "..", rows->end) : "",
                " ", NameOf(dtype), " probs ", NameOf(probs));
  }
  std::int64_t Rows(const PermuteShape& s) const {
    if (rows.has_value()) return rows->size();
    if (capacity > 0) return s.experts * capacity;
    const std::int64_t slots = s.tokens * s.topk,
                       all = slots + std::min(slots, s.experts) * (row_multiple - 1);
    return num_out_tokens > 0 ? std::min(num_out_tokens, all)
                              : std::max<std::int64_t>(all + num_out_tokens, 0);
  }
};

// A call, its tensors between guards, and what the reference makes of it.
struct Call {
  Call(const PermuteShape& s, const Form& f)
      : shape(s),
        form(f),
        tokens(f.dtype, {s.tokens, s.hidden}),
        ids(DType::kI32, {s.tokens, s.topk}),
        map(DType::kBool, {s.tokens, s.experts}, Layout{.gap = 3, .offset = 1, .step = 1}),
        valid(DType::kBool, {s.tokens}),
        places(DType::kI32, {s.experts}),
        probs(f.probs, {s.tokens, f.map ? s.experts : s.topk}),
        permuted(f.dtype, {f.Rows(s), s.hidden}),
        sorted(DType::kI32, {s.tokens * s.topk}),
        row_probs(f.probs, {f.Rows(s)}),
        counts(DType::kI32, {s.experts}),
        offsets(DType::kI32, {s.experts + 1}),
        row_tokens(DType::kI32, {f.Rows(s)}) {
    tokens.FillNormal(random), probs.FillUniform(random, 0.1, 1);
    if (f.equal_probs) probs.Fill(0.5);
    for (std::int64_t i = 0; f.nan_probs > 0 && i < probs.count(); ++i) {
      if (random.Integer(0, 99) < f.nan_probs) probs.set({i / probs.size(1), i % probs.size(1)}, kNaN);
    }
    permuted.FillNaN(), row_probs.FillNaN(), row_tokens.Fill(-9);
    map.Fill(0), ids.Fill(-1), valid.Fill(1);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      const std::int64_t routes = random.Integer(0, s.topk);  // Ragged.
      for (std::int64_t j = 0; j < routes && s.experts > 0; ++j) {
        const std::int64_t expert = random.Integer(0, s.experts - 1);
        map.set({t, expert}, 1), ids.set({t, j}, static_cast<double>(expert));
      }
      if (random.Integer(0, 4) == 0) valid.set({t}, 0);
    }
    std::vector<double> order(static_cast<std::size_t>(s.experts));
    std::iota(order.begin(), order.end(), 0.0);
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1],
                order[static_cast<std::size_t>(random.Integer(0, static_cast<std::int64_t>(i) - 1))]);
    Assign(places.view(), order);
  }

  TokenPermuteArgs args() {
    TokenPermuteArgs args{.tokens = tokens.view(),
                          .probs = probs.view(),
                          .num_experts = shape.experts,
                          .num_out_tokens = form.num_out_tokens,
                          .capacity = form.capacity,
                          .capacity_keeps = form.keeps,
                          .pad_with_tokens = form.pad_with_tokens,
                          .row_multiple = form.row_multiple,
                          .rows = form.rows,
                          .permuted = permuted.view(),
                          .sorted_indices = sorted.view(),
                          .permuted_probs = row_probs.view(),
                          .expert_counts = counts.view(),
                          .expert_offsets = offsets.view(),
                          .row_tokens = row_tokens.view()};
    if (form.map) {
      args.routing_map = map.view(), args.top_k = shape.topk;
    } else {
      args.topk_ids = ids.view();
    }
    if (form.valid) args.valid = valid.view();
    if (form.places) args.expert_places = places.view();
    return args;
  }

  Random random;
  PermuteShape shape;
  Form form;
  Matrix tokens, ids, map, valid, places, probs, permuted, sorted, row_probs, counts, offsets, row_tokens;
};

void ExpectForm(const Device& device, const PermuteShape& s, const Form& form) {
  SCOPED_TRACE(s.Name() + " " + form.Name());
  Call call(s, form);
  const TokenPermuteArgs args = call.args();
  ASSERT_TRUE(IsOk(TokenPermute(device, args)));

  reference::RouteSelection routes = reference::SelectRoutes(
      args.topk_ids, args.routing_map, args.valid, args.expert_places, args.probs, s.topk, s.experts);
  const ConstTensor all_ids(routes.ids.data(), {s.tokens, s.topk});
  const auto before = reference::RoutePadded(all_ids, s.experts, 0, 1);
  if (form.keeps == CapacityKeeps::kHighest) {
    reference::RouteSelection ordered = routes;  // NaN is lowest.
    for (double& p : ordered.probs) p = std::isnan(p) ? -kInfinity : p;
    reference::KeepHighest(s.experts, form.capacity, &ordered);
    routes.ids = ordered.ids;
  }
  const auto routing = reference::RoutePadded(all_ids, s.experts, form.capacity, form.row_multiple);
  ExpectExactly(call.sorted.view(), AsDoubles(routing.sorted_indices));
  ExpectExactly(call.counts.view(), AsDoubles(before.expert_counts));
  ExpectExactly(call.offsets.view(), AsDoubles(routing.expert_offsets));

  Matrix pad_map = call.map;  // Who goes where: nobody who is not valid.
  for (std::int64_t t = 0; form.valid && t < s.tokens; ++t) {
    for (std::int64_t e = 0; e < s.experts && call.valid.at({t}) == 0; ++e) pad_map.set({t, e}, 0);
  }
  std::vector<reference::RowSource> rows = reference::RowSources(
      routing, routes, form.pad_with_tokens ? pad_map.view() : ConstTensor(), args.probs, form.capacity);
  const std::int64_t first = form.rows.value_or(Range()).begin;
  std::vector<double> expected, expected_probs, expected_tokens;
  for (std::int64_t r = 0; r < form.Rows(s); ++r) {
    const auto row = static_cast<std::size_t>(first + r);
    const reference::RowSource source = row < rows.size() ? rows[row] : reference::RowSource();
    for (std::int64_t h = 0; h < s.hidden; ++h)
      expected.push_back(source.token < 0 ? 0 : call.tokens.at({source.token, h}));
    expected_probs.push_back(source.prob);
    expected_tokens.push_back(static_cast<double>(source.token));
  }
  ExpectExactly(call.permuted.view(), expected);
  ExpectExactly(call.row_probs.view(), expected_probs);
  ExpectExactly(call.row_tokens.view(), expected_tokens);
  for (const Matrix* x :
       {&call.tokens, &call.ids, &call.map, &call.valid, &call.places, &call.probs, &call.permuted,
        &call.sorted, &call.row_probs, &call.counts, &call.offsets, &call.row_tokens})
    ExpectGuards(*x);
}

std::vector<PermuteShape> FormShapes() {
  return {{1, 1, 1, 1}, {40, 4, 7, 33}, {97, 3, 5, 130},  {200, 8, 64, 65}, {5, 2, 3, 0},     {0, 2, 5, 9},
          {4, 0, 3, 5}, {6, 0, 0, 7},   {20, 3, 9, 1201}, {16, 6, 6, 12},   {130, 20, 20, 17}};
}

std::vector<Form> Forms(const PermuteShape& s) {
  const std::int64_t slots = s.tokens * s.topk, few = std::max<std::int64_t>(slots / 12, 1);
  std::vector<Form> forms = {
      {},
      {.valid = true, .dtype = DType::kF32},
      {.map = false, .valid = true},
      {.map = false, .places = true, .dtype = DType::kF16, .probs = DType::kF16},
      {.valid = true, .places = true, .row_multiple = 4},
      {.num_out_tokens = slots / 2},
      {.num_out_tokens = -(slots / 3), .probs = DType::kBF16},
      {.rows = Range{slots / 4, slots / 2}},
      {.capacity = few},
      {.keeps = CapacityKeeps::kHighest, .capacity = 1},
      {.map = false, .keeps = CapacityKeeps::kHighest, .capacity = few, .probs = DType::kBF16},
      {.map = false, .valid = true, .places = true, .keeps = CapacityKeeps::kHighest, .capacity = 3},
      {.keeps = CapacityKeeps::kHighest, .capacity = 2, .equal_probs = true},
      {.keeps = CapacityKeeps::kHighest, .capacity = 4, .rows = Range{3, 11}}};
  if (s.tokens > 0) {
    const std::int64_t capacity = std::min(few, s.tokens);
    forms.push_back({.pad_with_tokens = true, .capacity = capacity, .dtype = DType::kF32});
    forms.push_back({.pad_with_tokens = true, .capacity = s.tokens});
    forms.push_back({.valid = true, .pad_with_tokens = true, .capacity = capacity});
    forms.push_back({.valid = true, .pad_with_tokens = true, .capacity = s.tokens});
    forms.push_back({.pad_with_tokens = true, .keeps = CapacityKeeps::kHighest, .capacity = capacity});
    forms.push_back({.pad_with_tokens = true, .capacity = s.tokens, .rows = Range{2, 2 + s.tokens}});
  }
  return forms;
}

void ExpectForms(const Device& device) {
  for (const PermuteShape& shape : FormShapes()) {
    for (const Form& form : Forms(shape)) ExpectForm(device, shape, form);
  }
}
TEST(TokenRoutesTest, OnHost) { ExpectForms(Host()); }
TEST(TokenRoutesTest, OnNpu) { ExpectForms(NpuWithData(Ascend910B2())); }

TEST(TokenRoutesTest, ManyPlacedExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    ExpectForm(device, {30, 3, 50'000, 5}, {.map = false, .places = true});
    ExpectForm(device, {30, 3, 50'000, 5},
               {.map = false, .places = true, .keeps = CapacityKeeps::kHighest, .capacity = 1});
  }
}

// Of a token whose map or whose routes do not fit, parts of them.
TEST(TokenRoutesTest, InParts) {
  for (const PermuteShape& shape :
       {PermuteShape{12, 5, 400, 9}, PermuteShape{7, 90, 300, 5}, PermuteShape{3, 150, 150, 4}}) {
    for (const bool map : {true, false}) {
      const auto chips = ChipsThatCutSelections({.tokens = shape.tokens,
                                                 .hidden = shape.hidden,
                                                 .top_k = shape.topk,
                                                 .map_cols = map ? shape.experts : 0});
      EXPECT_TRUE(shape.topk < 90 || !chips.empty());
      int made = 0;
      for (const ChipSpec& chip : chips) {
        for (const Form& form : Forms(shape)) {
          if (form.map != map) continue;
          Call call(shape, form);
          if (!TokenPermute(NpuWithData(chip), call.args()).ok())
            continue;  // For another step there is too little.
          ExpectForm(NpuWithData(chip), shape, form);
          ++made;
        }
      }
      EXPECT_TRUE(chips.empty() || made > 3) << made;
    }
  }
}

// A row of a map of a million experts, and one of twenty thousand that are all chosen.
TEST(TokenRoutesTest, LargeMaps) {
  const Device npu = NpuWithData(Ascend910B2());
  ExpectForm(npu, {2, 9, 1 << 20, 3}, {.places = true});
  ExpectForm(npu, {2, 20'000, 20'000, 3}, {.valid = true});
  ExpectForm(npu, {2, 20'000, 20'000, 3}, {.keeps = CapacityKeeps::kHighest, .capacity = 1});
}

// One expert's routes do not fit: they are read in parts, and the likeliest found as many at a time as can be merged.
TEST(TokenRoutesTest, CapacitiesOfMoreThanFits) {
  const Device npu = NpuWithData(Ascend910B2());
  for (const std::int64_t capacity : {1, 300, 4088, 4089, 9000, 11'999, 12'000}) {
    SCOPED_TRACE(capacity);
    for (const bool equal : {false, true}) {
      ExpectForm(
          npu, {12'000, 1, 1, 2},
          {.map = false, .keeps = CapacityKeeps::kHighest, .capacity = capacity, .equal_probs = equal});
    }
  }
  ExpectForm(npu, {40'000, 2, 3, 1}, {.keeps = CapacityKeeps::kHighest, .capacity = 17'000});
  ChipSpec small = Ascend910B2();
  small.buffers[static_cast<std::size_t>(Buffer::kUB)].capacity = 16 << 10;
  for (const std::int64_t capacity : {1, 77, 1000})
    ExpectForm(NpuWithData(small), {1500, 2, 2, 3}, {.keeps = CapacityKeeps::kHighest, .capacity = capacity});
}

// Fewer routes of an expert have a number for a probability than it has rows: the first of the others fill it up. All of an
// expert's routes fit, or they pass in parts.
TEST(TokenRoutesTest, ProbabilitiesThatAreNoNumbersAreLowest) {
  const auto expect = [](const Device& device, const PermuteShape& shape, std::int64_t capacity) {
    for (const int nan_probs : {20, 70, 95, 100}) {
      SCOPED_TRACE(Join(nan_probs, " % are NaN"));
      ExpectForm(
          device, shape,
          {.map = false, .keeps = CapacityKeeps::kHighest, .capacity = capacity, .nan_probs = nan_probs});
    }
  };
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const std::int64_t capacity : {1, 5, 17, 30}) expect(device, {60, 2, 3, 4}, capacity);
  }
  for (const Device& device : {Host(), NpuWithData(WithCapacity(Buffer::kUB, 16 << 10))}) {
    for (const std::int64_t capacity : {1, 77, 700, 1000}) expect(device, {1500, 2, 2, 3}, capacity);
  }
  for (const std::int64_t capacity : {300, 5000})
    expect(NpuWithData(Ascend910B2()), {12'000, 1, 1, 2}, capacity);
}

// Maps, places, capacities and padding, each kernel by itself.
TEST(TokenRoutesTest, SameBitsForAnyThreads) {
  const tbb::global_control more_threads_than_cores(tbb::global_control::max_allowed_parallelism, 8);
  const PermuteShape shape{501, 6, 40, 67};
  const auto outputs = [](Call& call) {
    return std::vector<Matrix*>{&call.permuted, &call.sorted,  &call.row_probs,
                                &call.counts,   &call.offsets, &call.row_tokens};
  };
  for (const Form& form :
       {Form{.valid = true, .places = true}, Form{.row_multiple = 16, .dtype = DType::kF32},
        Form{.map = false, .keeps = CapacityKeeps::kHighest, .capacity = 30},
        Form{.keeps = CapacityKeeps::kHighest, .capacity = 30, .equal_probs = true},
        Form{.valid = true, .pad_with_tokens = true, .capacity = 60},
        Form{.capacity = 20, .rows = Range{90, 511}}}) {
    SCOPED_TRACE(form.Name());
    Call first(shape, form);
    ASSERT_TRUE(IsOk(TokenPermute(Host({.threads = 1}), first.args())));
    for (const int threads : kThreadCounts) {
      SCOPED_TRACE(Join("threads ", threads));
      Call call(shape, form);
      ASSERT_TRUE(IsOk(TokenPermute(Host({.threads = threads}), call.args())));
      for (std::size_t i = 0; i < outputs(call).size(); ++i)
        ExpectSameBits(outputs(call)[i]->view(), outputs(first)[i]->view());
    }
  }
}

// More tokens than cores, so that pieces have several rows of no columns.
TEST(TokenRoutesTest, MapsOfNoExperts) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const bool valid : {false, true})
      ExpectForm(device, {300, 0, 0, 5}, {.valid = valid, .places = valid, .num_out_tokens = 7});
  }
}

// Random calls; the seed is part of every failure.
TEST(TokenRoutesTest, RandomForms) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(Join("seed ", seed));
    Random random(RunSeed() + seed);
    const auto coin = [&] { return random.Integer(0, 1) == 1; };
    PermuteShape s;
    s.tokens = random.Integer(0, 70), s.experts = random.Integer(1, 40), s.hidden = random.Integer(1, 90);
    s.topk = random.Integer(0, std::min<std::int64_t>(s.experts, 9));
    Form form{.map = coin(), .valid = coin(), .places = coin()};
    form.dtype = kFloatTypes[random.Integer(0, 2)], form.probs = kFloatTypes[random.Integer(0, 2)];
    if (coin()) {
      form.capacity = random.Integer(1, std::max<std::int64_t>(s.tokens, 1));
      form.keeps = coin() ? CapacityKeeps::kHighest : CapacityKeeps::kFirst;
      form.equal_probs = coin();
      form.pad_with_tokens = form.map && !form.places && s.tokens > 0 && coin();
    } else {
      form.row_multiple = random.Integer(1, 9);
    }
    const std::int64_t all = form.Rows(s);
    if (coin()) {  // A window, which may reach beyond the last row, or
      const std::int64_t begin = random.Integer(0, all), end = random.Integer(begin, all + 5);
      form.rows = Range{begin, end};
    } else if (form.capacity == 0) {  // room for so many rows.
      form.num_out_tokens = random.Integer(-all - 2, all + 2);
    }
    ExpectForm(seed % 3 == 0 ? NpuWithData(Ascend910B2()) : Host(), s, form);
  }
}

// Rows for a node stand together, and inside them those for a device.
TEST(TokenRoutesTest, CountsOfDevicesAndNodes) {
  for (const Device& device : {Host(), NpuWithData(Ascend910B2())}) {
    for (const std::int64_t devices : {1, 2, 6, 24, 600, 1200}) {
      constexpr std::int64_t kExperts = 1200;
      Call call({500, 4, kExperts, 3}, {.map = false});
      const std::int64_t nodes = devices % 3 == 0 ? devices / 3 : 1;
      Matrix device_counts(DType::kI32, {devices}), node_counts(DType::kI32, {nodes});
      TokenPermuteArgs args = call.args();
      args.device_counts = device_counts.view(), args.node_counts = node_counts.view();
      ASSERT_TRUE(IsOk(TokenPermute(device, args)));
      for (const auto* counts : {&device_counts, &node_counts}) {
        const std::int64_t parts = counts->size(0), each = kExperts / parts;
        std::vector<double> sums(static_cast<std::size_t>(parts), 0.0);
        for (std::int64_t e = 0; e < kExperts; ++e)
          sums[static_cast<std::size_t>(e / each)] += call.counts.at({e});
        ExpectExactly(counts->view(), sums);
        ExpectGuards(*counts);
      }
      args.expert_counts = {};  // Not asked for.
      Matrix again(DType::kI32, {devices});
      args.device_counts = again.view();
      ASSERT_TRUE(IsOk(TokenPermute(device, args)));
      ExpectSameBits(again.view(), device_counts.view());
    }
  }
}

// There and back with weights of 1 / k over k routes is the token, whatever k is; gradients against the reference and
// against the forms by slot.
TEST(TokenRoutesTest, MapThereAndBackAndGradients) {
  const PermuteShape few{61, 4, 9, 70}, many{61, 4, 700, 70};
  const std::pair<Device, PermuteShape> all[] = {{Host(), few},
                                                 {NpuWithData(Ascend910B2()), few},
                                                 {NpuWithData(WithCapacity(Buffer::kUB, 24 << 10)), many},
                                                 {NpuWithData(WithCapacity(Buffer::kUB, 20 << 10)), many}};
  for (const auto& [device, shape] : all) {
    const auto& s = shape;  // Clang 14 captures no structured binding.
    Call call(s, {.dtype = DType::kF32});
    call.tokens.FillIntegers(call.random, -50, 50);
    call.map.Fill(0), call.probs.Fill(0);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      const std::int64_t k = t % 3 == 0 ? 1 : t % 3 == 1 ? 2 : 4;
      for (std::int64_t j = 0; j < k; ++j) {
        call.map.set({t, (t + 2 * j) % s.experts}, 1);
        call.probs.set({t, (t + 2 * j) % s.experts}, 1.0 / static_cast<double>(k));
      }
    }
    ASSERT_TRUE(IsOk(TokenPermute(device, call.args())));
    Matrix back(DType::kF32, {s.tokens, s.hidden});
    back.FillNaN();
    const TokenUnpermuteArgs unpermute{.permuted = call.permuted.view(),
                                       .sorted_indices = call.sorted.view(),
                                       .routing_map = call.map.view(),
                                       .probs = call.probs.view(),
                                       .top_k = s.topk,
                                       .out = back.view()};
    ASSERT_TRUE(IsOk(TokenUnpermute(device, unpermute)));
    ExpectExactly(back.view(), call.tokens.ToDoubles());

    // By slot.
    const auto routes =
        reference::SelectRoutes({}, call.map.view(), {}, {}, call.probs.view(), s.topk, s.experts);
    std::vector<float> slot_probs(routes.probs.begin(), routes.probs.end());
    const ConstTensor by_slot(slot_probs.data(), {s.tokens, s.topk});
    const std::int64_t rows = call.permuted.size(0);
    Matrix out_grad(DType::kF32, {s.tokens, s.hidden}), row_values(DType::kF32, {rows}),
        rows_grad(DType::kF32, {rows, s.hidden}), rows_grad_by_slot(DType::kF32, {rows, s.hidden}),
        tokens_grad(DType::kF32, {s.tokens, s.hidden}), map_grad(DType::kF32, {s.tokens, s.experts}),
        slot_grad(DType::kF32, {s.tokens, s.topk});
    out_grad.FillNormal(call.random), row_values.FillNormal(call.random);
    for (Matrix* x : {&rows_grad, &rows_grad_by_slot, &tokens_grad, &map_grad, &slot_grad}) x->FillNaN();
    const auto expect_spread = [&] {
      std::vector<double> expected(static_cast<std::size_t>(s.tokens * s.experts), 0.0);
      for (std::int64_t i = 0; i < s.tokens * s.topk; ++i) {
        const std::int32_t e = routes.ids[static_cast<std::size_t>(i)];
        if (e >= 0)
          expected[static_cast<std::size_t>(i / s.topk * s.experts + e)] =
              slot_grad.at({i / s.topk, i % s.topk});
      }
      ExpectExactly(map_grad.view(), expected);
    };
    TokenUnpermuteGradArgs grad{.out_grad = out_grad.view(),
                                .permuted = call.permuted.view(),
                                .sorted_indices = call.sorted.view(),
                                .routing_map = call.map.view(),
                                .probs = call.probs.view(),
                                .top_k = s.topk,
                                .permuted_grad = rows_grad.view(),
                                .probs_grad = map_grad.view()};
    ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, grad)));
    grad.routing_map = {}, grad.probs = by_slot;
    grad.permuted_grad = rows_grad_by_slot.view(), grad.probs_grad = slot_grad.view();
    ASSERT_TRUE(IsOk(TokenUnpermuteGrad(device, grad)));
    ExpectSameBits(rows_grad.view(), rows_grad_by_slot.view());
    expect_spread();

    map_grad.FillNaN(), slot_grad.FillNaN();
    TokenPermuteGradArgs permute_grad{.permuted_grad = rows_grad.view(),
                                      .sorted_indices = call.sorted.view(),
                                      .permuted_probs_grad = row_values.view(),
                                      .routing_map = call.map.view(),
                                      .top_k = s.topk,
                                      .tokens_grad = tokens_grad.view(),
                                      .probs_grad = map_grad.view()};
    ASSERT_TRUE(IsOk(TokenPermuteGrad(device, permute_grad)));
    permute_grad.routing_map = {}, permute_grad.probs_grad = slot_grad.view();
    ASSERT_TRUE(IsOk(TokenPermuteGrad(device, permute_grad)));
    expect_spread();
  }
}

// d sum(weights * unpermute(permute(tokens))) / d probs(t, e), by map.
TEST(TokenRoutesTest, MapGradientsByFiniteDifferences) {
  const PermuteShape s{7, 3, 5, 6};
  Call call(s, {.dtype = DType::kF32});
  ASSERT_TRUE(IsOk(TokenPermute(Host(), call.args())));
  Matrix weights(DType::kF32, {s.tokens, s.hidden}), out(DType::kF32, {s.tokens, s.hidden}),
      rows_grad(DType::kF32, {call.permuted.size(0), s.hidden}),
      probs_grad(DType::kF32, {s.tokens, s.experts});
  weights.FillNormal(call.random);
  ASSERT_TRUE(IsOk(TokenUnpermuteGrad(Host(), {.out_grad = weights.view(),
                                               .permuted = call.permuted.view(),
                                               .sorted_indices = call.sorted.view(),
                                               .routing_map = call.map.view(),
                                               .probs = call.probs.view(),
                                               .top_k = s.topk,
                                               .permuted_grad = rows_grad.view(),
                                               .probs_grad = probs_grad.view()})));
  const auto loss = [&] {
    EXPECT_TRUE(IsOk(TokenUnpermute(Host(), {.permuted = call.permuted.view(),
                                             .sorted_indices = call.sorted.view(),
                                             .routing_map = call.map.view(),
                                             .probs = call.probs.view(),
                                             .top_k = s.topk,
                                             .out = out.view()})));
    const std::vector<double> a = weights.ToDoubles(), b = out.ToDoubles();
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  constexpr double kStep = 0.25;  // The loss is linear in a probability.
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const double at = call.probs.at({t, e});
      call.probs.set({t, e}, at + kStep);
      const double above = loss();
      call.probs.set({t, e}, at - kStep / 2);
      const double below = loss();
      call.probs.set({t, e}, at);
      EXPECT_NEAR(probs_grad.at({t, e}), (above - below) / (1.5 * kStep), 1e-4) << t << ", " << e;
    }
  }
}

TEST(TokenRoutesTest, ArgumentsThatMakeNoSense) {
  Call call({5, 3, 4, 6}, {});
  call.map.Fill(0);
  for (std::int64_t t = 0; t < 5; ++t) call.map.set({t, t % 4}, 1);
  const TokenPermuteArgs valid = call.args();
  ASSERT_TRUE(IsOk(TokenPermute(Host(), valid)));
  Matrix three(DType::kI32, {3}), twice(DType::kI32, {4}), half(DType::kI32, {2}), flags(DType::kBool, {4});
  twice.Fill(1);
  const auto expect = [&](auto change, const std::vector<std::string>& words) {
    TokenPermuteArgs args = valid;
    change(args);
    call.permuted.Fill(7);
    const Status status = TokenPermute(Host(), args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    for (const std::string& word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << status.message() << " lacks " << word;
    EXPECT_EQ(call.permuted.at({0, 0}), 7);
  };
  expect([&](auto& x) { x.topk_ids = call.ids.view(); }, {"routing_map", "topk_ids", "one of them"});
  expect([](auto& x) { x.routing_map = {}; }, {"topk_ids", "not given"});
  expect([](auto& x) { x.top_k = 5; }, {"top_k is 5", "0 to 4"});
  expect([](auto& x) { x.top_k = -1; }, {"top_k is -1"});
  expect([](auto& x) { x.top_k = 0; }, {"routing_map", "has 1 experts set in row 0", "allows 0"});
  expect([&](auto& x) { x.routing_map = call.ids.view(); }, {"routing_map", "size 3", "needs 4"});
  expect([&](auto& x) { x.valid = flags.view(); }, {"valid", "size 4", "needs 5"});
  expect([&](auto& x) { x.expert_places = three.view(); }, {"expert_places", "size 3", "needs 4"});
  expect([&](auto& x) { x.expert_places = twice.view(); }, {"expert_places", "has row 1 a second time"});
  expect([&](auto& x) { x.device_counts = three.view(); }, {"device_counts", "size 3", "divisor of 4"});
  expect([&](auto& x) { x.node_counts = half.view(); }, {"node_counts", "without device_counts"});
  expect([](auto& x) { x.capacity_keeps = CapacityKeeps::kHighest; }, {"capacity is 0"});
  expect([](auto& x) { x.pad_with_tokens = true; }, {"capacity is 0", "pad_with_tokens"});
  expect([](auto& x) { x.capacity = 6, x.pad_with_tokens = true; }, {"capacity is 6", "1 to T = 5"});
  expect([](auto& x) { x.row_tokens.sizes[0] = 3; }, {"row_tokens", "size 3"});
}

}  // namespace
}  // namespace cubist::testing
