#include "bench/support/onednn.h"

#include <omp.h>
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/enumerable_thread_specific.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>

#include "bench/support/random_data.h"
#include "npu_model/host/attention_grad_ops.h"
#include "npu_model/host/attention_ops.h"
#include "npu_model/host/tile_ops.h"

namespace cubist::bench {
namespace {

using dnnl::memory;

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// A (rows, cols) matrix that lies row by row, or column by column.
memory::desc Matrix(DType dtype, std::int64_t rows, std::int64_t cols, bool transposed = false) {
  return {{rows, cols}, TypeOf(dtype), transposed ? memory::dims{1, rows} : memory::dims{cols, 1}};
}

// libgomp's workers spin while they wait for the next region. This ends them; the next region starts new
// ones.
void EndWorkers() { omp_pause_resource_all(omp_pause_hard); }

// One product with b as `b_desc` says (format any: as oneDNN prefers).
struct Product {
  dnnl::matmul::primitive_desc desc;
  dnnl::matmul primitive;

  Product(const memory::desc& a, const memory::desc& b, const memory::desc& c,
          const dnnl::primitive_attr& attr = {})
      : desc(dnnl::matmul::desc(a, b, c), attr, Engine()), primitive(desc) {}
};

GemmRun PrepareGemm(const Gemm& gemm, int threads, bool pack) {
  omp_set_num_threads(threads);
  const memory::desc plain_b = Matrix(gemm.input, gemm.k, gemm.n, gemm.transpose_b);
  const memory::desc any_b({gemm.k, gemm.n}, TypeOf(gemm.input), memory::format_tag::any);
  auto product = std::make_shared<Product>(Matrix(gemm.input, gemm.m, gemm.k, gemm.transpose_a),
                                           pack ? any_b : plain_b, Matrix(gemm.output, gemm.m, gemm.n));
  auto stream = std::make_shared<dnnl::stream>(Engine());
  std::vector<std::unordered_map<int, memory>> arguments;
  for (void* data : gemm.b) {
    memory b(plain_b, Engine(), data);
    if (pack) {
      memory packed(product->desc.weights_desc(), Engine());
      dnnl::reorder(b, packed).execute(*stream, b, packed);
      b = packed;
    }
    arguments.push_back({{DNNL_ARG_SRC, memory(product->desc.src_desc(), Engine(), gemm.a)},
                         {DNNL_ARG_WEIGHTS, b},
                         {DNNL_ARG_DST, memory(product->desc.dst_desc(), Engine(), gemm.c)}});
  }
  stream->wait();
  return [product, stream, arguments](std::size_t copy) {
    product->primitive.execute(*stream, arguments[copy]);
    stream->wait();
  };
}

// ---- Attention ----

constexpr std::int64_t kQueryBlock = 256;

dnnl::primitive_attr BlockAttr(bool add) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // Many threads run one primitive.
  if (add) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attr.set_post_ops(sum);
  }
  return attr;
}

// Keys that some of these queries see.
std::int64_t KeysOf(const Attention& x, const Range& rows) { return x.causal ? rows.end : x.s; }

char* Row(const ConstTensor& x, std::int64_t head, std::int64_t row) {
  const std::int64_t offset = head * x.stride(1) + row * x.stride(2);
  return static_cast<char*>(const_cast<void*>(x.data)) + offset * SizeOf(x.dtype);
}

// What a thread multiplies with.
struct Worker {
  void Multiply(const Product& product, void* a, void* b, void* c) {
    const memory::desc scratch_desc = product.desc.scratchpad_desc();
    if (scratch_desc.get_size() > scratch_size) {
      scratch_size = scratch_desc.get_size();
      scratch = Bytes(static_cast<std::int64_t>(scratch_size));
    }
    product.primitive.execute(stream,
                              {{DNNL_ARG_SRC, memory(product.desc.src_desc(), Engine(), a)},
                               {DNNL_ARG_WEIGHTS, memory(product.desc.weights_desc(), Engine(), b)},
                               {DNNL_ARG_DST, memory(product.desc.dst_desc(), Engine(), c)},
                               {DNNL_ARG_SCRATCHPAD, memory(scratch_desc, Engine(), scratch.data())}});
    stream.wait();
  }

  dnnl::stream stream{Engine()};
  Bytes scratch{0};
  std::size_t scratch_size = 0;
};

