// Shapes that hit every edge: empty, one, primes, one below, at and above every multiple that a tiling or a
// register tile is likely to use, long and thin.
#ifndef CUBIST_TESTS_SUPPORT_SHAPES_H_
#define CUBIST_TESTS_SUPPORT_SHAPES_H_

#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace cubist::testing {

// Sizes of one dimension, ascending, up to 257.
inline std::vector<std::int64_t> EdgeSizes() {
  return {0,  1,  2,  3,  5,  7,  8,  11, 12,  13,  15,  16,  17,  23,  24,  25,  31, 32,
          33, 47, 48, 49, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257};
}

template <class... Parts>
std::string Join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

struct MatmulShape {
  std::int64_t m, n, k;
  std::string Name() const { return Join(m, "x", n, "x", k); }
};

// Each dimension walks the edges while the others stay odd and small; then combinations that cross several
// tiles.
inline std::vector<MatmulShape> MatmulShapes() {
  std::vector<MatmulShape> shapes;
  for (std::int64_t edge : EdgeSizes()) {
    shapes.push_back({edge, 19, 13});
    shapes.push_back({7, edge, 21});
    shapes.push_back({5, 35, edge});
  }
  shapes.insert(shapes.end(),
                {{0, 0, 0},       {1, 1, 1},      {1, 1, 1025},   {1, 1031, 1},    {1031, 1, 1},
                 {1, 517, 259},   {517, 1, 259},  {2, 3, 4099},   {4099, 3, 2},    {3, 4099, 2},
                 {64, 64, 64},    {65, 63, 66},   {127, 129, 65}, {128, 128, 128}, {129, 257, 300},
                 {255, 253, 251}, {256, 256, 64}, {257, 383, 97}, {383, 129, 513}, {97, 521, 131}});
  return shapes;
}

struct AttentionShape {
  std::int64_t batch, q_heads, kv_heads, sq, skv, dqk, dr, dv;
  std::string Name() const {
    return Join("b", batch, "_n", q_heads, "x", kv_heads, "_s", sq, "x", skv, "_d", dqk, "p", dr, "x", dv);
  }
};

// Lengths walk the edges (longer queries than keys as well), then head dims do, then groups and the models'
// own dims.
inline std::vector<AttentionShape> AttentionShapes() {
  std::vector<AttentionShape> shapes;
  for (std::int64_t edge : EdgeSizes()) {
    shapes.push_back({1, 1, 1, edge, 37, 16, 0, 24});
    shapes.push_back({1, 1, 1, 11, edge, 24, 0, 16});
  }
  for (std::int64_t edge : {1, 3, 15, 16, 17, 31, 33, 63, 65, 96, 127, 129, 177, 192, 257}) {
    shapes.push_back({1, 1, 1, 9, 21, edge, 0, 13});
    shapes.push_back({1, 1, 1, 9, 21, 13, 0, edge});
    shapes.push_back({1, 2, 1, 7, 18, 13, edge, 11});
  }
  shapes.insert(shapes.end(), {{0, 1, 1, 4, 4, 8, 0, 8},
                               {1, 0, 1, 4, 4, 8, 0, 8},
                               {2, 3, 1, 17, 31, 20, 0, 12},
                               {3, 4, 2, 33, 29, 24, 8, 16},
                               {2, 6, 3, 65, 63, 32, 0, 32},
                               {1, 4, 4, 130, 131, 64, 0, 64},
                               {1, 2, 1, 257, 259, 128, 64, 128},
                               {1, 2, 2, 129, 300, 192, 0, 128},
                               {1, 1, 1, 1, 1030, 64, 0, 64},
                               {1, 1, 1, 1030, 1, 64, 0, 64},
                               {2, 8, 1, 1, 513, 40, 24, 72}});
  return shapes;
}

struct PermuteShape {
  std::int64_t tokens, topk, experts, hidden;
  std::string Name() const { return Join("t", tokens, "_k", topk, "_e", experts, "_h", hidden); }
};

inline std::vector<PermuteShape> PermuteShapes() {
  std::vector<PermuteShape> shapes;
  for (std::int64_t edge : EdgeSizes()) {
    shapes.push_back({edge, 2, 5, 9});
    shapes.push_back({13, 3, 7, edge});
  }
  for (std::int64_t edge : {1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257}) {
    shapes.push_back({29, 2, edge, 5});
    shapes.push_back({5, edge, 11, 3});
  }
  shapes.insert(shapes.end(), {{0, 0, 0, 0},
                               {4, 0, 3, 5},
                               {3, 2, 4, 0},
                               {1, 1, 1, 1},
                               {1, 8, 256, 7168},
                               {1021, 8, 64, 3},
                               {4099, 1, 16, 2},
                               {300, 8, 256, 129},
                               {3, 2, 2, 20011}});
  return shapes;
}

// GoogleTest names a parameter by this.
template <class Shape>
requires requires(const Shape& shape) { shape.Name(); }
std::ostream& operator<<(std::ostream& out, const Shape& shape) { return out << shape.Name(); }

// For INSTANTIATE_TEST_SUITE_P: cases are named by their shapes.
struct ShapeName {
  template <class ParamInfo>
  std::string operator()(const ParamInfo& info) const {
    return info.param.Name();
  }
};

}  // namespace cubist::testing

#endif  // CUBIST_TESTS_SUPPORT_SHAPES_H_
