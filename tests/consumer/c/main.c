/* Every family of kernels called from C, on small tensors whose results are known, and what is refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cubist/c.h"

#if CUBIST_VERSION != CUBIST_VERSION_MAJOR * 10000 + CUBIST_VERSION_MINOR * 100 + CUBIST_VERSION_PATCH
#error "CUBIST_VERSION is no number of the preprocessor's"
#endif

static int failures = 0;
static cubist_device *host, *npu;

static void expect(bool condition, const char* what, int line) {
  if (condition) return;
  fprintf(stderr, "main.c:%d: %s (last error: %s)\n", line, what, cubist_last_error());
  ++failures;
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)
#define OK(call) expect((call) == CUBIST_OK, #call, __LINE__)
#define SIZES(...) \
  (int64_t[]) { __VA_ARGS__ }

static bool near(float x, double wanted) { return fabs((double)x - wanted) <= 1e-5 * (1 + fabs(wanted)); }
static bool all_near(const float* x, int n, double wanted) {
  for (int i = 0; i < n; ++i) {
    if (!near(x[i], wanted)) return false;
  }
  return true;
}
static void fill(float* x, int n, float value) {
  for (int i = 0; i < n; ++i) x[i] = value;
}
static cubist_tensor vector(float* x, int64_t n) { return cubist_output(x, CUBIST_F32, 1, SIZES(n)); }
static cubist_tensor matrix(float* x, int64_t rows, int64_t cols) {
  return cubist_output(x, CUBIST_F32, 2, SIZES(rows, cols));
}
static cubist_tensor cube(float* x, int64_t a, int64_t b, int64_t c) {
  return cubist_output(x, CUBIST_F32, 3, SIZES(a, b, c));
}
static cubist_tensor heads(float* x, int64_t n, int64_t s, int64_t d) {
  return cubist_output(x, CUBIST_F32, 4, SIZES(1, n, s, d));
}
static cubist_tensor integers(int32_t* x, int64_t n) { return cubist_output(x, CUBIST_I32, 1, SIZES(n)); }

/* Vectors, six dimensions, and a pack of no matrices. */
static void batches(void) {
  float a[2 * 3 * 5], b[5 * 4], row[5] = {1, 2, 3, 4, 5}, c[2 * 3 * 4], number = -1;
  fill(a, 30, 2), fill(b, 20, 0.5f), fill(c, 24, -1);
  cubist_matmul_args args = CUBIST_MATMUL_ARGS;
  args.a = cubist_input(a, CUBIST_F32, 6, SIZES(1, 2, 1, 1, 3, 5)), args.b = matrix(b, 5, 4);
  args.c = cubist_output(c, CUBIST_F32, 6, SIZES(1, 2, 1, 1, 3, 4));
  OK(cubist_matmul(host, &args, NULL));
  EXPECT(all_near(c, 24, 5));
  args.a = vector(row, 5), args.c = vector(c, 4);
  OK(cubist_matmul(host, &args, NULL));
  EXPECT(all_near(c, 4, 7.5));
  args.b = vector(row, 5), args.c = vector(&number, 1);
  OK(cubist_matmul(host, &args, NULL));
  EXPECT(near(number, 55));
  EXPECT(cubist_input(a, CUBIST_F32, 7, SIZES(1, 1, 1, 1, 1, 1, 1)).rank == 0);

  cubist_pack_args pack = CUBIST_PACK_ARGS;
  pack.source = cube(b, 0, 5, 4);
  cubist_packed* none = NULL;
  OK(cubist_pack_operand(host, &pack, &none, NULL));
  args.a = cube(a, 0, 3, 5), args.c = cube(c, 0, 3, 4), args.packed_b = none;
  memset(&args.b, 0, sizeof args.b);
  OK(cubist_matmul(host, &args, NULL));
  cubist_packed_destroy(none);
}

