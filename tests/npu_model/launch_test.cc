// A user's own kernels, written against the machine's headers alone, on both executors.
#include "npu_model/launch.h"

#include "npu_model/host/simd_targets.h"
// Headers of Highway behind it.
#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "npu_model/core.h"
#include "npu_model/pipeline.h"
#include "tests/support/expect_close.h"
#include "tests/support/matrix.h"
#include "tests/support/random.h"
#include "tests/support/simd_targets.h"

namespace cubist {
namespace {

using testing::ExpectExactly;
using testing::ExpectGuards;
using testing::Matrix;
using testing::Random;
using Values = std::vector<double>;

// ---- The kernels

// c = a b + bias + d: the Cube multiplies blocks of rows, the Vector cores add theirs of d. Scores of the next
// block are issued before the Vector works on this one.
struct MatmulAddOperands {
  Gm a, b, c;
  const GmTensor *bias = nullptr, *d = nullptr;
};

template <class T, AiCore Core>
void MatmulAddKernel(Core& core, const MatmulAddOperands& g, std::int64_t m, std::int64_t depth) {
  using Vector = std::remove_cvref_t<decltype(core.vectors()[0])>;
  const std::int64_t n = g.b.cols, k = g.b.rows;
  const auto lanes = static_cast<std::int64_t>(core.vectors().size());
  const std::int64_t lane_rows = CeilDiv(m, lanes);
  const int stages = static_cast<int>(depth) + 1;
  Ring<Buffer::kL1, T> a_l1(core, "a_l1", m, k, 2, Role::kA);
  Ring<Buffer::kL1, T> b_l1(core, "b_l1", k, n, 1, Role::kB);
  Ring<Buffer::kL0A, T> a_l0(core, "a_l0", m, k, 2, Role::kA);
  Ring<Buffer::kL0B, T> b_l0(core, "b_l0", k, n, 1, Role::kB);
  Ring<Buffer::kL0C, float> c_l0(core, "c_l0", m, n, stages);
  Ring<Buffer::kBT, float> bias_bt(core, "bias_bt", 1, n, 1);
  struct Lane {
    Lane(Vector& vector, std::int64_t rows, std::int64_t cols)
        : core(vector), c_ub(vector, "c_ub", rows, cols, 2), d_ub(vector, "d_ub", rows, cols, 1) {}
    Vector& core;
    Ring<Buffer::kUB, float> c_ub, d_ub;
  };
  std::vector<Lane> lane;
  for (auto& vector : core.vectors()) lane.emplace_back(vector, lane_rows, n);

  const L1Tile<T> b1 = b_l1.Next(k, n);
  const L0BTile<T> b0 = b_l0.Next(k, n);
  core.Load(b1, g.b);
  core.Load(b0, b1);
  const BtTile<float> bias = bias_bt.Next(1, n);
  if (g.bias != nullptr) core.Load(bias, MatrixOf(*g.bias));

  struct Step {
    Range rows;
    L0CTile<float> acc;
  };
  const Split blocks(g.c.rows, m);
  std::int64_t block = core.index();
  const auto next = [&](Step& step) {
    if (block >= blocks.count()) return false;
    step.rows = blocks[block];
    block += core.count();
    return true;
  };
  const auto multiply = [&](Step& step) {
    const L1Tile<T> a1 = a_l1.Next(step.rows.size(), k);
    const L0ATile<T> a0 = a_l0.Next(step.rows.size(), k);
    core.Load(a1, g.a.Rows(step.rows));
    core.Load(a0, a1);
    step.acc = c_l0.Next(step.rows.size(), n);
    if (g.bias != nullptr) {
      core.Mmad(step.acc, a0, b0, bias);
    } else {
      core.Mmad(step.acc, a0, b0, Accumulate::kNo);
    }
  };
  const auto add = [&](Step& step) {
    for (std::size_t i = 0; i < lane.size(); ++i) {
      const auto first = static_cast<std::int64_t>(i) * lane_rows;
      const Range rows{std::min(first, step.rows.size()), std::min(first + lane_rows, step.rows.size())};
      if (rows.empty()) continue;
      const Range in_gm{step.rows.begin + rows.begin, step.rows.begin + rows.end};
      const UbTile<float> c = lane[i].c_ub.Next(rows.size(), n), d = lane[i].d_ub.Next(rows.size(), n);
      lane[i].core.Move(c, step.acc.Rows(rows));
      if (g.d != nullptr) {
        lane[i].core.Load(d, MatrixOf(*g.d).Rows(in_gm));
        lane[i].core.Add(c, c, d);
      }
      lane[i].core.Store(g.c.Rows(in_gm), c);
    }
  };
  Pipeline<Step>(depth, next, multiply, add);
}

// out(i) = i-th row of x times 1 + the number of ids equal to i, for the rows of this core.
template <VectorCore V>
void ScaleRowsKernel(V& core, const Gm& x, const Gm& ids, const Gm& out) {
  Ring<Buffer::kUB, std::int32_t> ids_ub(core, "ids_ub", 1, ids.cols, 1),
      counts_ub(core, "counts_ub", 1, 1, 1);
  Ring<Buffer::kUB, float> rows_ub(core, "rows_ub", 1, x.cols, 2);
  const auto all = ids_ub.Next(1, ids.cols);
  core.Load(all, ids);
  for (std::int64_t i = core.index(); i < x.rows; i += core.count()) {
    const auto count = counts_ub.Next(1, 1);
    core.Fill(count, 1);
    core.Histogram(count, all, {.first = static_cast<std::int32_t>(i)});
    const auto row = rows_ub.Next(1, x.cols);
    core.Load(row, x.Rows({i, i + 1}));
    core.MulScalar(row, row, static_cast<float>(core.ReadScalar(count, 0)));
    core.Store(out.Rows({i, i + 1}), row);
  }
}

// Row i of `to` = row i of `from`, for the rows of this core, plus `plus`.
template <VectorCore V>
void AddToRowsKernel(V& core, const Gm& from, const Gm& to, float plus, std::int64_t shift) {
  Ring<Buffer::kUB, float> rows_ub(core, "rows_ub", 1, from.cols, 2),
      plus_ub(core, "plus_ub", 1, from.cols, 1);
  const auto constant = plus_ub.Next(1, from.cols);
  core.Fill(constant, plus);
  for (std::int64_t i = core.index(); i < from.rows; i += core.count()) {
    const std::int64_t source = (i + shift) % from.rows;
    const auto row = rows_ub.Next(1, from.cols);
    core.Load(row, from.Rows({source, source + 1}));
    core.Add(row, row, constant);
    core.Store(to.Rows({i, i + 1}), row);
  }
}

// ---- Launching them

Status RunMatmulAdd(const Device& device, const ConstTensor& a, const ConstTensor& b, const ConstTensor& bias,
                    const ConstTensor& d, const Tensor& c, std::int64_t depth, Profile* profile = nullptr) {
  Launch launch(device, "matmul_add");
  MatmulAddOperands g;
  g.a = MatrixOf(*launch.Input("a", a)), g.b = MatrixOf(*launch.Input("b", b));
  g.bias = launch.Input("bias", bias), g.d = launch.Input("d", d);
  g.c = MatrixOf(*launch.Output("c", c));
  constexpr std::int64_t kM = 16;
  launch.OnAiCores(CeilDiv(g.c.rows, kM), [&](auto& core) {
    if (a.dtype == DType::kBF16) {
      MatmulAddKernel<BF16>(core, g, kM, depth);
    } else {
      MatmulAddKernel<float>(core, g, kM, depth);
    }
  });
  return launch.Finish(profile);
}

// As many threads as a case asks for, on any machine.
class LaunchTest : public ::testing::Test {
 private:
  tbb::global_control threads_{tbb::global_control::max_allowed_parallelism, 8};
};

std::vector<Device> Devices() {
  return {Host({.threads = 1}), Host({.threads = 3}), Host(), Npu(Ascend910B1()), Npu(Ascend910B4())};
}

struct MatmulAddData {
  MatmulAddData(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k)
      : a(dtype, {m, k}), b(dtype, {k, n}), bias(DType::kF32, {n}), d(DType::kF32, {m, n}) {
    a.FillIntegers(random), b.FillIntegers(random), bias.FillIntegers(random), d.FillIntegers(random);
  }
  Values Expected(bool with_bias, bool with_d) const {
    Values c;
    for (std::int64_t i = 0; i < a.size(0); ++i) {
      for (std::int64_t j = 0; j < b.size(1); ++j) {
        double sum = (with_bias ? bias.at({j}) : 0) + (with_d ? d.at({i, j}) : 0);
        for (std::int64_t p = 0; p < a.size(1); ++p) sum += a.at({i, p}) * b.at({p, j});
        c.push_back(sum);
      }
    }
    return c;
  }
  Random random;
  Matrix a, b, bias, d;
};

TEST_F(LaunchTest, AUsersKernelRunsOnBothExecutors) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (std::int64_t m : {1, 16, 100}) {
      const MatmulAddData data(dtype, m, 33, 21);
      const Values expected = data.Expected(true, true);
      for (const Device& device : Devices()) {
        for (std::int64_t depth : {0, 1}) {
          Matrix c(DType::kF32, {m, 33});
          ASSERT_TRUE(RunMatmulAdd(device, data.a.view(), data.b.view(), data.bias.view(), data.d.view(),
                                   c.view(), depth)
                          .ok());
          ExpectExactly(c.view(), expected);
          ExpectGuards(c);
        }
      }
    }
  }
}

