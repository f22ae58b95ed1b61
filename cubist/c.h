/* Cubist for C11 and whatever calls C: every kernel of the library, on this machine and on a modelled NPU.
 *
 *   cubist_device* host;
 *   if (cubist_device_host(NULL, &host) != CUBIST_OK) return fail(cubist_last_error());
 *   cubist_matmul_args args = CUBIST_MATMUL_ARGS;
 *   args.a = cubist_input(a, CUBIST_F32, 2, (int64_t[]){m, k});
 *   args.b = cubist_input(b, CUBIST_F32, 2, (int64_t[]){k, n});
 *   args.c = cubist_output(c, CUBIST_F32, 2, (int64_t[]){m, n});
 *   if (cubist_matmul(host, &args, NULL) != CUBIST_OK) return fail(cubist_last_error());
 *
 * What a kernel computes, its tensors' shapes and dtypes, and what it refuses stand in the C++ header of the same name
 * (cubist/matmul.h, ..); the fields here have the names there. A tensor or a pointer that is zero is not given.
 *
 * Argument structs begin with their size and must be initialised by the macro beside them: a later library takes the
 * structs of an earlier one, which end behind one of its fields. Structs without a size (tensors, ranges, ..) do not
 * grow. Calls may be made from several threads at once; handles may be shared by calls, but for profiles, block states
 * and loss scalers, which belong to one call at a time. No exception leaves a call.
 */
#ifndef CUBIST_CUBIST_C_H_
#define CUBIST_CUBIST_C_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cubist/version.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* All of this is what the shared library shows. */

/* CUBIST_INITIAL(type, CUBIST_SET(field, value) ..) initialises a struct with its size, these values, and zeros: a constant, in
 * C and from C++17 on. */
#ifdef __cplusplus
#define CUBIST_INITIAL(type, sets)      \
  [] {                                  \
    type cubist_initial{};              \
    cubist_initial.size = sizeof(type); \
    sets;                               \
    return cubist_initial;              \
  }()
#define CUBIST_SET(field, value) cubist_initial.field = value;
#else
#define CUBIST_INITIAL(type, sets) \
  { .size = sizeof(type), sets }
#define CUBIST_SET(field, value) .field = value,
#endif

/* ---- Errors */

typedef enum cubist_status {
  CUBIST_OK = 0,
  CUBIST_INVALID_ARGUMENT = 1, /* nothing was written */
  CUBIST_UNSUPPORTED = 2,      /* a chip that the tiles do not fit */
  CUBIST_OUT_OF_MEMORY = 3,
  CUBIST_INTERNAL = 4
} cubist_status;

/* Of this thread's last call that failed: the argument at fault, its value and the limit. Valid until the next one. */
const char* cubist_last_error(void);
/* Of the library that runs; CUBIST_VERSION_STRING is that of the headers (cubist/version.h). */
const char* cubist_version(void);

/* ---- Tensors: strided views, strides in elements; negative ones step down from data */

#define CUBIST_MAX_RANK 6

typedef enum cubist_dtype {
  CUBIST_F32 = 0,
  CUBIST_BF16 = 1,
  CUBIST_F16 = 2,
  CUBIST_I32 = 3,
  CUBIST_I64 = 4,
  CUBIST_BOOL = 5 /* a byte, true where it is not 0 */
} cubist_dtype;

typedef struct cubist_tensor {
  void* data; /* of inputs never written */
  cubist_dtype dtype;
  int32_t rank; /* 0: not given */
  int64_t sizes[CUBIST_MAX_RANK];
  int64_t strides[CUBIST_MAX_RANK];
} cubist_tensor;

/* Contiguous, the last dimension innermost; rank 0, which kernels name as missing, where the rank is not 0 to 6. */
cubist_tensor cubist_input(const void* data, cubist_dtype dtype, int32_t rank, const int64_t* sizes);
cubist_tensor cubist_output(void* data, cubist_dtype dtype, int32_t rank, const int64_t* sizes);

/* ---- Devices */