static void products(void) {
  float a[3 * 5], b[5 * 4], c[3 * 4], bias[4] = {1, 2, 3, 4};
  fill(a, 15, 2), fill(b, 20, 0.5f);
  cubist_matmul_args args = CUBIST_MATMUL_ARGS;
  args.a = cubist_input(a, CUBIST_F32, 2, SIZES(3, 5));
  args.b = matrix(b, 5, 4), args.c = matrix(c, 3, 4), args.bias = vector(bias, 4);
  OK(cubist_matmul(host, &args, NULL));
  for (int i = 0; i < 12; ++i) EXPECT(near(c[i], 5 + bias[i % 4]));

  float first[12];
  memcpy(first, c, sizeof c);
  cubist_pack_args pack = CUBIST_PACK_ARGS;
  pack.source = args.b;
  cubist_packed* packed = NULL;
  OK(cubist_pack_operand(host, &pack, &packed, NULL));
  EXPECT(cubist_packed_bytes(packed) >= (int64_t)sizeof b);
  memset(&args.b, 0, sizeof args.b);
  args.packed_b = packed;
  fill(c, 12, -1);
  OK(cubist_matmul(host, &args, NULL));
  EXPECT(memcmp(first, c, sizeof c) == 0);

  args.beta = 0.5f, args.residual = matrix(first, 3, 4), args.activation = CUBIST_ACTIVATION_RELU;
  for (args.alpha = -2; args.alpha <= 2; args.alpha += 4) {
    OK(cubist_matmul(host, &args, NULL));
    for (int i = 0; i < 12; ++i) {
      const float sum = args.alpha * 5 + bias[i % 4] + first[i] / 2;
      EXPECT(near(c[i], sum > 0 ? sum : 0));
    }
  }
  cubist_packed_destroy(packed);

  /* Two experts of one and two rows. */
  int32_t counts[2] = {1, 2};
  float weights[2 * 5 * 4];
  fill(weights, 20, 1), fill(weights + 20, 20, 3);
  cubist_grouped_matmul_args grouped = CUBIST_GROUPED_MATMUL_ARGS;
  grouped.x = matrix(a, 3, 5), grouped.groups = integers(counts, 2), grouped.weights = cube(weights, 2, 5, 4);
  grouped.out = matrix(c, 3, 4);
  OK(cubist_grouped_matmul(host, &grouped, NULL));
  EXPECT(all_near(c, 4, 10) && all_near(c + 4, 8, 30));
  const cubist_tensor list[2] = {matrix(weights, 5, 4), matrix(weights + 20, 5, 4)};
  memset(&grouped.weights, 0, sizeof grouped.weights);
  grouped.weight_list = list, grouped.weight_count = 2;
  fill(c, 12, -1);
  OK(cubist_grouped_matmul(host, &grouped, NULL));
  EXPECT(all_near(c, 4, 10) && all_near(c + 4, 8, 30));

  float dy[12], dx[15], dw[40];
  fill(dy, 12, 1);
  cubist_grouped_matmul_grad_args grad = CUBIST_GROUPED_MATMUL_GRAD_ARGS;
  grad.dy = matrix(dy, 3, 4), grad.groups = integers(counts, 2), grad.weights = cube(weights, 2, 5, 4);
  grad.dx = matrix(dx, 3, 5), grad.x = matrix(a, 3, 5), grad.dw = cube(dw, 2, 5, 4);
  OK(cubist_grouped_matmul_grad(host, &grad, NULL));
  EXPECT(all_near(dx, 5, 4) && all_near(dx + 5, 10, 12));
  EXPECT(all_near(dw, 20, 2) && all_near(dw + 20, 20, 4));
}

static void attention(void) {
  enum { N = 2, S = 3, D = 4 };
  float q[N * S * D], k[N * S * D], v[N * S * D], out[N * S * D], lse[N * S];
  fill(q, N * S * D, 1), fill(k, N * S * D, 1);
  for (int i = 0; i < N * S * D; ++i) v[i] = (float)(i / D % S); /* the key's number */
  cubist_flash_attention_args args = CUBIST_FLASH_ATTENTION_ARGS;
  args.q = heads(q, N, S, D), args.k = heads(k, N, S, D), args.v = heads(v, N, S, D);
  args.out = heads(out, N, S, D), args.lse = cube(lse, 1, N, S);
  args.causal = CUBIST_CAUSAL_TOP_LEFT;
  OK(cubist_flash_attention(host, &args, NULL));
  for (int i = 0; i < N * S; ++i) {
    EXPECT(all_near(out + i * D, D, i % S / 2.0)); /* the mean of 0 .. i */
    EXPECT(near(lse[i], 2 + log(i % S + 1.0)));    /* scores are D / sqrt(D) */
  }
  const float scale = 0;
  const cubist_window window = {1, CUBIST_UNBOUNDED, CUBIST_CAUSAL_TOP_LEFT};
  args.scale = &scale, args.window = &window;
  OK(cubist_flash_attention(host, &args, NULL));
  EXPECT(all_near(out + 2 * D, D, 1.5)); /* the last row sees keys 1 and 2 */
  EXPECT(near(lse[2], log(2)));

  args.scale = NULL, args.window = NULL;
  OK(cubist_flash_attention(host, &args, NULL));
  float dout[N * S * D], dq[N * S * D], dk[N * S * D], dv[N * S * D];
  fill(dout, N * S * D, 1);
  cubist_flash_attention_grad_args grad = CUBIST_FLASH_ATTENTION_GRAD_ARGS;
  grad.q = args.q, grad.k = args.k, grad.v = args.v, grad.out = args.out, grad.lse = args.lse;
  grad.dout = heads(dout, N, S, D), grad.causal = args.causal;
  grad.dq = heads(dq, N, S, D), grad.dk = heads(dk, N, S, D), grad.dv = heads(dv, N, S, D);
  OK(cubist_flash_attention_grad(host, &grad, NULL));
  EXPECT(all_near(dq, N * S * D, 0)); /* equal keys: a query changes nothing */
  EXPECT(all_near(dv, D, 1 + 1 / 2.0 + 1 / 3.0) && all_near(dv + 2 * D, D, 1 / 3.0));

  /* A sink for each head takes its share: the first row has scores of 2 and 2, with its workspace from here. */
  float sinks[N] = {2, 2}, dsinks[N];
  args.sinks = grad.sinks = vector(sinks, N), grad.dsinks = vector(dsinks, N);
  OK(cubist_flash_attention(host, &args, NULL));
  int64_t bytes = -1;
  OK(cubist_flash_attention_grad_workspace(host, &grad, &bytes));
  EXPECT(bytes > 0);
  void* const room = malloc((size_t)bytes);
  grad.workspace = (cubist_workspace){room, bytes};
  OK(cubist_flash_attention_grad(host, &grad, NULL));
  free(room);
  EXPECT(near(lse[0], 2 + log(2)) && all_near(dv, D, 1 / 2.0 + 1 / 3.0 + 1 / 4.0));
  /* - the sum over rows i of 1 / (i + 2) times D times the mean of 0 .. i and the sink's 0 */
  EXPECT(all_near(dsinks, N, -D * (1 / 9.0 + 3 / 16.0)));
}

