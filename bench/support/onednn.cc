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
      : x_(attention), blocks_(CeilDiv(attention.s, kQueryBlock)), locals_([this] { return Local(x_); }) {
    omp_set_num_threads(1);  // Threads take whole blocks.
    for (std::int64_t i = 0; i < blocks_; ++i) {
      const Range rows = RowsOf(i);
      auto& products = products_[{rows.size(), KeysOf(rows)}];
      if (!products) products = std::make_unique<BlockProducts>(x_, rows.size(), KeysOf(rows));
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
  struct Local {
    explicit Local(const Attention& x)
        : stream(Engine()),
          s(4 * kQueryBlock * x.s),
          p(2 * kQueryBlock * x.s),
          o(4 * kQueryBlock * x.dv),
          scratch(0) {}
    dnnl::stream stream;
    Bytes s, p, o, scratch;
    std::size_t scratch_size = 0;
    float m_new[kQueryBlock], m[kQueryBlock], l[kQueryBlock];
  };

  // Longest blocks first, so that causal work ends evenly.
  Range RowsOf(std::int64_t block) const {
    const std::int64_t begin = (blocks_ - 1 - block) * kQueryBlock;
    return {begin, std::min(begin + kQueryBlock, x_.s)};
  }
  std::int64_t KeysOf(const Range& rows) const { return x_.causal ? rows.end : x_.s; }

  static char* Row(const ConstTensor& x, std::int64_t head, std::int64_t row) {
    const std::int64_t offset = head * x.stride(1) + row * x.stride(2);
    return static_cast<char*>(const_cast<void*>(x.data)) + offset * SizeOf(x.dtype);
  }

  void Multiply(Local& local, const Product& product, void* a, void* b, void* c) const {
    const memory::desc scratch_desc = product.desc.scratchpad_desc();
    if (scratch_desc.get_size() > local.scratch_size) {
      local.scratch_size = scratch_desc.get_size();
      local.scratch = Bytes(static_cast<std::int64_t>(local.scratch_size));
    }
    product.primitive.execute(local.stream,
                              {{DNNL_ARG_SRC, memory(product.desc.src_desc(), Engine(), a)},
                               {DNNL_ARG_WEIGHTS, memory(product.desc.weights_desc(), Engine(), b)},
                               {DNNL_ARG_DST, memory(product.desc.dst_desc(), Engine(), c)},
                               {DNNL_ARG_SCRATCHPAD, memory(scratch_desc, Engine(), local.scratch.data())}});
    local.stream.wait();
  }

  void RunBlock(std::int64_t head, std::int64_t block) {
    Local& local = locals_.local();
    const Range rows = RowsOf(block);
    const std::int64_t count = rows.size(), keys = KeysOf(rows), group = head / (x_.heads / x_.kv_heads);
    const BlockProducts& products = *products_.at({count, keys});

    Multiply(local, products.qk, Row(x_.q, head, rows.begin), Row(x_.k, group, 0), local.s.data());
    if (x_.dr > 0) {
      Multiply(local, *products.rope, Row(x_.q_rope, head, rows.begin), Row(x_.k_rope, 0, 0), local.s.data());
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

    Multiply(local, products.pv, p.data, Row(x_.v, group, 0), local.o.data());
    const Rows o{local.o.data(), x_.dv, count, x_.dv};
    ops.binary(BinaryOp::kDiv, o, o, l);
    ops.cast({Row(x_.out, head, rows.begin), x_.dv, count, x_.dv}, x_.dtype, o, DType::kF32, false);
  }

  const Attention x_;
  const std::int64_t blocks_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::unique_ptr<BlockProducts>> products_;
  oneapi::tbb::enumerable_thread_specific<Local> locals_;
};

GemmLibrary Library(const char* name, bool pack) {
  return {.name = name,
          .supports = [](DType input, DType output) { return input != DType::kF16 && output != DType::kF16; },
          .prepare = [pack](const Gemm& gemm, int threads) { return PrepareGemm(gemm, threads, pack); },
          .rest = EndWorkers};
}

}  // namespace

GemmLibrary OneDnn() { return Library("onednn", false); }
GemmLibrary OneDnnPacked() { return Library("onednn_packed", true); }

std::function<void()> ComposedAttention(const Attention& attention, int threads) {
  if (attention.dtype == DType::kF16) return {};
  auto composed = std::make_shared<Composed>(attention);
  auto arena = std::make_shared<oneapi::tbb::task_arena>(threads);
  return [composed, arena] { composed->Run(*arena); };
}

}  // namespace cubist::bench