typedef struct cubist_device cubist_device;

typedef struct cubist_host_options {
  size_t size;
  int32_t threads;    /* up to 1024; 0: CUBIST_NUM_THREADS, else all that the machine has */
  bool pin;           /* each thread to a processor while it computes */
  const char* tuning; /* a file of tilings, as `cubist tune` writes it; may be null */
} cubist_host_options;
#define CUBIST_HOST_OPTIONS CUBIST_INITIAL(cubist_host_options, )

typedef struct cubist_npu_options {
  size_t size;
  bool without_data;     /* only predict: float tensors may have null data, outputs are not written */
  bool per_tile_flags;   /* as compilers place them; else the fewest */
  bool timeline;         /* keep every instruction's start and end */
  const char* tuning;    /* as for a host */
  size_t constant_count; /* constants of the chip to change, such as "memory.hbm_bytes_per_s" */
  const char* const* constants;
  const double* values;
} cubist_npu_options;
#define CUBIST_NPU_OPTIONS CUBIST_INITIAL(cubist_npu_options, )

/* `options` may be null. The handle is the caller's to destroy. */
cubist_status cubist_device_host(const cubist_host_options* options, cubist_device** device);
/* `chip` is a name such as "ascend910b2". */
cubist_status cubist_device_npu(const char* chip, const cubist_npu_options* options, cubist_device** device);
void cubist_device_destroy(cubist_device* device);

/* ---- Profiles: what the model predicts of a call on an NPU. A host leaves them empty. */

typedef struct cubist_profile cubist_profile;

cubist_status cubist_profile_create(cubist_profile** profile);
void cubist_profile_destroy(cubist_profile* profile);
/* Figures of the last call that was given the profile, by the names that `cubist profile --json` gives them: time_us,
 * cycles, cores_used, instructions, launches, cube_busy, vector_busy, mte_busy, gm_read, gm_written, workspace_bytes,
 * l2_hit_rate, hbm_bytes, macs. */
cubist_status cubist_profile_number(const cubist_profile* profile, const char* name, double* value);
/* kernel, chip, bound, verdict. Lives until the profile is filled again. */
cubist_status cubist_profile_text(const cubist_profile* profile, const char* name, const char** value);
/* A Chrome trace of a call on a device with `timeline`. */
cubist_status cubist_profile_write_timeline(const cubist_profile* profile, const char* path);

/* ---- Products */

typedef enum cubist_side { CUBIST_SIDE_A = 0, CUBIST_SIDE_B = 1 } cubist_side;

/* An operand packed once for many products, with its memory. */
typedef struct cubist_packed cubist_packed;

typedef struct cubist_pack_args {
  size_t size;
  cubist_tensor source; /* (rows, cols) or (matrices, rows, cols) */
  cubist_side side;
  bool transpose;
} cubist_pack_args;
#define CUBIST_PACK_ARGS CUBIST_INITIAL(cubist_pack_args, CUBIST_SET(side, CUBIST_SIDE_B))

cubist_status cubist_pack_operand(const cubist_device* device, const cubist_pack_args* args,
                                  cubist_packed** packed, cubist_profile* profile);
int64_t cubist_packed_bytes(const cubist_packed* packed);
void cubist_packed_destroy(cubist_packed* packed);

typedef enum cubist_activation {
  CUBIST_ACTIVATION_NONE = 0,
  CUBIST_ACTIVATION_RELU = 1,
  CUBIST_ACTIVATION_SILU = 2,
  CUBIST_ACTIVATION_GELU = 3,
  CUBIST_ACTIVATION_GELU_TANH = 4
} cubist_activation;

typedef struct cubist_matmul_args {
  size_t size;
  cubist_tensor a, b, bias, c;
  bool transpose_a, transpose_b;
  bool accumulate;
  bool any_order;
  const cubist_packed *packed_a, *packed_b;
  float alpha, beta;
  cubist_tensor residual;
  cubist_activation activation;
} cubist_matmul_args;
#define CUBIST_MATMUL_ARGS CUBIST_INITIAL(cubist_matmul_args, CUBIST_SET(alpha, 1) CUBIST_SET(beta, 1))