static void movement(void) {
  enum { T = 3, H = 4, K = 2, E = 3 };
  float tokens[T * H], permuted[T * K * H], out[T * H], probs[T * K];
  int32_t ids[T * K] = {2, 0, 0, 1, 1, 2}, places[T * K], counts[E];
  for (int i = 0; i < T * H; ++i) tokens[i] = (float)(i / H + 1);
  fill(probs, T * K, 0.5f);
  cubist_token_permute_args permute = CUBIST_TOKEN_PERMUTE_ARGS;
  permute.tokens = matrix(tokens, T, H), permute.topk_ids = cubist_input(ids, CUBIST_I32, 2, SIZES(T, K));
  permute.num_experts = E;
  permute.permuted = matrix(permuted, T * K, H), permute.sorted_indices = integers(places, T * K);
  permute.expert_counts = integers(counts, E);
  OK(cubist_token_permute(host, &permute, NULL));
  const int32_t wanted[T * K] = {4, 0, 1, 2, 3, 5};
  EXPECT(memcmp(places, wanted, sizeof wanted) == 0);
  EXPECT(counts[0] == 2 && counts[1] == 2 && counts[2] == 2);
  EXPECT(all_near(permuted, H, 1) && all_near(permuted + H, 2 * H, 2) && all_near(permuted + 3 * H, H, 3));

  cubist_token_unpermute_args unpermute = CUBIST_TOKEN_UNPERMUTE_ARGS;
  unpermute.permuted = permute.permuted, unpermute.sorted_indices = permute.sorted_indices;
  unpermute.probs = matrix(probs, T, K), unpermute.out = matrix(out, T, H);
  OK(cubist_token_unpermute(host, &unpermute, NULL));
  EXPECT(memcmp(out, tokens, sizeof out) == 0);
  float bias[E * H];
  fill(bias, E * H, 10);
  unpermute.bias = matrix(bias, E, H), unpermute.topk_ids = permute.topk_ids;
  unpermute.residual = unpermute.residual2 = permute.tokens;
  OK(cubist_token_unpermute(host, &unpermute, NULL));
  for (int t = 0; t < T; ++t) EXPECT(all_near(out + t * H, H, 3 * (t + 1) + 10)); /* probs add up to 1 */

  cubist_token_permute_grad_args permute_grad = CUBIST_TOKEN_PERMUTE_GRAD_ARGS;
  permute_grad.permuted_grad = permute.permuted, permute_grad.sorted_indices = permute.sorted_indices;
  permute_grad.top_k = K, permute_grad.tokens_grad = matrix(out, T, H);
  OK(cubist_token_permute_grad(host, &permute_grad, NULL));
  for (int t = 0; t < T; ++t) EXPECT(all_near(out + t * H, H, 2 * (t + 1)));

  float probs_grad[T * K], permuted_grad[T * K * H];
  cubist_token_unpermute_grad_args unpermute_grad = CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS;
  unpermute_grad.out_grad = matrix(tokens, T, H), unpermute_grad.permuted = permute.permuted;
  unpermute_grad.sorted_indices = permute.sorted_indices, unpermute_grad.probs = matrix(probs, T, K);
  unpermute_grad.permuted_grad = matrix(permuted_grad, T * K, H),
  unpermute_grad.probs_grad = matrix(probs_grad, T, K);
  OK(cubist_token_unpermute_grad(host, &unpermute_grad, NULL));
  EXPECT(all_near(permuted_grad, H, 0.5) && all_near(probs_grad, K, H));
}