// The products of a block of `rows` queries with `keys` keys.
struct BlockProducts {
  BlockProducts(const Attention& x, std::int64_t rows, std::int64_t keys)
      : qk(Matrix(x.dtype, rows, x.dqk), Matrix(x.dtype, x.dqk, keys, true), Matrix(DType::kF32, rows, keys),
           BlockAttr(false)),
        pv(Matrix(x.dtype, rows, keys), Matrix(x.dtype, keys, x.dv), Matrix(DType::kF32, rows, x.dv),
           BlockAttr(false)) {
    if (x.dr > 0) {
      rope = std::make_unique<Product>(Matrix(x.dtype, rows, x.dr), Matrix(x.dtype, x.dr, keys, true),
                                       Matrix(DType::kF32, rows, keys), BlockAttr(true));
    }
  }
  Product qk, pv;
  std::unique_ptr<Product> rope;
};

class Composed {
 public:
  explicit Composed(const Attention& attention)
      : x_(attention), blocks_(CeilDiv(attention.sq, kQueryBlock)), locals_([this] { return Local(x_); }) {
    omp_set_num_threads(1);  // Threads take whole blocks.
    for (std::int64_t i = 0; i < blocks_; ++i) {
      const Range rows = RowsOf(i);
      auto& products = products_[{rows.size(), KeysOf(x_, rows)}];
      if (!products) products = std::make_unique<BlockProducts>(x_, rows.size(), KeysOf(x_, rows));
    }
  }

  void Run(oneapi::tbb::task_arena& arena) {
    arena.execute([&] {
      oneapi::tbb::parallel_for(
          oneapi::tbb::blocked_range<std::int64_t>(0, x_.heads * blocks_),
          [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
            omp_set_num_threads(1);
            for (std::int64_t i = range.begin(); i < range.end(); ++i) RunBlock(i / blocks_, i % blocks_);
          },
          oneapi::tbb::simple_partitioner());
    });
  }

 private:
  // What a thread works in.
  struct Local : Worker {
    explicit Local(const Attention& x)
        : s(4 * kQueryBlock * x.s), p(2 * kQueryBlock * x.s), o(4 * kQueryBlock * x.dv) {}
    Bytes s, p, o;
    float m_new[kQueryBlock], m[kQueryBlock], l[kQueryBlock];
  };

  // Longest blocks first, so that causal work ends evenly.
  Range RowsOf(std::int64_t block) const {
    const std::int64_t begin = (blocks_ - 1 - block) * kQueryBlock;
    return {begin, std::min(begin + kQueryBlock, x_.sq)};
  }

  void RunBlock(std::int64_t head, std::int64_t block) {
    Local& local = locals_.local();
    const Range rows = RowsOf(block);
    const std::int64_t count = rows.size(), keys = KeysOf(x_, rows), group = head / (x_.heads / x_.kv_heads);
    const BlockProducts& products = *products_.at({count, keys});

    local.Multiply(products.qk, Row(x_.q, head, rows.begin), Row(x_.k, group, 0), local.s.data());
    if (x_.dr > 0) {
      local.Multiply(*products.rope, Row(x_.q_rope, head, rows.begin), Row(x_.k_rope, 0, 0), local.s.data());
    }
    const VectorOps& ops = BestVectorOps();
    const Rows s{local.s.data(), keys, count, keys};
    if (x_.causal) {
      auto* diagonal = reinterpret_cast<float*>(local.s.data()) + rows.begin;
      BestAttentionOps().mask_outside({diagonal, keys, count, keys - rows.begin}, -keys, 0,
                                      -std::numeric_limits<float>::infinity());
    }
    std::fill_n(local.m, count, std::numeric_limits<float>::lowest());
    std::fill_n(local.l, count, 0.0f);
    const Rows p{x_.dtype == DType::kF32 ? local.s.data() : local.p.data(), keys, count, keys};
    const Rows l{local.l, 1, count, 1};
    const float scale = 1 / std::sqrt(static_cast<float>(x_.dqk + x_.dr));
    ops.softmax_step(p, x_.dtype, s, {local.m_new, 1, count, 1}, {local.m, 1, count, 1}, l, scale);

    local.Multiply(products.pv, p.data, Row(x_.v, group, 0), local.o.data());
    const Rows o{local.o.data(), x_.dv, count, x_.dv};
    ops.binary(BinaryOp::kDiv, o, o, l);
    ops.cast({Row(x_.out, head, rows.begin), x_.dv, count, x_.dv}, x_.dtype, o, DType::kF32, false);
  }