TEST_F(LaunchTest, AUsersKernelRunsOnEverySimdTarget) {
  const MatmulAddData data(DType::kBF16, 40, 33, 21);
  testing::ForEachSimdTarget([&] {
    for (const Device& device : {Host({.threads = 1}), Npu(Ascend910B2())}) {
      Matrix c(DType::kF32, {40, 33});
      ASSERT_TRUE(
          RunMatmulAdd(device, data.a.view(), data.b.view(), data.bias.view(), data.d.view(), c.view(), 1)
              .ok());
      ExpectExactly(c.view(), data.Expected(true, true));
    }
  });
}

TEST_F(LaunchTest, TensorsThatAreNotGivenAreNull) {
  const MatmulAddData data(DType::kF32, 40, 20, 8);
  for (const Device& device : Devices()) {
    Launch launch(device, "x");
    EXPECT_EQ(launch.Input("none", {}), nullptr);
    EXPECT_EQ(launch.Output("none", {}), nullptr);
    for (int given = 0; given < 4; ++given) {
      const bool bias = (given & 1) != 0, d = (given & 2) != 0;
      Matrix c(DType::kF32, {40, 20});
      ASSERT_TRUE(RunMatmulAdd(device, data.a.view(), data.b.view(), bias ? data.bias.view() : ConstTensor(),
                               d ? data.d.view() : ConstTensor(), c.view(), 0)
                      .ok());
      ExpectExactly(c.view(), data.Expected(bias, d));
    }
  }
}

