// What compiles and what does not. Each rule is asked of both executors: they share the typed front, so
// neither may take an instruction that the other refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include "npu_model/core.h"
#include "npu_model/host/host_core.h"
#include "npu_model/trace/trace_core.h"

namespace cubist {
namespace {

template <class C, class... Args>
concept Loads = requires(C& core, Args... args) {
  core.Load(args...);
};
template <class C, class... Args>
concept Stores = requires(C& core, Args... args) {
  core.Store(args...);
};
template <class C, class... Args>
concept Mmads = requires(C& core, Args... args) {
  core.Mmad(args...);
};
template <class C, class... Args>
concept Fills = requires(C& core, Args... args) {
  core.Fill(args...);
};
template <class C, class... Args>
concept Casts = requires(C& core, Args... args) {
  core.Cast(args...);
};
template <class C, class... Args>
concept Adds = requires(C& core, Args... args) {
  core.Add(args...);
};
template <class C, class... Args>
concept Exps = requires(C& core, Args... args) {
  core.Exp(args...);
};
template <class C, class... Args>
concept RowSums = requires(C& core, Args... args) {
  core.RowSum(args...);
};
template <class C, class... Args>
concept Masks = requires(C& core, Args... args) {
  core.MaskOutside(args...);
};
template <class C, class... Args>
concept Transposes = requires(C& core, Args... args) {
  core.Transpose(args...);
};
template <class C, class... Args>
concept Unzips = requires(C& core, Args... args) {
  core.Unzip(args...);
};
template <class C, class... Args>
concept Zips = requires(C& core, Args... args) {
  core.Zip(args...);
};
template <class C, class... Args>
concept ReadsScalars = requires(C& core, Args... args) {
  core.ReadScalar(args...);
};
template <class C, class... Args>
concept Spends = requires(C& core, Args... args) {
  core.Spend(args...);
};
template <class C, class... Args>
concept SoftmaxSteps = requires(C& core, Args... args) {
  core.SoftmaxStep(args...);
};
template <class C, class... Args>
concept AttentionGradSteps = requires(C& core, Args... args) {
  core.AttentionGradStep(args...);
};
template <class C, class... Args>
concept WeightedSums = requires(C& core, Args... args) {
  core.WeightedSum(args...);
};
template <class C, class... Args>
concept StoresEach = requires(C& core, Args... args) {
  core.StoreEach(args...);
};
template <class C, class... Args>
concept Ranks = requires(C& core, Args... args) {
  core.Rank(args...);
};
template <class C, class... Args>
concept Sends = requires(C& core, Args... args) {
  core.Send(args...);
};
template <class C, class... Args>
concept Receives = requires(C& core, Args... args) {
  core.Receive(args...);
};
template <class C, class... Args>
concept Moves = requires(C& core, Args... args) {
  core.Move(args...);
};
// The executors' untyped methods, which know no buffers.
template <class V, class Tile>
concept ExpsUntyped = requires(V& core, Tile tile) {
  core.Unary(UnaryOp::kExp, tile, tile);
};
template <class V, class Tile>
concept StoresUntyped = requires(V& core, Gm gm, Tile tile) {
  core.StoreUb(gm, tile);
};
template <class C, class Tile>
concept LoadsUntyped = requires(C& core, Gm gm, Tile tile) {
  core.LoadL1(tile, gm);
};

struct Rule {
  const char* instruction;
  bool compiles;
};

using Ub = UbTile<float>;
using Ids = UbTile<std::int32_t>;
using WideIds = UbTile<std::int64_t>;
using Acc = L0CTile<float>;

template <class C>
constexpr Rule kLegalOnCube[] = {
    {"Load(L1, Gm)", Loads<C, L1Tile<BF16>, Gm>},
    {"Load(L1, PackedGm)", Loads<C, L1Tile<F16>, PackedGm>},
    {"Store(PackedGm, L1)", Stores<C, PackedGm, L1Tile<float>>},
    {"Load(L0A, L1)", Loads<C, L0ATile<BF16>, L1Tile<BF16>>},
    {"Load(L0B, L1)", Loads<C, L0BTile<F16>, L1Tile<F16>>},
    {"Load(BT, Gm)", Loads<C, BtTile<float>, Gm>},
    {"Mmad fp32", Mmads<C, Acc, L0ATile<float>, L0BTile<float>, Accumulate>},
    {"Mmad bf16", Mmads<C, Acc, L0ATile<BF16>, L0BTile<BF16>, Accumulate>},
    {"Mmad fp16 with bias", Mmads<C, Acc, L0ATile<F16>, L0BTile<F16>, BtTile<float>>},
    {"Store(Gm, L0C)", Stores<C, Gm, Acc>},
    {"Store(Gm, L0C) that adds", Stores<C, Gm, Acc, Accumulate>},
    {"ReadScalar(Gm)", ReadsScalars<C, Gm, std::int64_t>},
    {"Spend", Spends<C, std::int64_t>},
};

template <class C>
constexpr Rule kIllegalOnCube[] = {
    {"Mmad with b and a exchanged", Mmads<C, Acc, L0BTile<BF16>, L0ATile<BF16>, Accumulate>},
    {"Mmad of two left operands", Mmads<C, Acc, L0ATile<BF16>, L0ATile<BF16>, Accumulate>},
    {"Mmad of L1 tiles", Mmads<C, Acc, L1Tile<BF16>, L1Tile<BF16>, Accumulate>},
    {"Mmad of unlike types", Mmads<C, Acc, L0ATile<BF16>, L0BTile<F16>, Accumulate>},
    {"Mmad into UB", Mmads<C, Ub, L0ATile<BF16>, L0BTile<BF16>, Accumulate>},
    {"Mmad into a 16-bit accumulator", Mmads<C, L0CTile<BF16>, L0ATile<BF16>, L0BTile<BF16>, Accumulate>},
    {"Mmad with a bias in UB", Mmads<C, Acc, L0ATile<BF16>, L0BTile<BF16>, Ub>},
    {"Load(L0A, Gm)", Loads<C, L0ATile<BF16>, Gm>},
    {"Load(L0B, Gm)", Loads<C, L0BTile<BF16>, Gm>},
    {"Load(L0C, Gm)", Loads<C, Acc, Gm>},
    {"Load(L0A, PackedGm)", Loads<C, L0ATile<BF16>, PackedGm>},
    {"Load(L0A, L1) of another type", Loads<C, L0ATile<BF16>, L1Tile<F16>>},
    {"Load(L0B, L1) of another type", Loads<C, L0BTile<float>, L1Tile<BF16>>},
    {"Load(L0C, L1)", Loads<C, Acc, L1Tile<float>>},
    {"Load(BT, L1)", Loads<C, BtTile<float>, L1Tile<float>>},
    {"Load(L1, L0A)", Loads<C, L1Tile<BF16>, L0ATile<BF16>>},
    {"Load(UB, Gm) on a Cube core", Loads<C, Ub, Gm>},
    {"Store(Gm, L1)", Stores<C, Gm, L1Tile<BF16>>},
    {"Store(Gm, L0A)", Stores<C, Gm, L0ATile<BF16>>},
    {"Store(PackedGm, L0C)", Stores<C, PackedGm, Acc>},
    {"Store(Gm, UB) on a Cube core", Stores<C, Gm, Ub>},
    {"Fill(L0C)", Fills<C, Acc, float>},
    {"Add on a Cube core", Adds<C, Ub, Ub, Ub>},
    {"Exp(L0C) on a Cube core", Exps<C, Acc, Acc>},
    {"ReadScalar(L1)", ReadsScalars<C, L1Tile<std::int32_t>, std::int64_t>},
    {"Move(L1, L0C)", Moves<C, L1Tile<float>, Acc>},
    {"Move(UB, L0C) by the Cube core", Moves<C, Ub, Acc>},
    {"Send(UB, L0C)", Sends<C, Ub, Acc>},
    {"Send(hand-over, L1)", Sends<C, HandOverTile<float>, L1Tile<float>>},
};

template <class V>
constexpr Rule kLegalOnVector[] = {
    {"Load(UB, Gm)", Loads<V, UbTile<BF16>, Gm>},
    {"Load(UB of int64, Gm)", Loads<V, WideIds, Gm>},
    {"Store(Gm, UB)", Stores<V, Gm, Ub>},
    {"Fill", Fills<V, Ub, float>},
    {"Fill int32", Fills<V, Ids, int>},
    {"Cast to bf16", Casts<V, UbTile<BF16>, Ub>},
    {"Cast from fp16", Casts<V, Ub, UbTile<F16>>},
    {"Cast int64 to int32", Casts<V, Ids, WideIds>},
    {"Cast booleans to int32", Casts<V, Ids, UbTile<std::uint8_t>>},
    {"Cast booleans to float", Casts<V, Ub, UbTile<std::uint8_t>>},
    {"Add", Adds<V, Ub, Ub, Ub>},
    {"Add int32", Adds<V, Ids, Ids, Ids>},
    {"Exp", Exps<V, Ub, Ub>},
    {"RowSum", RowSums<V, Ub, Ub>},
    {"MaskOutside", Masks<V, Ub, std::int64_t, std::int64_t, float>},
    {"Transpose", Transposes<V, Ub, Ub>},
    {"Unzip", Unzips<V, Ub, Ub, int>},
    {"Unzip 16-bit", Unzips<V, UbTile<F16>, UbTile<F16>, int>},
    {"Zip", Zips<V, Ub, Ub, Ub>},
    {"ReadScalar int32", ReadsScalars<V, Ids, std::int64_t>},
    {"ReadScalar fp32", ReadsScalars<V, Ub, std::int64_t>},
    {"Spend", Spends<V, std::int64_t>},
    {"SoftmaxStep", SoftmaxSteps<V, UbTile<BF16>, Ub, Ub, Ub, Ub, float>},
    {"AttentionGradStep", AttentionGradSteps<V, UbTile<BF16>, UbTile<BF16>, Ub, Ub, Ub, Ub, float>},
    {"StoreEach", StoresEach<V, std::span<const Gm>, UbTile<F16>>},
    {"WeightedSum",
     WeightedSums<V, Ub, Ub, std::span<const UbTile<F16>>, std::span<const float>, Accumulate>},
    {"Rank", Ranks<V, Ids, Ids, Ids, IdBins>},
    {"Move(UB, L0C)", Moves<V, Ub, Acc>},
    {"Receive(UB, hand-over)", Receives<V, Ub, HandOverTile<float>>},
    {"Move(L1, UB)", Moves<V, L1Tile<BF16>, UbTile<BF16>>},
};

template <class V>
constexpr Rule kIllegalOnVector[] = {
    {"Mmad on a Vector core", Mmads<V, Acc, L0ATile<BF16>, L0BTile<BF16>, Accumulate>},
    {"Load(L1, Gm) on a Vector core", Loads<V, L1Tile<BF16>, Gm>},
    {"Load(L1, PackedGm) on a Vector core", Loads<V, L1Tile<BF16>, PackedGm>},
    {"Load(L0A, L1) on a Vector core", Loads<V, L0ATile<BF16>, L1Tile<BF16>>},
    {"Load(BT, Gm) on a Vector core", Loads<V, BtTile<float>, Gm>},
    {"Store(Gm, L0C) on a Vector core", Stores<V, Gm, Acc>},
    {"Store(Gm, L1) on a Vector core", Stores<V, Gm, L1Tile<BF16>>},
    {"Load(UB, L1)", Loads<V, UbTile<BF16>, L1Tile<BF16>>},
    {"Fill(L0C)", Fills<V, Acc, float>},
    {"Fill bf16", Fills<V, UbTile<BF16>, float>},
    {"Cast of an L0C tile", Casts<V, UbTile<BF16>, Acc>},
    {"Add on L0C", Adds<V, Acc, Acc, Acc>},
    {"Add of L0C to UB", Adds<V, Ub, Ub, Acc>},
    {"Add bf16", Adds<V, UbTile<BF16>, UbTile<BF16>, UbTile<BF16>>},
    {"Add of unlike types", Adds<V, Ub, Ub, Ids>},
    {"Add int64", Adds<V, WideIds, WideIds, WideIds>},
    {"Exp(L0C)", Exps<V, Acc, Acc>},
    {"Exp(L1)", Exps<V, L1Tile<float>, L1Tile<float>>},
    {"Exp int32", Exps<V, Ids, Ids>},
    {"RowSum(UB, L0C)", RowSums<V, Ub, Acc>},
    {"MaskOutside(L0C)", Masks<V, Acc, std::int64_t, std::int64_t, float>},
    {"Transpose of L0C", Transposes<V, Ub, Acc>},
    {"Unzip that widens", Unzips<V, Ub, UbTile<BF16>, int>},
    {"Unzip of int64", Unzips<V, WideIds, WideIds, int>},
    {"Zip of 16-bit", Zips<V, UbTile<BF16>, UbTile<BF16>, UbTile<BF16>>},
    {"ReadScalar(L0C)", ReadsScalars<V, Acc, std::int64_t>},
    {"ReadScalar int64", ReadsScalars<V, WideIds, std::int64_t>},
    {"SoftmaxStep on L0C", SoftmaxSteps<V, UbTile<BF16>, Acc, Ub, Ub, Ub, float>},
    {"SoftmaxStep to L1", SoftmaxSteps<V, L1Tile<BF16>, Ub, Ub, Ub, Ub, float>},
    {"AttentionGradStep of two types",
     AttentionGradSteps<V, UbTile<BF16>, UbTile<F16>, Ub, Ub, Ub, Ub, float>},
    {"Rank of floats", Ranks<V, Ids, Ids, Ub, IdBins>},
    {"Move(L1, L0C)", Moves<V, L1Tile<float>, Acc>},
    {"Move(L0C, UB)", Moves<V, Acc, Ub>},
    {"Receive(UB, L0C)", Receives<V, Ub, Acc>},
    {"Move(L1, UB) of another type", Moves<V, L1Tile<BF16>, Ub>},
    {"Move(UB of bf16, L0C)", Moves<V, UbTile<BF16>, Acc>},
    {"Move(UB, UB)", Moves<V, Ub, Ub>},
};

// Element types that the instruction set does not name.
template <class C>
constexpr Rule kIllegalTypesOnCube[] = {
    {"Mmad int32", Mmads<C, Acc, L0ATile<std::int32_t>, L0BTile<std::int32_t>, Accumulate>},
    {"Load(L1 of int64, Gm)", Loads<C, L1Tile<std::int64_t>, Gm>},
};
template <class V>
constexpr Rule kIllegalTypesOnVector[] = {
    {"Cast fp32 to int32", Casts<V, Ids, Ub>},
    {"Cast int32 to booleans", Casts<V, UbTile<std::uint8_t>, Ids>},
    {"Cast booleans to bf16", Casts<V, UbTile<BF16>, UbTile<std::uint8_t>>},
    {"Cast int64 to bf16", Casts<V, UbTile<BF16>, WideIds>},
    {"Cast int32 to int64", Casts<V, WideIds, Ids>},
    {"SoftmaxStep to int32", SoftmaxSteps<V, Ids, Ub, Ub, Ub, Ub, float>},
    {"StoreEach from L1", StoresEach<V, std::span<const Gm>, L1Tile<F16>>},
    {"WeightedSum of int32",
     WeightedSums<V, Ub, Ub, std::span<const Ids>, std::span<const float>, Accumulate>},
};

constexpr bool AllCompile(std::span<const Rule> rules) {
  return std::all_of(rules.begin(), rules.end(), [](const Rule& rule) { return rule.compiles; });
}
constexpr bool NoneCompiles(std::span<const Rule> rules) {
  return std::none_of(rules.begin(), rules.end(), [](const Rule& rule) { return rule.compiles; });
}

template <class AiCoreType>
struct CoresOf {
  using Ai = AiCoreType;
  using Vector = std::remove_cvref_t<decltype(std::declval<Ai&>().vectors()[0])>;