cubist_status cubist_matmul(const cubist_device* device, const cubist_matmul_args* args,
                            cubist_profile* profile);

typedef enum cubist_group_list { CUBIST_GROUP_COUNTS = 0, CUBIST_GROUP_ENDS = 1 } cubist_group_list;

typedef struct cubist_grouped_matmul_args {
  size_t size;
  cubist_tensor x, groups;
  cubist_group_list group_list;
  cubist_tensor weights;
  const cubist_tensor* weight_list; /* in place of weights */
  size_t weight_count;
  const cubist_packed* packed_weights; /* likewise */
  cubist_tensor bias, out;
  bool transpose_weights;
  float alpha, beta;
  cubist_tensor residual;
  cubist_activation activation;
} cubist_grouped_matmul_args;
#define CUBIST_GROUPED_MATMUL_ARGS \
  CUBIST_INITIAL(cubist_grouped_matmul_args, CUBIST_SET(alpha, 1) CUBIST_SET(beta, 1))

cubist_status cubist_grouped_matmul(const cubist_device* device, const cubist_grouped_matmul_args* args,
                                    cubist_profile* profile);

typedef struct cubist_grouped_matmul_grad_args {
  size_t size;
  cubist_tensor dy, groups;
  cubist_group_list group_list;
  cubist_tensor weights;
  const cubist_tensor* weight_list;
  size_t weight_count;
  cubist_tensor dx, x, dw;
  const cubist_tensor* dw_list;
  size_t dw_count;
  bool accumulate_dw;
  bool transpose_weights;
  const cubist_packed* packed_weights; /* in place of weights: their transposes */
} cubist_grouped_matmul_grad_args;
#define CUBIST_GROUPED_MATMUL_GRAD_ARGS CUBIST_INITIAL(cubist_grouped_matmul_grad_args, )

cubist_status cubist_grouped_matmul_grad(const cubist_device* device,
                                         const cubist_grouped_matmul_grad_args* args,
                                         cubist_profile* profile);

/* ---- Attention */

typedef enum cubist_causal {
  CUBIST_CAUSAL_NONE = 0,
  CUBIST_CAUSAL_TOP_LEFT = 1,
  CUBIST_CAUSAL_BOTTOM_RIGHT = 2
} cubist_causal;

#define CUBIST_UNBOUNDED INT64_MAX

typedef struct cubist_window {
  int64_t left, right; /* CUBIST_UNBOUNDED, or how far */
  cubist_causal anchor;
} cubist_window;

typedef struct cubist_lengths {
  const int64_t *q_ends, *kv_ends;
  size_t count; /* of sequences; 0: not packed (ends of {0} where there are none) */
} cubist_lengths;

typedef enum cubist_rope_layout {
  CUBIST_ROPE_HALF = 0,
  CUBIST_ROPE_INTERLEAVED = 1,
  CUBIST_ROPE_INTERLEAVED_TO_HALF = 2
} cubist_rope_layout;

typedef struct cubist_rope {
  cubist_tensor cos, sin;
  cubist_rope_layout layout;
  int64_t q_offset, k_offset;
  cubist_tensor q_positions, k_positions;
} cubist_rope;

typedef struct cubist_alibi {
  cubist_tensor slopes;
  const int64_t* offset; /* null: Skv - Sq of its sequence */
  bool root;
} cubist_alibi;

typedef struct cubist_dropout {
  float keep;
  uint64_t seed, offset;
} cubist_dropout;

/* Memory of the caller's for a call to work in; null: the library's own. */
typedef struct cubist_workspace {
  void* data;
  int64_t bytes;
} cubist_workspace;