TEST_F(LaunchTest, ATensorIsSeenWithItsSizesAndStrides) {
  for (const Device& device : {Host(), Npu(Ascend910B1())}) {
    Launch launch(device, "x");
    Matrix matrix(DType::kBF16, {2, 3, 5, 7}, testing::kBsnd), vector(DType::kF32, {9}, {.step = 2});
    const GmTensor& t = *launch.Output("matrix", matrix.view());
    const GmTensor& v = *launch.Input("vector", vector.view());
    EXPECT_EQ(t.sizes, (BatchIndex{2, 3, 5, 7}));
    const Tensor view = matrix.view();
    EXPECT_EQ(t.strides, (BatchIndex{view.stride(0), view.stride(1), view.stride(2), view.stride(3)}));
    EXPECT_EQ(t.data, matrix.view().data);
    EXPECT_EQ(MatrixOf(t, 1, 2).data(), t.data + 2 * (matrix.view().stride(0) + 2 * matrix.view().stride(1)));
    EXPECT_EQ(v.sizes, (BatchIndex{1, 1, 1, 9}));
    EXPECT_EQ(v.strides[3], 2);
    EXPECT_EQ(v.bytes, (8 * 2 + 1) * 4);
    EXPECT_TRUE(t.writable);
    EXPECT_FALSE(v.writable);
    EXPECT_STREQ(v.name, "vector");
    EXPECT_EQ(t.index, 0);
    EXPECT_EQ(v.index, 1);
    EXPECT_GE(v.address, t.address + static_cast<std::uint64_t>(t.bytes));  // Apart from each other.
  }
}