  const Attention x_;
  const std::int64_t blocks_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::unique_ptr<BlockProducts>> products_;
  oneapi::tbb::enumerable_thread_specific<Local> locals_;
};

// The products of a block of `rows` queries with `keys` keys, backward; scores are (keys, rows).
struct GradProducts {
  GradProducts(const Attention& x, std::int64_t rows, std::int64_t keys)
      : scores(Matrix(x.dtype, keys, x.dqk), Matrix(x.dtype, x.dqk, rows, true),
               Matrix(DType::kF32, keys, rows), BlockAttr(false)),
        dp(Matrix(x.dtype, keys, x.dv), Matrix(x.dtype, x.dv, rows, true), Matrix(DType::kF32, keys, rows),
           BlockAttr(false)),
        dv(Matrix(x.dtype, keys, rows), Matrix(x.dtype, rows, x.dv), Matrix(DType::kF32, keys, x.dv),
           BlockAttr(true)),
        dk(Matrix(x.dtype, keys, rows), Matrix(x.dtype, rows, x.dqk), Matrix(DType::kF32, keys, x.dqk),
           BlockAttr(true)),
        dq(Matrix(x.dtype, rows, keys, true), Matrix(x.dtype, keys, x.dqk), Matrix(DType::kF32, rows, x.dqk),
           BlockAttr(false)) {}
  Product scores, dp, dv, dk, dq;
};

class ComposedGrad {
 public:
  explicit ComposedGrad(const AttentionGrad& grad)
      : x_(grad),
        blocks_(CeilDiv(grad.forward.s, kQueryBlock)),
        locals_([this] { return Local(x_.forward); }) {
    omp_set_num_threads(1);  // Threads take whole heads.
    for (std::int64_t i = 0; i < blocks_; ++i) {
      const Range rows = RowsOf(i);
      auto& products = products_[{rows.size(), KeysOf(x_.forward, rows)}];
      if (!products)
        products = std::make_unique<GradProducts>(x_.forward, rows.size(), KeysOf(x_.forward, rows));
    }
  }

  void Run(oneapi::tbb::task_arena& arena) {
    arena.execute([&] {
      oneapi::tbb::parallel_for(
          oneapi::tbb::blocked_range<std::int64_t>(0, x_.forward.heads),
          [&](const oneapi::tbb::blocked_range<std::int64_t>& range) {
            omp_set_num_threads(1);
            for (std::int64_t head = range.begin(); head < range.end(); ++head) RunHead(head);
          },
          oneapi::tbb::simple_partitioner());
    });
  }

 private:
  // What a thread works in.
  struct Local : Worker {
    explicit Local(const Attention& x)
        : s(4 * kQueryBlock * x.s),
          dp(4 * kQueryBlock * x.s),
          p(4 * kQueryBlock * x.s),
          ds(4 * kQueryBlock * x.s),
          dq(4 * kQueryBlock * x.dqk),
          dk(4 * x.s * x.dqk),
          dv(4 * x.s * x.dv),
          delta(4 * x.s) {}
    Bytes s, dp, p, ds, dq, dk, dv, delta;
  };

  Range RowsOf(std::int64_t block) const {
    return {block * kQueryBlock, std::min((block + 1) * kQueryBlock, x_.forward.s)};
  }

  // A gradient from fp32, scaled.
  void Write(const Tensor& to, std::int64_t head, std::int64_t row, std::int64_t rows, void* from,
             float scale) const {
    const VectorOps& ops = BestVectorOps();
    const Rows sums{from, to.size(3), rows, to.size(3)};
    if (scale != 1) ops.scalar(ScalarOp::kMul, sums, sums, scale);
    ops.cast({Row(to, head, row), to.size(3), rows, to.size(3)}, to.dtype, sums, DType::kF32, false);
  }