/* Rows beyond those of an expert's tokens are other tokens, there, back and in the gradients. */
static void padding_by_tokens(void) {
  enum { T = 3, H = 4, E = 2, C = 2, M = E * C };
  float tokens[T * H], permuted[M * H], out[T * H], row_probs[M], d_permuted[M * H], d_probs[T * E];
  float probs[T * E] = {1, 2, 3, 4, 5, 6}, row_grad[M] = {1, 2, 3, 4};
  bool map[T * E] = {true, false, false, true, false, false};
  int32_t places[T], row_tokens[M];
  for (int i = 0; i < T * H; ++i) tokens[i] = (float)(i / H + 1);
  cubist_token_permute_args permute = CUBIST_TOKEN_PERMUTE_ARGS;
  permute.tokens = matrix(tokens, T, H), permute.probs = matrix(probs, T, E);
  permute.routing_map = cubist_input(map, CUBIST_BOOL, 2, SIZES(T, E)), permute.top_k = 1;
  permute.num_experts = E, permute.capacity = C, permute.pad_with_tokens = true;
  permute.permuted = matrix(permuted, M, H), permute.sorted_indices = integers(places, T);
  permute.permuted_probs = vector(row_probs, M), permute.row_tokens = integers(row_tokens, M);
  OK(cubist_token_permute(host, &permute, NULL));
  const int32_t wanted[M] = {0, 1, 1, 0};
  EXPECT(memcmp(row_tokens, wanted, sizeof wanted) == 0);

  cubist_token_unpermute_args unpermute = CUBIST_TOKEN_UNPERMUTE_ARGS;
  unpermute.permuted = permute.permuted, unpermute.row_tokens = permute.row_tokens, unpermute.capacity = C;
  unpermute.probs = permute.probs, unpermute.out = matrix(out, T, H);
  OK(cubist_token_unpermute(host, &unpermute, NULL));
  EXPECT(all_near(out, H, 1 + 2) && all_near(out + H, H, 2 * 3 + 2 * 4) && all_near(out + 2 * H, H, 0));

  cubist_token_permute_grad_args permute_grad = CUBIST_TOKEN_PERMUTE_GRAD_ARGS;
  permute_grad.permuted_grad = permute.permuted, permute_grad.row_tokens = permute.row_tokens;
  permute_grad.capacity = C, permute_grad.permuted_probs_grad = vector(row_grad, M);
  permute_grad.tokens_grad = matrix(out, T, H), permute_grad.probs_grad = matrix(d_probs, T, E);
  OK(cubist_token_permute_grad(host, &permute_grad, NULL));
  EXPECT(all_near(out, H, 2) && all_near(out + H, H, 4) && all_near(out + 2 * H, H, 0));
  EXPECT(d_probs[0] == 1 && d_probs[1] == 4 && d_probs[2] == 2 && d_probs[3] == 3 && d_probs[4] == 0);

  cubist_token_unpermute_grad_args unpermute_grad = CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS;
  unpermute_grad.out_grad = permute.tokens, unpermute_grad.permuted = permute.permuted;
  unpermute_grad.row_tokens = permute.row_tokens, unpermute_grad.capacity = C;
  unpermute_grad.probs = permute.probs, unpermute_grad.permuted_grad = matrix(d_permuted, M, H);
  unpermute_grad.probs_grad = matrix(d_probs, T, E);
  OK(cubist_token_unpermute_grad(host, &unpermute_grad, NULL));
  EXPECT(all_near(d_permuted, H, 1) && all_near(d_permuted + H, H, 6) && all_near(d_permuted + 3 * H, H, 2));
  EXPECT(all_near(d_probs, 2, H) && all_near(d_probs + 2, 2, 4 * H) && all_near(d_probs + 4, 2, 0));
  unpermute_grad.capacity = 3;
  EXPECT(cubist_token_unpermute_grad(host, &unpermute_grad, NULL) == CUBIST_INVALID_ARGUMENT);
  EXPECT(strstr(cubist_last_error(), "permuted_grad") != NULL);
}