// Each phase reads what other cores wrote in the one before.
TEST_F(LaunchTest, PhasesRunOneAfterTheOther) {
  constexpr std::int64_t kRows = 61, kCols = 19, kPhases = 6;
  for (const Device& device : Devices()) {
    Random random;
    Matrix in(DType::kF32, {kRows, kCols}), out(DType::kF32, {kRows, kCols});
    in.FillIntegers(random);
    Launch launch(device, "phases");
    const Gm source = MatrixOf(*launch.Input("in", in.view())),
             target = MatrixOf(*launch.Output("out", out.view()));
    const Gm even = MatrixOf(*launch.Workspace("even", DType::kF32, {kRows, kCols})),
             odd = MatrixOf(*launch.Workspace("odd", DType::kF32, {kRows, kCols}));
    for (std::int64_t phase = 0; phase < kPhases; ++phase) {
      const Gm& from = phase == 0 ? source : phase % 2 == 0 ? odd : even;
      const Gm& to = phase == kPhases - 1 ? target : phase % 2 == 0 ? even : odd;
      const auto kernel = [&](auto& core) { AddToRowsKernel(core, from, to, 1, 7); };
      if (phase % 3 == 2) {  // AI cores and Vector cores take turns.
        launch.OnAiCores(kRows, [&](auto& core) { kernel(core.vectors()[0]); });
      } else {
        launch.OnVectorCores(kRows, kernel);
      }
    }
    ASSERT_TRUE(launch.Finish(nullptr).ok());
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kCols; ++j) {
        ASSERT_EQ(out.at({i, j}), in.at({(i + 7 * kPhases) % kRows, j}) + kPhases);
      }
    }
  }
}

TEST_F(LaunchTest, NoCoreOfAPhaseStartsBeforeTheLastOneOfThePhaseBefore) {
  for (int threads : {1, 2, 3, 7}) {
    const Device device = Host({.threads = threads});
    Launch launch(device, "order");
    std::array<std::atomic<int>, 4> finished{};
    std::atomic<int> early = 0;
    for (std::size_t phase = 0; phase < finished.size(); ++phase) {
      launch.OnVectorCores(50, [&](auto&) {
        if (phase > 0 && finished[phase - 1] != 50) ++early;
        ++finished[phase];
      });
    }
    ASSERT_TRUE(launch.Finish(nullptr).ok());
    EXPECT_EQ(early, 0) << threads << " threads";
    EXPECT_EQ(finished.back(), 50) << threads << " threads";
  }
}

TEST_F(LaunchTest, EveryCoreRunsOnce) {
  const auto check = [](const Device& device, bool vector_only, std::int64_t asked, int expected) {
    SCOPED_TRACE(device.chip().name + ", " + std::to_string(device.threads()) + " threads, " +
                 std::to_string(asked) + " cores");
    std::vector<std::atomic<int>> runs(256);
    std::atomic<int> wrong_counts = 0;
    const auto kernel = [&](auto& core) {
      ++runs[static_cast<std::size_t>(core.index())];
      if (core.count() != expected) ++wrong_counts;
    };
    Launch launch(device, "count");
    vector_only ? launch.OnVectorCores(asked, kernel) : launch.OnAiCores(asked, kernel);
    ASSERT_TRUE(launch.Finish(nullptr).ok());
    for (std::size_t i = 0; i < runs.size(); ++i) {
      EXPECT_EQ(runs[i], static_cast<int>(i) < expected ? 1 : 0) << "core " << i;
    }
    EXPECT_EQ(wrong_counts, 0);
  };
  const int host = HostChip().cube_cores;
  for (int threads : {0, 1, 2, 3, 7}) {
    for (bool vector_only : {false, true}) {
      check(Host({.threads = threads}), vector_only, 0, 0);
      check(Host({.threads = threads}), vector_only, 1, 1);
      check(Host({.threads = threads}), vector_only, 5, 5);
      check(Host({.threads = threads}), vector_only, host, host);
      check(Host({.threads = threads}), vector_only, std::int64_t{1} << 40, host);  // Cut to what there is.
    }
  }
  for (const auto& [chip, cubes] : {std::pair(&Ascend910B1(), 24), std::pair(&Ascend910B4(), 20)}) {
    for (bool with_data : {true, false}) {
      const Device npu = Npu(*chip, {.with_data = with_data});
      check(npu, false, -1, 0);
      check(npu, false, 3, 3);
      check(npu, false, 1000, cubes);
      check(npu, true, 1000, 2 * cubes);
    }
  }
}

// ---- Workspaces

TEST_F(LaunchTest, WorkspacesAreApartAndCounted) {
  for (const Device& device : {Host(), Npu(Ascend910B1())}) {
    Launch launch(device, "workspace");
    const GmTensor& a = *launch.Workspace("a", DType::kF32, {3, 100});
    const GmTensor& b = *launch.Workspace("b", DType::kI32, {1000});
    const GmTensor& none = *launch.Workspace("none", DType::kF32, {0, 8});
    EXPECT_EQ(a.bytes, 1200);
    EXPECT_EQ(b.bytes, 4000);
    EXPECT_EQ(none.bytes, 0);
    EXPECT_TRUE(a.data + a.bytes <= b.data || b.data + b.bytes <= a.data);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 64, 0u);
    std::memset(a.data, 1, static_cast<std::size_t>(a.bytes));  // All of it is there.
    std::memset(b.data, 2, static_cast<std::size_t>(b.bytes));
    EXPECT_EQ(a.data[a.bytes - 1], std::byte{1});
    Profile profile;
    ASSERT_TRUE(launch.Finish(&profile).ok());
    EXPECT_EQ(profile.workspace_bytes, device.kind() == Device::Kind::kNpu ? 5200 : 0);
  }
}