  static_assert(AllCompile(kLegalOnCube<Ai>) && NoneCompiles(kIllegalOnCube<Ai>));
  static_assert(AllCompile(kLegalOnVector<Vector>) && NoneCompiles(kIllegalOnVector<Vector>));
  static_assert(AiCore<Ai> && CubeCore<Ai> && VectorCore<Vector>);
  static_assert(!VectorCore<Ai> && !CubeCore<Vector> && !AiCore<Vector>);
};
static_assert(VectorCore<TraceVectorCore> && !CubeCore<TraceVectorCore> && !AiCore<TraceVectorCore>);
static_assert(NoneCompiles(kIllegalOnVector<TraceVectorCore>));

template <class Ai>
class CoreConceptsTest : public ::testing::Test {};
using Executors = ::testing::Types<HostAiCore, TraceAiCore>;
TYPED_TEST_SUITE(CoreConceptsTest, Executors);

void ExpectCompile(std::span<const Rule> rules) {
  for (const Rule& rule : rules) EXPECT_TRUE(rule.compiles) << rule.instruction;
}
void ExpectNotCompile(std::span<const Rule> rules) {
  for (const Rule& rule : rules) EXPECT_FALSE(rule.compiles) << rule.instruction;
}

TYPED_TEST(CoreConceptsTest, LegalInstructionsCompile) {
  ExpectCompile(kLegalOnCube<typename CoresOf<TypeParam>::Ai>);
  ExpectCompile(kLegalOnVector<typename CoresOf<TypeParam>::Vector>);
}

TYPED_TEST(CoreConceptsTest, IllegalInstructionsDoNotCompile) {
  ExpectNotCompile(kIllegalOnCube<typename CoresOf<TypeParam>::Ai>);
  ExpectNotCompile(kIllegalOnVector<typename CoresOf<TypeParam>::Vector>);
}

TYPED_TEST(CoreConceptsTest, TypesThatNoInstructionNamesDoNotCompile) {
  ExpectNotCompile(kIllegalTypesOnCube<typename CoresOf<TypeParam>::Ai>);
  ExpectNotCompile(kIllegalTypesOnVector<typename CoresOf<TypeParam>::Vector>);
}

TYPED_TEST(CoreConceptsTest, UntypedInstructionsAreOutOfAKernelsReach) {
  using Vector = typename CoresOf<TypeParam>::Vector;
  EXPECT_FALSE((ExpsUntyped<Vector, Acc>));
  EXPECT_FALSE((StoresUntyped<Vector, L1Tile<BF16>>));
  EXPECT_FALSE((LoadsUntyped<TypeParam, Acc>));
}

}  // namespace
}  // namespace cubist