typedef struct cubist_flash_attention_args {
  size_t size;
  cubist_tensor q, k, v, q_rope, k_rope;
  cubist_tensor out, lse;
  const float* scale; /* null: 1 / sqrt(Dqk + Dr) */
  cubist_causal causal;
  const cubist_window* window; /* null: none */
  const int64_t* prefix;
  size_t prefix_count;
  cubist_lengths lengths;
  cubist_rope rope;
  cubist_tensor bias, sinks;
  const float* soft_cap; /* null: none */
  cubist_tensor mask;
  cubist_alibi alibi;
  cubist_dropout dropout;
  cubist_workspace workspace; /* of at least cubist_flash_attention_workspace's bytes */
} cubist_flash_attention_args;
#define CUBIST_FLASH_ATTENTION_ARGS CUBIST_INITIAL(cubist_flash_attention_args, CUBIST_SET(dropout.keep, 1))

cubist_status cubist_flash_attention_workspace(const cubist_device* device,
                                               const cubist_flash_attention_args* args, int64_t* bytes);
cubist_status cubist_flash_attention(const cubist_device* device, const cubist_flash_attention_args* args,
                                     cubist_profile* profile);

typedef struct cubist_flash_attention_grad_args {
  size_t size;
  cubist_tensor q, k, v, q_rope, k_rope;
  cubist_tensor out, lse, dout;
  cubist_tensor dq, dk, dv, dq_rope, dk_rope;
  const float* scale;
  cubist_causal causal;
  const cubist_window* window;
  const int64_t* prefix;
  size_t prefix_count;
  cubist_lengths lengths;
  cubist_rope rope;
  cubist_tensor bias, sinks, mask;
  cubist_alibi alibi;
  cubist_dropout dropout;
  const float* soft_cap;
  cubist_tensor dbias, dsinks;
  cubist_workspace workspace; /* of at least cubist_flash_attention_grad_workspace's bytes */
} cubist_flash_attention_grad_args;
#define CUBIST_FLASH_ATTENTION_GRAD_ARGS \
  CUBIST_INITIAL(cubist_flash_attention_grad_args, CUBIST_SET(dropout.keep, 1))

cubist_status cubist_flash_attention_grad_workspace(const cubist_device* device,
                                                    const cubist_flash_attention_grad_args* args,
                                                    int64_t* bytes);
cubist_status cubist_flash_attention_grad(const cubist_device* device,
                                          const cubist_flash_attention_grad_args* args,
                                          cubist_profile* profile);

/* ---- Routes and the movement of tokens */

/* Rows [begin, end) of the global order. */
typedef struct cubist_range {
  int64_t begin, end;
} cubist_range;

/* Which routes stay where an expert has more than its capacity. */
typedef enum cubist_capacity_keeps {
  CUBIST_CAPACITY_KEEPS_FIRST = 0,
  CUBIST_CAPACITY_KEEPS_HIGHEST = 1
} cubist_capacity_keeps;

typedef struct cubist_token_permute_args {
  size_t size;
  cubist_tensor tokens, topk_ids, probs;
  int64_t num_experts, num_out_tokens, capacity, row_multiple;
  const cubist_range* rows; /* null: all */
  cubist_tensor permuted, sorted_indices, permuted_probs, expert_counts, expert_offsets;
  cubist_tensor routing_map; /* in place of topk_ids, with top_k */
  int64_t top_k;
  cubist_tensor valid, expert_places;
  cubist_capacity_keeps capacity_keeps;
  bool pad_with_tokens;
  cubist_tensor row_tokens, device_counts, node_counts;
} cubist_token_permute_args;
#define CUBIST_TOKEN_PERMUTE_ARGS CUBIST_INITIAL(cubist_token_permute_args, CUBIST_SET(row_multiple, 1))

cubist_status cubist_token_permute(const cubist_device* device, const cubist_token_permute_args* args,
                                   cubist_profile* profile);

typedef struct cubist_token_unpermute_args {
  size_t size;
  cubist_tensor permuted, sorted_indices, probs;
  int64_t top_k;
  const cubist_range* rows;
  cubist_tensor out;
  cubist_tensor routing_map;
  cubist_tensor bias, topk_ids, residual, residual2;
  cubist_tensor row_tokens; /* in place of sorted_indices, with capacity */
  int64_t capacity;
} cubist_token_unpermute_args;
#define CUBIST_TOKEN_UNPERMUTE_ARGS CUBIST_INITIAL(cubist_token_unpermute_args, CUBIST_SET(top_k, 1))