  void RunHead(std::int64_t head) {
    Local& local = locals_.local();
    const Attention& f = x_.forward;
    auto* delta = reinterpret_cast<float*>(local.delta.data());
    for (std::int64_t i = 0; i < f.s; ++i) {
      delta[i] = 0;
      for (std::int64_t d = 0; d < f.dv; ++d)
        delta[i] += LoadFloat(Row(x_.dout, head, i), f.dtype, d) * LoadFloat(Row(f.out, head, i), f.dtype, d);
    }
    std::fill_n(reinterpret_cast<float*>(local.dk.data()), f.s * f.dqk, 0.0f);
    std::fill_n(reinterpret_cast<float*>(local.dv.data()), f.s * f.dv, 0.0f);
    for (std::int64_t block = 0; block < blocks_; ++block) RunBlock(local, head, block);
    Write(x_.dk, head, 0, f.s, local.dk.data(), Scale());
    Write(x_.dv, head, 0, f.s, local.dv.data(), 1);
  }
  float Scale() const { return 1 / std::sqrt(static_cast<float>(x_.forward.dqk)); }

  void RunBlock(Local& local, std::int64_t head, std::int64_t block) {
    const Attention& f = x_.forward;
    const Range rows = RowsOf(block);
    const std::int64_t count = rows.size(), keys = KeysOf(f, rows);
    const GradProducts& products = *products_.at({count, keys});
    void *q = Row(f.q, head, rows.begin), *dout = Row(x_.dout, head, rows.begin);
    void *k = Row(f.k, head, 0), *v = Row(f.v, head, 0);

    local.Multiply(products.scores, k, q, local.s.data());
    local.Multiply(products.dp, v, dout, local.dp.data());
    const Rows s{local.s.data(), count, keys, count}, dp{local.dp.data(), count, keys, count};
    if (f.causal) {
      for (std::int64_t j = rows.begin; j < keys; ++j) {
        std::fill_n(reinterpret_cast<float*>(local.s.data()) + j * count, j - rows.begin,
                    -std::numeric_limits<float>::infinity());
      }
    }
    const Rows p{local.p.data(), count, keys, count}, ds{local.ds.data(), count, keys, count};
    const Rows lse{Row(x_.lse, 0, 0) + (head * f.s + rows.begin) * 4, count, 1, count};
    const Rows delta{local.delta.data() + rows.begin * 4, count, 1, count};
    BestAttentionGradOps().step(p, ds, f.dtype, s, dp, lse, delta, Scale());
    local.Multiply(products.dv, p.data, dout, local.dv.data());
    local.Multiply(products.dk, ds.data, q, local.dk.data());
    local.Multiply(products.dq, ds.data, k, local.dq.data());
    Write(x_.dq, head, rows.begin, count, local.dq.data(), Scale());
  }

  const AttentionGrad x_;
  const std::int64_t blocks_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::unique_ptr<GradProducts>> products_;
  oneapi::tbb::enumerable_thread_specific<Local> locals_;
};

GemmLibrary Library(const char* name, bool pack) {
  return {.name = name,
          .supports = &OneDnnMultiplies,
          .prepare = [pack](const Gemm& gemm, int threads) { return PrepareGemm(gemm, threads, pack); },
          .rest = EndWorkers};
}

}  // namespace

bool OneDnnMultiplies(DType input, DType output) {
  if (input == DType::kF16 || output == DType::kF16) return false;
  try {
    const Product some(Matrix(input, 1, 1), Matrix(input, 1, 1), Matrix(output, 1, 1));
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

GemmLibrary OneDnn() { return Library("onednn", false); }
GemmLibrary OneDnnPacked() { return Library("onednn_packed", true); }

std::function<void()> ComposedAttention(const Attention& attention, int threads) {
  if (!OneDnnMultiplies(attention.dtype, DType::kF32)) return {};
  auto composed = std::make_shared<Composed>(attention);
  auto arena = std::make_shared<oneapi::tbb::task_arena>(threads);
  return [composed, arena] { composed->Run(*arena); };
}

std::function<void()> ComposedAttentionGrad(const AttentionGrad& grad, int threads) {
  if (!OneDnnMultiplies(grad.forward.dtype, DType::kF32) || grad.forward.dr > 0) return {};
  auto composed = std::make_shared<ComposedGrad>(grad);
  auto arena = std::make_shared<oneapi::tbb::task_arena>(threads);
  return [composed, arena] { composed->Run(*arena); };
}

}  // namespace cubist::bench