/* Routes by a map, with what permutation gives besides; and chunks of two ranks put in the order of experts. */
static void maps_and_chunks(void) {
  enum { T = 3, H = 4, K = 2, E = 3 };
  float tokens[T * H], permuted[T * K * H], out[T * H], probs[T * E], row_probs[T * K];
  bool map[T * E] = {true, false, true, false, true, false, true, true, false},
               valid[T] = {true, true, false};
  int32_t places[T * K], row_tokens[T * K], order[E] = {2, 1, 0}, devices[E];
  for (int i = 0; i < T * H; ++i) tokens[i] = (float)(i / H + 1);
  for (int i = 0; i < T * E; ++i) probs[i] = (float)i;
  cubist_token_permute_args permute = CUBIST_TOKEN_PERMUTE_ARGS;
  permute.tokens = matrix(tokens, T, H), permute.probs = matrix(probs, T, E);
  permute.routing_map = cubist_input(map, CUBIST_BOOL, 2, SIZES(T, E)), permute.top_k = K;
  permute.valid = cubist_input(valid, CUBIST_BOOL, 1, SIZES(T)), permute.expert_places = integers(order, E);
  permute.num_experts = E;
  permute.permuted = matrix(permuted, T * K, H), permute.sorted_indices = integers(places, T * K);
  permute.permuted_probs = vector(row_probs, T * K), permute.row_tokens = integers(row_tokens, T * K);
  permute.device_counts = integers(devices, E);
  OK(cubist_token_permute(host, &permute, NULL));
  /* Expert 2 first: token 0, then token 1 of expert 1, then token 0 of expert 0. Token 2 goes nowhere. */
  const int32_t wanted[T * K] = {2, 0, 1, -1, -1, -1}, rows[T * K] = {0, 1, 0, -1, -1, -1};
  EXPECT(memcmp(places, wanted, sizeof wanted) == 0 && memcmp(row_tokens, rows, sizeof rows) == 0);
  EXPECT(all_near(permuted, H, 1) && all_near(permuted + H, H, 2) && all_near(permuted + 2 * H, H, 1));
  EXPECT(row_probs[0] == 2 && row_probs[1] == 4 && row_probs[2] == 0);
  EXPECT(devices[0] == 1 && devices[1] == 1 && devices[2] == 1);
  permute.capacity = 1, permute.capacity_keeps = (cubist_capacity_keeps)2;
  EXPECT(cubist_token_permute(host, &permute, NULL) == CUBIST_INVALID_ARGUMENT);
  EXPECT(strstr(cubist_last_error(), "capacity_keeps is 2") != NULL);

  cubist_token_unpermute_args unpermute = CUBIST_TOKEN_UNPERMUTE_ARGS;
  unpermute.permuted = permute.permuted, unpermute.sorted_indices = permute.sorted_indices;
  unpermute.probs = permute.probs, unpermute.routing_map = permute.routing_map, unpermute.top_k = K;
  unpermute.out = matrix(out, T, H);
  OK(cubist_token_unpermute(host, &unpermute, NULL));
  EXPECT(all_near(out, H, 0 + 2) && all_near(out + H, H, 4 * 2) && all_near(out + 2 * H, H, 0));

  float probs_grad[T * E], row_grad[T * K] = {1, 2, 3, 4, 5, 6};
  cubist_token_permute_grad_args grad = CUBIST_TOKEN_PERMUTE_GRAD_ARGS;
  grad.permuted_grad = permute.permuted, grad.sorted_indices = permute.sorted_indices, grad.top_k = K;
  grad.permuted_probs_grad = vector(row_grad, T * K), grad.routing_map = permute.routing_map;
  grad.tokens_grad = matrix(out, T, H), grad.probs_grad = matrix(probs_grad, T, E);
  OK(cubist_token_permute_grad(host, &grad, NULL));
  EXPECT(all_near(out, H, 2) && all_near(out + H, H, 2));
  EXPECT(probs_grad[0] == 3 && probs_grad[1] == 0 && probs_grad[2] == 1 && probs_grad[4] == 2);

  cubist_token_unpermute_grad_args back = CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS;
  back.out_grad = matrix(tokens, T, H), back.permuted = permute.permuted;
  back.sorted_indices = permute.sorted_indices, back.probs = permute.probs;
  back.routing_map = permute.routing_map, back.top_k = K;
  float permuted_grad[T * K * H];
  back.permuted_grad = matrix(permuted_grad, T * K, H), back.probs_grad = matrix(probs_grad, T, E);
  OK(cubist_token_unpermute_grad(host, &back, NULL));
  EXPECT(all_near(permuted_grad, H, 2) && all_near(permuted_grad + H, H, 4 * 2));
  EXPECT(probs_grad[0] == H && probs_grad[1] == 0 && probs_grad[4] == 4 * H);

  int32_t counts[2 * 2] = {1, 2, 2, 1}, row_ids[6], expert_counts[2];
  float sent[6 * H], arrived[6 * H];
  for (int i = 0; i < 6 * H; ++i) sent[i] = (float)(i / H);
  cubist_reorder_chunks_args chunks = CUBIST_REORDER_CHUNKS_ARGS;
  chunks.tokens = matrix(sent, 6, H), chunks.chunk_counts = cubist_input(counts, CUBIST_I32, 2, SIZES(2, 2));
  chunks.out = matrix(arrived, 6, H), chunks.row_ids = integers(row_ids, 6);
  chunks.expert_counts = integers(expert_counts, 2);
  OK(cubist_reorder_chunks(host, &chunks, NULL));
  const int32_t from[6] = {0, 3, 4, 1, 2, 5};
  EXPECT(memcmp(row_ids, from, sizeof from) == 0 && expert_counts[0] == 3 && expert_counts[1] == 3);
  for (int i = 0; i < 6; ++i) EXPECT(all_near(arrived + i * H, H, from[i]));
  chunks.tokens = chunks.out, chunks.out = matrix(sent, 6, H), chunks.inverse = true;
  memset(&chunks.row_ids, 0, sizeof chunks.row_ids),
      memset(&chunks.expert_counts, 0, sizeof chunks.expert_counts);
  fill(sent, 6 * H, -1);
  OK(cubist_reorder_chunks(host, &chunks, NULL));
  for (int i = 0; i < 6; ++i) EXPECT(all_near(sent + i * H, H, i));
}

/* Weights that are squares of scores; the context counts the tokens that were weighed, of one thread. */
static void square(void* context, size_t count, const int32_t* ids, const float* scores, float* weights) {
  ++*(int*)context;
  for (size_t i = 0; i < count; ++i) weights[i] = ids[i] < 0 ? 0 : scores[i] * scores[i];
}

static void square_grad(void* context, size_t count, const int32_t* ids, const float* scores,
                        const float* d_weights, float* d_scores) {
  ++*(int*)context;
  for (size_t i = 0; i < count; ++i) d_scores[i] = ids[i] < 0 ? 0 : 2 * scores[i] * d_weights[i];
}