cubist_status cubist_token_unpermute(const cubist_device* device, const cubist_token_unpermute_args* args,
                                     cubist_profile* profile);

typedef struct cubist_token_permute_grad_args {
  size_t size;
  cubist_tensor permuted_grad, sorted_indices, permuted_probs_grad;
  int64_t top_k;
  const cubist_range* rows;
  cubist_tensor tokens_grad, probs_grad;
  cubist_tensor routing_map;
  cubist_tensor row_tokens;
  int64_t capacity;
} cubist_token_permute_grad_args;
#define CUBIST_TOKEN_PERMUTE_GRAD_ARGS CUBIST_INITIAL(cubist_token_permute_grad_args, CUBIST_SET(top_k, 1))

cubist_status cubist_token_permute_grad(const cubist_device* device,
                                        const cubist_token_permute_grad_args* args, cubist_profile* profile);

typedef struct cubist_token_unpermute_grad_args {
  size_t size;
  cubist_tensor out_grad, permuted, sorted_indices, probs;
  int64_t top_k;
  const cubist_range* rows;
  cubist_tensor permuted_grad, probs_grad;
  cubist_tensor routing_map;
  cubist_tensor bias, topk_ids;
  cubist_tensor row_tokens;
  int64_t capacity;
} cubist_token_unpermute_grad_args;
#define CUBIST_TOKEN_UNPERMUTE_GRAD_ARGS \
  CUBIST_INITIAL(cubist_token_unpermute_grad_args, CUBIST_SET(top_k, 1))

cubist_status cubist_token_unpermute_grad(const cubist_device* device,
                                          const cubist_token_unpermute_grad_args* args,
                                          cubist_profile* profile);

typedef struct cubist_reorder_chunks_args {
  size_t size;
  cubist_tensor tokens, chunk_counts, probs;
  bool inverse;
  cubist_tensor out, out_probs, row_ids, expert_counts;
} cubist_reorder_chunks_args;
#define CUBIST_REORDER_CHUNKS_ARGS CUBIST_INITIAL(cubist_reorder_chunks_args, )

cubist_status cubist_reorder_chunks(const cubist_device* device, const cubist_reorder_chunks_args* args,
                                    cubist_profile* profile);

typedef enum cubist_score {
  CUBIST_SCORE_SOFTMAX = 0,
  CUBIST_SCORE_SIGMOID = 1,
  CUBIST_SCORE_SQRT_SOFTPLUS = 2
} cubist_score;

typedef enum cubist_bad_logits {
  CUBIST_BAD_LOGITS_ERROR = 0,
  CUBIST_BAD_LOGITS_ZERO = 1,
  CUBIST_BAD_LOGITS_MEAN = 2
} cubist_bad_logits;

/* A caller's own weights of a token's `count` routes, with their gradient: RouteWeighting of cubist/route.h, which says
 * what they may do. Both are given `context`; either may be NULL. */
typedef struct cubist_route_weighting {
  void (*forward)(void* context, size_t count, const int32_t* ids, const float* scores, float* weights);
  void (*backward)(void* context, size_t count, const int32_t* ids, const float* scores,
                   const float* d_weights, float* d_scores);
  void* context;
} cubist_route_weighting;

typedef struct cubist_route_options {
  size_t size;
  cubist_score score;
  bool renormalise;
  float eps, scale;
  int64_t groups, top_groups, group_top;
  float temperature, dropout, expert_dropout;
  uint64_t seed;
  cubist_bad_logits bad_logits;
  float limit;
  float aux_coefficient;
  cubist_route_weighting weighting;
} cubist_route_options;
#define CUBIST_ROUTE_OPTIONS                                                        \
  CUBIST_INITIAL(cubist_route_options,                                              \
                 CUBIST_SET(eps, 1e-20f) CUBIST_SET(scale, 1) CUBIST_SET(groups, 1) \
                     CUBIST_SET(top_groups, 1) CUBIST_SET(group_top, 2) CUBIST_SET(limit, 3.40282347e+38f))