TEST_F(LaunchTest, LaunchesSideBySideShareNoWorkspace) {
  const Device device = Host();
  Launch first(device, "first"), second(device, "second");
  std::set<const std::byte*> seen;
  for (Launch* launch : {&first, &second}) {
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(seen.insert(launch->Workspace("w", DType::kF32, {100})->data).second);
    }
  }
}

TEST_F(LaunchTest, AWorkspaceBeyondMemoryIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program where operator new would throw";
#endif
  const Device device = Host();
  Launch launch(device, "huge");
  launch.Workspace("too_much", DType::kF32, {std::int64_t{1} << 55});
  bool ran = false;
  launch.OnAiCores(1, [&](auto&) { ran = true; });
  const Status status = launch.Finish(nullptr);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(status.message().find("144115188075855872 bytes"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("too_much"), std::string::npos) << status.message();
  EXPECT_FALSE(ran);
}

TEST_F(LaunchTest, PackedOperandsHaveRoomOnTheirChip) {
  for (const Device& device : {Host(), Npu(Ascend910B1())}) {
    for (Role role : {Role::kA, Role::kB}) {
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        Launch launch(device, "packed");
        const PackedGm packed = launch.Packed("p", role, dtype, 37, 75, 3);
        EXPECT_EQ(packed.rows, 37);
        EXPECT_EQ(packed.col_part, (Range{0, 75}));
        EXPECT_EQ(packed.role, role);
        const std::int64_t bytes = std::max(device.chip().PackedBytes(role, dtype, 37, 75),
                                            HostChip().PackedBytes(role, dtype, 37, 75));
        EXPECT_GE(packed.Matrix(1).byte_offset, bytes);
        EXPECT_EQ(packed.Matrix(2).byte_offset, 2 * packed.Matrix(1).byte_offset);
        EXPECT_GE(packed.tensor->bytes, packed.Matrix(2).byte_offset + bytes);
        EXPECT_EQ(packed.Matrix(1).byte_offset % 64, 0);
      }
    }
  }
}

// ---- Without data

TEST_F(LaunchTest, WithoutDataNothingFloatIsTouchedAndTheRecordIsTheSame) {
  const MatmulAddData data(DType::kBF16, 100, 33, 21);
  Matrix c(DType::kF32, {100, 33});
  const Matrix untouched = c;
  Profile with, without;
  const Device npu = Npu(Ascend910B1()), dry = Npu(Ascend910B1(), {.with_data = false});
  // Float tensors may have null data.
  const auto null = [](const Matrix& m) {
    ConstTensor view = m.view();
    view.data = nullptr;
    return view;
  };
  ASSERT_TRUE(
      RunMatmulAdd(dry, null(data.a), null(data.b), null(data.bias), null(data.d), c.view(), 1, &without)
          .ok());
  testing::ExpectSameBits(c.view(), untouched.view());
  ASSERT_TRUE(
      RunMatmulAdd(npu, data.a.view(), data.b.view(), data.bias.view(), data.d.view(), c.view(), 1, &with)
          .ok());
  ExpectExactly(c.view(), data.Expected(true, true));
  EXPECT_EQ(with.instructions, without.instructions);
  EXPECT_EQ(with.time_s, without.time_s);
  EXPECT_EQ(with.path_bytes, without.path_bytes);
  EXPECT_GT(with.time_s, 0);
  EXPECT_EQ(with.macs, 100 * 33 * 21);
  EXPECT_EQ(with.kernel, "matmul_add");
  EXPECT_EQ(with.chip, "ascend910b1");
  EXPECT_EQ(with.cores_used, 7);
}