static void routes(void) {
  enum { T = 2, E = 4, K = 2 };
  float logits[T * E] = {0, 3, 1, 3, 2, 0, 0, 0}, weights[T * K], scores[T * E];
  int32_t ids[T * K];
  cubist_route_args args = CUBIST_ROUTE_ARGS;
  args.logits = matrix(logits, T, E), args.weights = matrix(weights, T, K);
  args.ids = cubist_output(ids, CUBIST_I32, 2, SIZES(T, K)), args.scores = matrix(scores, T, E);
  cubist_route_options options = CUBIST_ROUTE_OPTIONS;
  options.renormalise = true, args.options = &options;
  OK(cubist_route(host, &args, NULL));
  EXPECT(ids[0] == 1 && ids[1] == 3 && ids[2] == 0 && ids[3] == 1);
  EXPECT(near(weights[0], 0.5) && near(weights[1], 0.5) && near(weights[2], exp(2) / (exp(2) + 1)));

  float d_weights[T * K], d_logits[T * E];
  fill(d_weights, T * K, 1); /* the weights of a row add up to 1: no gradient */
  cubist_route_grad_args grad = CUBIST_ROUTE_GRAD_ARGS;
  grad.d_weights = matrix(d_weights, T, K), grad.ids = args.ids, grad.scores = args.scores;
  grad.options = args.options, grad.d_logits = matrix(d_logits, T, E);
  OK(cubist_route_grad(host, &grad, NULL));
  EXPECT(all_near(d_logits, T * E, 0));

  const uint8_t valid[T] = {0, 1};
  int32_t counts[E];
  float aux_loss = -1;
  options.aux_coefficient = 1;
  args.valid = cubist_input(valid, CUBIST_BOOL, 1, SIZES(T)), args.aux_loss = vector(&aux_loss, 1);
  args.counts = cubist_output(counts, CUBIST_I32, 1, SIZES(E));
  OK(cubist_route(host, &args, NULL));
  EXPECT(ids[0] == -1 && ids[1] == -1 && ids[2] == 0 && ids[3] == 1 && weights[0] == 0 && scores[1] == 0);
  EXPECT(counts[0] == 1 && counts[1] == 1 && counts[2] == 0 && counts[3] == 0);
  EXPECT(near(aux_loss, 2 * (exp(2) + 1) / (exp(2) + 3))); /* E / (K V V) and the two scores of the token */
  grad.valid = args.valid, grad.counts = args.counts, grad.d_aux_loss = 1;
  OK(cubist_route_grad(host, &grad, NULL));
  EXPECT(all_near(d_logits, E, 0) && !near(d_logits[E], 0));
  options.aux_coefficient = 0, grad.d_aux_loss = 0, args.valid = grad.valid = (cubist_tensor){0};
  OK(cubist_route(host, &args, NULL));

  int weighed = 0; /* by one thread */
  cubist_host_options alone = CUBIST_HOST_OPTIONS;
  alone.threads = 1;
  cubist_device* one = NULL;
  OK(cubist_device_host(&alone, &one));
  options.weighting = (cubist_route_weighting){square, square_grad, &weighed};
  OK(cubist_route(one, &args, NULL));
  EXPECT(weighed == T && near(weights[0], 0.5) && near(weights[2], exp(4) / (exp(4) + 1)));
  OK(cubist_route_grad(one, &grad, NULL));
  EXPECT(weighed > T && all_near(d_logits, T * E, 0));
  cubist_device_destroy(one);
  options.size = 4;
  EXPECT(cubist_route(host, &args, NULL) == CUBIST_INVALID_ARGUMENT &&
         strstr(cubist_last_error(), "options.size is 4") != NULL);
}

static void rows(void) {
  enum { T = 2, H = 8 };
  float x[T * H], out[T * H], rstd[T], gamma[H], dx[T * H], dgamma[H];
  fill(x, T * H, 3), fill(gamma, H, 2);
  cubist_rms_norm_args norm = CUBIST_RMS_NORM_ARGS;
  norm.x = matrix(x, T, H), norm.gamma = vector(gamma, H), norm.eps = 0;
  norm.out = matrix(out, T, H), norm.rstd = vector(rstd, T);
  OK(cubist_rms_norm(host, &norm, NULL));
  EXPECT(all_near(out, T * H, 2) && all_near(rstd, T, 1 / 3.0));
  cubist_rms_norm_grad_args grad = CUBIST_RMS_NORM_GRAD_ARGS;
  grad.d_out = norm.out, grad.x = norm.x, grad.rstd = norm.rstd, grad.gamma = norm.gamma;
  grad.d_x = matrix(dx, T, H), grad.d_gamma = vector(dgamma, H);
  OK(cubist_rms_norm_grad(host, &grad, NULL));
  EXPECT(all_near(dx, T * H, 0) && all_near(dgamma, H, T * 2));

  float gate[T * H], up[T * H], d_gate[T * H], d_up[T * H];
  fill(gate, T * H, 1), fill(up, T * H, 4);
  const double s = 1 / (1 + exp(-1));
  cubist_swiglu_args swiglu = CUBIST_SWIGLU_ARGS;
  swiglu.gate = matrix(gate, T, H), swiglu.up = matrix(up, T, H), swiglu.out = matrix(out, T, H);
  OK(cubist_swiglu(host, &swiglu, NULL));
  EXPECT(all_near(out, T * H, 4 * s));
  fill(dx, T * H, 1);
  cubist_swiglu_grad_args swiglu_grad = CUBIST_SWIGLU_GRAD_ARGS;
  swiglu_grad.d_out = matrix(dx, T, H), swiglu_grad.gate = swiglu.gate, swiglu_grad.up = swiglu.up;
  swiglu_grad.d_gate = matrix(d_gate, T, H), swiglu_grad.d_up = matrix(d_up, T, H);
  OK(cubist_swiglu_grad(host, &swiglu_grad, NULL));
  EXPECT(all_near(d_up, T * H, s) && all_near(d_gate, T * H, 4 * s * (2 - s)));
}