typedef struct cubist_route_args {
  size_t size;
  cubist_tensor logits, bias;
  cubist_tensor weights, ids, scores, counts, aux_loss, bad;
  const cubist_route_options* options; /* NULL: CUBIST_ROUTE_OPTIONS */
  cubist_tensor valid;
} cubist_route_args;
#define CUBIST_ROUTE_ARGS CUBIST_INITIAL(cubist_route_args, )

cubist_status cubist_route(const cubist_device* device, const cubist_route_args* args,
                           cubist_profile* profile);

typedef struct cubist_route_grad_args {
  size_t size;
  cubist_tensor d_weights, ids, scores, counts, d_logits;
  float d_aux_loss;
  const cubist_route_options* options; /* NULL: CUBIST_ROUTE_OPTIONS */
  cubist_tensor valid;
} cubist_route_grad_args;
#define CUBIST_ROUTE_GRAD_ARGS CUBIST_INITIAL(cubist_route_grad_args, )

cubist_status cubist_route_grad(const cubist_device* device, const cubist_route_grad_args* args,
                                cubist_profile* profile);

/* ---- Row kernels */

typedef struct cubist_rms_norm_args {
  size_t size;
  cubist_tensor x, residual, gamma;
  float eps;
  cubist_tensor out, sum, rstd;
} cubist_rms_norm_args;
#define CUBIST_RMS_NORM_ARGS CUBIST_INITIAL(cubist_rms_norm_args, CUBIST_SET(eps, 1e-6f))

cubist_status cubist_rms_norm(const cubist_device* device, const cubist_rms_norm_args* args,
                              cubist_profile* profile);

typedef struct cubist_rms_norm_grad_args {
  size_t size;
  cubist_tensor d_out, x, rstd, gamma, d_sum;
  cubist_tensor d_x, d_gamma;
} cubist_rms_norm_grad_args;
#define CUBIST_RMS_NORM_GRAD_ARGS CUBIST_INITIAL(cubist_rms_norm_grad_args, )

cubist_status cubist_rms_norm_grad(const cubist_device* device, const cubist_rms_norm_grad_args* args,
                                   cubist_profile* profile);

typedef struct cubist_swiglu_args {
  size_t size;
  cubist_tensor gate, up, probs, out;
} cubist_swiglu_args;
#define CUBIST_SWIGLU_ARGS CUBIST_INITIAL(cubist_swiglu_args, )

cubist_status cubist_swiglu(const cubist_device* device, const cubist_swiglu_args* args,
                            cubist_profile* profile);

typedef struct cubist_swiglu_grad_args {
  size_t size;
  cubist_tensor d_out, gate, up, probs;
  cubist_tensor d_gate, d_up, d_probs;
} cubist_swiglu_grad_args;
#define CUBIST_SWIGLU_GRAD_ARGS CUBIST_INITIAL(cubist_swiglu_grad_args, )

cubist_status cubist_swiglu_grad(const cubist_device* device, const cubist_swiglu_grad_args* args,
                                 cubist_profile* profile);

/* ---- Blocks */

/* What a forward pass keeps for the backward one, and the scratch memory of both. */
typedef struct cubist_block_state cubist_block_state;

cubist_status cubist_block_state_create(cubist_block_state** state);
void cubist_block_state_destroy(cubist_block_state* state);

typedef struct cubist_moe_block_args {
  size_t size;
  cubist_tensor x;
  cubist_tensor norm, router, router_bias, gate_up, down, shared_gate_up, shared_down,
      post_norm; /* weights */
  int64_t top_k;
  float eps;
  cubist_tensor out, aux_loss;
  const cubist_route_options* route; /* NULL: CUBIST_ROUTE_OPTIONS */
  bool weighs_activation;
  cubist_tensor valid;
} cubist_moe_block_args;
#define CUBIST_MOE_BLOCK_ARGS \
  CUBIST_INITIAL(cubist_moe_block_args, CUBIST_SET(top_k, 1) CUBIST_SET(eps, 1e-6f))