TEST_F(LaunchTest, WithoutDataIndexTensorsSteer) {
  Matrix ids(DType::kI32, {1, 12}), x(DType::kF32, {5, 8}), out(DType::kF32, {5, 8});
  Random random;
  ids.FillIntegers(random, 0, 4), x.FillIntegers(random);
  std::int64_t instructions[2];
  for (bool with_data : {true, false}) {
    const Device npu = Npu(Ascend910B1(), {.with_data = with_data});
    Launch launch(npu, "scale");
    const Gm gx = MatrixOf(*launch.Input("x", x.view())), gi = MatrixOf(*launch.Input("ids", ids.view()));
    const Gm go = MatrixOf(*launch.Output("out", out.view()));
    std::vector<std::int64_t> counts(5);
    launch.OnVectorCores(5, [&](auto& core) {
      ScaleRowsKernel(core, gx, gi, go);
      Ring<Buffer::kUB, std::int32_t> ring(core, "ids", 1, 12, 1);
      const auto all = ring.Next(1, 12);
      core.Load(all, gi);
      for (std::int64_t j = 0; j < 12; ++j) {
        counts[static_cast<std::size_t>(core.index())] += core.ReadScalar(all, j) == core.index() ? 1 : 0;
      }
    });
    Profile profile;
    ASSERT_TRUE(launch.Finish(&profile).ok());
    instructions[with_data ? 0 : 1] = profile.instructions;
    for (std::int64_t i = 0; i < 5; ++i) {
      std::int64_t count = 0;
      for (std::int64_t j = 0; j < 12; ++j) count += ids.at({0, j}) == static_cast<double>(i) ? 1 : 0;
      EXPECT_EQ(counts[static_cast<std::size_t>(i)], count);
      for (std::int64_t j = 0; with_data && j < 8; ++j) {
        EXPECT_EQ(out.at({i, j}), x.at({i, j}) * static_cast<double>(1 + count));
      }
    }
  }
  EXPECT_EQ(instructions[0], instructions[1]);
}

TEST_F(LaunchTest, TheProfileIsLeftAloneOnTheHost) {
  const MatmulAddData data(DType::kF32, 20, 10, 8);
  Matrix c(DType::kF32, {20, 10});
  Profile profile;
  profile.kernel = "before";
  ASSERT_TRUE(RunMatmulAdd(Host(), data.a.view(), data.b.view(), {}, {}, c.view(), 0, &profile).ok());
  EXPECT_EQ(profile.kernel, "before");
}

TEST_F(LaunchTest, TheTimelineIsKeptWhenAskedFor) {
  const MatmulAddData data(DType::kF32, 20, 10, 8);
  Matrix c(DType::kF32, {20, 10});
  for (bool timeline : {false, true}) {
    Profile profile;
    ASSERT_TRUE(RunMatmulAdd(Npu(Ascend910B3(), {.timeline = timeline}), data.a.view(), data.b.view(), {}, {},
                             c.view(), 0, &profile)
                    .ok());
    EXPECT_EQ(profile.timeline != nullptr && !profile.timeline->empty(), timeline);
  }
}

// The same bits for any number of threads: random reals, many cores.
TEST_F(LaunchTest, ResultsDoNotDependOnThreads) {
  Random random;
  MatmulAddData data(DType::kF32, 500, 40, 70);
  data.a.FillNormal(random), data.b.FillNormal(random), data.bias.FillNormal(random),
      data.d.FillNormal(random);
  Matrix one(DType::kF32, {500, 40});
  ASSERT_TRUE(RunMatmulAdd(Host({.threads = 1}), data.a.view(), data.b.view(), data.bias.view(),
                           data.d.view(), one.view(), 1)
                  .ok());
  for (int threads : {2, 3, 7, 0}) {
    Matrix c(DType::kF32, {500, 40});
    ASSERT_TRUE(RunMatmulAdd(Host({.threads = threads}), data.a.view(), data.b.view(), data.bias.view(),
                             data.d.view(), c.view(), 1)
                    .ok());
    testing::ExpectSameBits(c.view(), one.view());
  }
}

// A kernel that is told nothing of pipelines, on every chip of the table.
TEST_F(LaunchTest, EveryChipIsADevice) {
  const MatmulAddData data(DType::kBF16, 70, 16, 32);
  for (const std::string& name : ChipNames()) {
    ChipSpec chip;
    ASSERT_TRUE(FindChip(name, &chip).ok());
    Matrix c(DType::kF32, {70, 16});
    Profile profile;
    ASSERT_TRUE(
        RunMatmulAdd(Npu(chip), data.a.view(), data.b.view(), data.bias.view(), {}, c.view(), 1, &profile)
            .ok());
    ExpectExactly(c.view(), data.Expected(true, false));
    EXPECT_EQ(profile.chip, name);
  }
}

}  // namespace
}  // namespace cubist