/* Experts whose weights are zero add nothing: the block is then the identity. */
static void blocks(void) {
  enum { T = 3, H = 8, E = 4, F = 4 };
  static float x[T * H], norm[H], router[H * E], gate_up[E * H * 2 * F], down[E * F * H], out[T * H],
      d_x[T * H];
  for (int i = 0; i < T * H; ++i) x[i] = (float)(i % 5 - 2);
  fill(norm, H, 1);
  for (int i = 0; i < H * E; ++i) router[i] = (float)(i % 7) / 7;
  cubist_block_state* state = NULL;
  OK(cubist_block_state_create(&state));
  cubist_moe_block_args args = CUBIST_MOE_BLOCK_ARGS;
  args.x = matrix(x, T, H), args.norm = vector(norm, H), args.router = matrix(router, H, E);
  args.gate_up = cube(gate_up, E, H, 2 * F), args.down = cube(down, E, F, H), args.top_k = 2;
  args.out = matrix(out, T, H);
  OK(cubist_moe_block(host, &args, state, NULL));
  EXPECT(memcmp(out, x, sizeof x) == 0);
  cubist_moe_block_grad_args grad = CUBIST_MOE_BLOCK_GRAD_ARGS;
  grad.forward = &args, grad.d_out = matrix(x, T, H), grad.d_x = matrix(d_x, T, H);
  OK(cubist_moe_block_grad(host, &grad, state, NULL));
  EXPECT(memcmp(d_x, x, sizeof x) == 0);
  const bool valid[T] = {true, false, true};
  args.valid = cubist_input(valid, CUBIST_BOOL, 1, SIZES(T));
  OK(cubist_moe_block(host, &args, state, NULL));
  OK(cubist_moe_block_grad(host, &grad, state, NULL));
  EXPECT(memcmp(out, x, sizeof x) == 0 && memcmp(d_x, x, sizeof x) == 0);

  enum { N = 2, DN = 4, DR = 2, DV = 4, R = 6 };
  static float q_up[H * N * (DN + DR)], kv_down[H * (R + DR)], kv_norm[R], kv_up[R * N * (DN + DV)],
      o[N * DV * H];
  fill(kv_norm, R, 1);
  cubist_mla_block_args mla = CUBIST_MLA_BLOCK_ARGS;
  mla.x = args.x, mla.norm = args.norm, mla.heads = N;
  mla.q_up = matrix(q_up, H, N * (DN + DR)), mla.kv_down = matrix(kv_down, H, R + DR),
  mla.kv_norm = vector(kv_norm, R);
  mla.kv_up = matrix(kv_up, R, N * (DN + DV)), mla.out_weight = matrix(o, N * DV, H),
  mla.out = matrix(out, T, H);
  fill(out, T * H, -1);
  OK(cubist_mla_block(host, &mla, state, NULL));
  EXPECT(memcmp(out, x, sizeof x) == 0);
  static float d_o[N * DV * H];
  fill(d_o, N * DV * H, -1);
  cubist_mla_block_grad_args mla_grad = CUBIST_MLA_BLOCK_GRAD_ARGS;
  mla_grad.forward = &mla, mla_grad.d_out = matrix(x, T, H), mla_grad.d_x = matrix(d_x, T, H);
  mla_grad.out_weight = matrix(d_o, N * DV, H);
  fill(d_x, T * H, -1);
  OK(cubist_mla_block_grad(host, &mla_grad, state, NULL));
  EXPECT(memcmp(d_x, x, sizeof x) == 0 && all_near(d_o, N * DV * H, 0));
  mla_grad.forward = NULL;
  EXPECT(cubist_mla_block_grad(host, &mla_grad, state, NULL) == CUBIST_INVALID_ARGUMENT);
  EXPECT(cubist_mla_block(host, &mla, NULL, NULL) == CUBIST_INVALID_ARGUMENT);
  EXPECT(strstr(cubist_last_error(), "state is null") != NULL);
  cubist_block_state_destroy(state);
}

static void loss_scaling(void) {
  float gradient[3] = {8, 16, 24};
  cubist_loss_scale_options options = CUBIST_LOSS_SCALE_OPTIONS;
  options.initial = 8;
  cubist_loss_scaler* scaler = NULL;
  OK(cubist_loss_scaler_create(&options, &scaler));
  const cubist_tensor tensor = vector(gradient, 3);
  bool apply = false;
  OK(cubist_loss_scaler_unscale(scaler, &tensor, 1, &apply));
  EXPECT(apply && gradient[0] == 1 && gradient[2] == 3);
  gradient[1] = INFINITY;
  OK(cubist_loss_scaler_unscale(scaler, &tensor, 1, &apply));
  EXPECT(!apply && cubist_loss_scaler_scale(scaler) == 4);
  cubist_loss_scaler_destroy(scaler);
}

static double time_of(const cubist_profile* profile) {
  double time = -1;
  OK(cubist_profile_number(profile, "time_us", &time));
  return time;
}