cubist_status cubist_moe_block(const cubist_device* device, const cubist_moe_block_args* args,
                               cubist_block_state* state, cubist_profile* profile);

typedef struct cubist_moe_block_grad_args {
  size_t size;
  const cubist_moe_block_args* forward; /* as the forward call had them */
  cubist_tensor d_out;
  float d_aux_loss;
  cubist_tensor d_x;
  cubist_tensor norm, router, gate_up, down, shared_gate_up, shared_down,
      post_norm; /* gradients; what is given */
} cubist_moe_block_grad_args;
#define CUBIST_MOE_BLOCK_GRAD_ARGS CUBIST_INITIAL(cubist_moe_block_grad_args, )

cubist_status cubist_moe_block_grad(const cubist_device* device, const cubist_moe_block_grad_args* args,
                                    cubist_block_state* state, cubist_profile* profile);

typedef struct cubist_mla_block_args {
  size_t size;
  cubist_tensor x;
  cubist_tensor norm, q_down, q_norm, q_up, kv_down, kv_norm, kv_up, out_weight, post_norm; /* weights */
  int64_t heads, batch;
  const float* scale;
  cubist_causal causal;
  cubist_lengths lengths;
  cubist_rope rope;
  float eps;
  cubist_tensor out;
} cubist_mla_block_args;
#define CUBIST_MLA_BLOCK_ARGS                                                                 \
  CUBIST_INITIAL(cubist_mla_block_args, CUBIST_SET(heads, 1) CUBIST_SET(batch, 1) CUBIST_SET( \
                                            causal, CUBIST_CAUSAL_TOP_LEFT) CUBIST_SET(eps, 1e-6f))

cubist_status cubist_mla_block(const cubist_device* device, const cubist_mla_block_args* args,
                               cubist_block_state* state, cubist_profile* profile);

typedef struct cubist_mla_block_grad_args {
  size_t size;
  const cubist_mla_block_args* forward; /* as the forward call had them */
  cubist_tensor d_out, d_x;
  cubist_tensor norm, q_down, q_norm, q_up, kv_down, kv_norm, kv_up, out_weight,
      post_norm; /* gradients; what is given */
} cubist_mla_block_grad_args;
#define CUBIST_MLA_BLOCK_GRAD_ARGS CUBIST_INITIAL(cubist_mla_block_grad_args, )

cubist_status cubist_mla_block_grad(const cubist_device* device, const cubist_mla_block_grad_args* args,
                                    cubist_block_state* state, cubist_profile* profile);

/* ---- Loss scaling */

typedef struct cubist_loss_scaler cubist_loss_scaler;

typedef struct cubist_loss_scale_options {
  size_t size;
  float initial, growth, backoff;
  int64_t growth_interval;
  float least, most;
} cubist_loss_scale_options;
#define CUBIST_LOSS_SCALE_OPTIONS                                                           \
  CUBIST_INITIAL(cubist_loss_scale_options,                                                 \
                 CUBIST_SET(initial, 65536) CUBIST_SET(growth, 2) CUBIST_SET(backoff, 0.5f) \
                     CUBIST_SET(growth_interval, 2000) CUBIST_SET(least, 1) CUBIST_SET(most, 16777216))

/* `options` may be null. */
cubist_status cubist_loss_scaler_create(const cubist_loss_scale_options* options,
                                        cubist_loss_scaler** scaler);
void cubist_loss_scaler_destroy(cubist_loss_scaler* scaler);
float cubist_loss_scaler_scale(const cubist_loss_scaler* scaler);
cubist_status cubist_loss_scaler_unscale(cubist_loss_scaler* scaler, const cubist_tensor* gradients,
                                         size_t count, bool* apply);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif /* CUBIST_CUBIST_C_H_ */