static void model(void) {
  cubist_npu_options options = CUBIST_NPU_OPTIONS;
  options.without_data = true;
  OK(cubist_device_npu("ascend910b2", &options, &npu));
  cubist_profile* profile = NULL;
  OK(cubist_profile_create(&profile));
  cubist_matmul_args args = CUBIST_MATMUL_ARGS;
  args.a = cubist_input(NULL, CUBIST_BF16, 2, SIZES(512, 512));
  args.b = args.a, args.c = args.a;
  OK(cubist_matmul(npu, &args, profile));
  const double time = time_of(profile);
  EXPECT(time > 1 && time < 1000);
  const char* bound = NULL;
  OK(cubist_profile_text(profile, "bound", &bound));
  EXPECT(bound != NULL && strlen(bound) > 0);

  /* A chip with a tenth of the clock takes longer. */
  const char* const constants[] = {"clock_hz"};
  const double values[] = {1.8e8};
  options.constant_count = 1, options.constants = constants, options.values = values;
  cubist_device* slow = NULL;
  OK(cubist_device_npu("ascend910b2", &options, &slow));
  OK(cubist_matmul(slow, &args, profile));
  EXPECT(time_of(profile) > 2 * time);
  cubist_device_destroy(slow);
  double number = 0;
  EXPECT(cubist_profile_number(profile, "time_s", &number) == CUBIST_INVALID_ARGUMENT);
  cubist_profile_destroy(profile);
}

static bool refused(cubist_status status, const char* text) {
  return status == CUBIST_INVALID_ARGUMENT && strstr(cubist_last_error(), text) != NULL;
}

static void errors(void) {
  float x[4] = {1, 2, 3, 4}, c[4] = {-1, -1, -1, -1};
  cubist_matmul_args args = CUBIST_MATMUL_ARGS;
  EXPECT(refused(cubist_matmul(NULL, &args, NULL), "device is null"));
  EXPECT(refused(cubist_matmul(host, NULL, NULL), "args is null"));
  EXPECT(refused(cubist_matmul(host, &args, NULL), "matmul: a"));
  args.a = matrix(x, 2, 2), args.b = matrix(x, 1, 2), args.c = matrix(c, 2, 2);
  EXPECT(refused(cubist_matmul(host, &args, NULL), "1"));
  args.b = args.a, args.b.dtype = (cubist_dtype)77;
  EXPECT(refused(cubist_matmul(host, &args, NULL), "77"));
  args.b = args.a, args.b.rank = 9;
  EXPECT(refused(cubist_matmul(host, &args, NULL), "9"));
  args.b = args.a, args.size = 0;
  EXPECT(refused(cubist_matmul(host, &args, NULL), "size is 0"));
  args.size = sizeof args + 64;
  EXPECT(refused(cubist_matmul(host, &args, NULL), "size"));
  args.size = offsetof(cubist_matmul_args, alpha) + 2;
  EXPECT(refused(cubist_matmul(host, &args, NULL), "where a field ends"));
  args.size = offsetof(cubist_matmul_args, residual) + offsetof(cubist_tensor, sizes);
  EXPECT(refused(cubist_matmul(host, &args, NULL), "where a field ends"));
  cubist_host_options cut = CUBIST_HOST_OPTIONS;
  cut.size = offsetof(cubist_host_options, tuning) + 1;
  cubist_device* none = NULL;
  EXPECT(refused(cubist_device_host(&cut, &none), "options.size is 17") && none == NULL);
  for (int i = 0; i < 4; ++i) EXPECT(c[i] == -1);
  cubist_flash_attention_args attend = CUBIST_FLASH_ATTENTION_ARGS;
  attend.causal = (cubist_causal)5;
  EXPECT(refused(cubist_flash_attention(host, &attend, NULL), "causal is 5"));
  EXPECT(refused(cubist_device_npu("ascend910c9", NULL, &none), "ascend910c9") && none == NULL);
  EXPECT(refused(cubist_device_host(NULL, NULL), "null"));
  cubist_host_options tuned = CUBIST_HOST_OPTIONS;
  tuned.tuning = "no/such/file";
  EXPECT(refused(cubist_device_host(&tuned, &none), "no/such/file") && none == NULL);
  /* Of an earlier version, which had no packed operands: the fields it has are taken. */
  args = (cubist_matmul_args)CUBIST_MATMUL_ARGS;
  args.a = matrix(x, 2, 2), args.b = args.a, args.c = matrix(c, 2, 2);
  args.size = offsetof(cubist_matmul_args, packed_a);
  args.packed_a = (const cubist_packed*)x;
  OK(cubist_matmul(host, &args, NULL));
  EXPECT(c[0] == 7 && c[3] == 22);
  args.size = offsetof(cubist_matmul_args, transpose_b); /* behind one of several in a word */
  OK(cubist_matmul(host, &args, NULL));
  cubist_device_destroy(NULL);
}

int main(void) {
  cubist_host_options options = CUBIST_HOST_OPTIONS;
  options.threads = 2;
  OK(cubist_device_host(&options, &host));
  EXPECT(strcmp(cubist_version(), CUBIST_VERSION_STRING) == 0);
  batches();
  products();
  attention();
  movement();
  padding_by_tokens();
  maps_and_chunks();
  routes();
  rows();
  blocks();
  loss_scaling();
  model();
  errors();
  cubist_device_destroy(host);
  cubist_device_destroy(npu);
  if (failures == 0) puts("all well");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
