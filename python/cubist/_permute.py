"""The movement of tokens: to the rows of their experts and back, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from cubist._arrays import Array, Output, dtype_of, shape_of, size
from cubist._device import Call, Device, Profile, first, given, kernel


class Permuted(NamedTuple):
    """What `token_permute` gives, with the shapes that it tells; None is what was not asked for."""

    permuted: Array
    sorted_indices: Array
    permuted_probs: Array | None = None
    expert_counts: Array | None = None
    expert_offsets: Array | None = None
    row_tokens: Array | None = None
    device_counts: Array | None = None
    node_counts: Array | None = None


def _rows_out(
    slots: int,
    experts: int,
    num_out_tokens: int,
    capacity: int,
    row_multiple: int,
    rows: Sequence[int] | None,
) -> int:
    if rows is not None:
        return max(rows[1] - rows[0], 0) if len(rows) == 2 else 0
    if capacity > 0:
        return experts * capacity
    room = slots + min(slots, experts) * (row_multiple - 1)
    if num_out_tokens < 0:
        return max(room + num_out_tokens, 0)
    return min(num_out_tokens, room) if num_out_tokens > 0 else room


@kernel
def token_permute(
    tokens: Array,
    topk_ids: Array | None = None,
    num_experts: int | None = None,
    *,
    routing_map: Array | None = None,
    top_k: int | None = None,
    valid: Array | None = None,
    probs: Array | None = None,
    expert_places: Array | None = None,
    num_out_tokens: int = 0,
    capacity: int = 0,
    capacity_keeps: str = "first",
    pad_with_tokens: bool = False,
    row_multiple: int = 1,
    rows: Sequence[int] | None = None,
    permuted: Array | None = None,
    sorted_indices: Array | None = None,
    permuted_probs: Output = None,
    expert_counts: Output = None,
    expert_offsets: Output = None,
    row_tokens: Output = None,
    device_counts: Output = None,
    node_counts: Output = None,
    device: Device | None = None,
) -> Permuted | Profile:
    """Tokens to rows sorted by expert: slot t * K + j, token t's j-th route, goes to row sorted_indices[t * K + j].

    tokens          (T, H): fp32, bf16 or fp16
    topk_ids        (T, K) or (T), int32 or int64, in [0, num_experts), or -1 for no expert
    routing_map     (T, num_experts), bool or bytes, in place of topk_ids: where a token goes, at most top_k = K experts
    valid           (T), bool or bytes: a token that is not valid goes nowhere
    probs           (T, K), (T, num_experts) with a map, any float dtype: permuted_probs (M) goes with it, of the same dtype
                    where it is made
    expert_places   (num_experts), int32, a permutation: the rows of expert e are the expert_places[e]-th in order
    num_out_tokens  room for so many rows, 0 for all; negative: so many fewer than all
    capacity        rows of every expert (drop and pad); 0 for none. capacity_keeps: "first", or "highest" probabilities
    pad_with_tokens with a map and a capacity, rows beyond an expert's slots are tokens that do not go to it, and not
                    zero; with row_tokens the way back and the gradients have them too
    row_multiple    rows of every expert are padded to a multiple of it
    rows            (begin, end): only these rows of the global order arrive (expert parallelism)
    permuted        (M, H), the dtype of tokens;   sorted_indices   (T * K), int32
    expert_counts   (num_experts), int32, if True;   expert_offsets   (num_experts + 1), int32, if True
    row_tokens      (M), int32, if True: the token of each row, -1 in rows of no slot
    device_counts   (D), int32: slots for each of D devices; a number D makes them. node_counts (N) likewise
    """
    if num_experts is None:
        if routing_map is None:
            raise ValueError("token_permute: num_experts is not given, and there is no routing_map that has it")
        num_experts = size(routing_map, 1)
    if routing_map is not None:
        slots = size(tokens, 0) * max(top_k or 0, 0)
    else:
        slots = size(topk_ids, 0) * (size(topk_ids, 1) if len(shape_of(topk_ids)) == 2 else 1)
    experts = max(num_experts, 0)
    m = max(_rows_out(slots, num_experts, num_out_tokens, capacity, row_multiple, rows), 0)
    call = Call("token_permute", device, tokens)
    call.output("permuted", permuted, (m, size(tokens, 1)), dtype_of(tokens))
    call.output("sorted_indices", sorted_indices, (slots,), "int32")
    wants_probs = True if probs is not None and permuted_probs is None else permuted_probs
    call.optional("permuted_probs", wants_probs, (m,), dtype_of(probs))
    call.optional("expert_counts", expert_counts, (experts,), "int32")
    call.optional("expert_offsets", expert_offsets, (experts + 1,), "int32")
    call.optional("row_tokens", row_tokens, (m,), "int32")
    call.optional("device_counts", *_counts(device_counts), "int32")
    call.optional("node_counts", *_counts(node_counts), "int32")
    result = call(
        tokens=tokens,
        topk_ids=topk_ids,
        num_experts=num_experts,
        routing_map=routing_map,
        top_k=top_k,
        valid=valid,
        probs=probs,
        expert_places=expert_places,
        num_out_tokens=num_out_tokens,
        capacity=capacity,
        capacity_keeps=capacity_keeps,
        pad_with_tokens=pad_with_tokens,
        row_multiple=row_multiple,
        rows=rows,
    )
    return Permuted(*result) if isinstance(result, tuple) else result


def _counts(wanted: Output) -> tuple[Output, tuple[int, ...]]:
    """An output of so many counts where it is a number."""
    is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
    return (True, (wanted,)) if is_number else (wanted, ())


@kernel
def token_unpermute(
    permuted: Array,
    sorted_indices: Array | None = None,
    probs: Array | None = None,
    *,
    row_tokens: Array | None = None,
    capacity: int = 0,
    num_tokens: int | None = None,
    routing_map: Array | None = None,
    top_k: int | None = None,
    bias: Array | None = None,
    topk_ids: Array | None = None,
    residual: Array | None = None,
    residual2: Array | None = None,
    rows: Sequence[int] | None = None,
    out: Array | None = None,
    device: Device | None = None,
) -> Array | Profile:
    """out[t] = residual[t] + residual2[t] + sum over j of probs(t, j) (permuted[sorted_indices[t * K + j]] + bias[e(t, j)]).

    permuted        (M, H): fp32, bf16 or fp16
    sorted_indices  (T * K), int32, as `token_permute` gave them; -1 or >= M adds nothing
    row_tokens      (M), int32, in place of sorted_indices, as `token_permute` gave them with this capacity:
                    out[row_tokens[r]] += probs(row_tokens[r], r / capacity) permuted[r], with probs (T, E)
    num_tokens      T, where neither probs nor sorted_indices nor out say it
    probs           (T, K), any float dtype; absent means weight 1, and K is top_k
    routing_map     (T, E), as for `token_permute`: probs are (T, E) then, and K is top_k
    bias            (E, H), with topk_ids (T, K), which is e: what an expert adds to each of its rows
    residual, residual2   (T, H)
    rows            as for `token_permute`
    out             (T, H), the dtype of permuted
    """
    if probs is not None:
        num_tokens = size(probs, 0)
    tokens = _tokens("token_unpermute", sorted_indices, top_k, num_tokens, out)
    call = Call("token_unpermute", device, permuted)
    call.output("out", out, (tokens, size(permuted, 1)), dtype_of(permuted))
    slots = {"sorted_indices": sorted_indices, "row_tokens": row_tokens, "capacity": capacity}
    slots |= {"routing_map": routing_map, "top_k": top_k, "rows": rows}
    added = {"bias": bias, "topk_ids": topk_ids, "residual": residual, "residual2": residual2}
    return first(call(permuted=permuted, probs=probs, **slots, **added))


def _tokens(
    name: str, sorted_indices: Array | None, top_k: int | None, num_tokens: int | None, out: Array | None
) -> int:
    """T, by whatever says it."""
    if num_tokens is not None:
        return num_tokens
    if sorted_indices is not None:
        return size(sorted_indices, 0) // max(1 if top_k is None else top_k, 1)
    if out is None:
        raise ValueError(f"{name}: num_tokens is not given, row_tokens do not say how many there are")
    return size(out, 0)


@kernel
def token_permute_grad(
    permuted_grad: Array,
    sorted_indices: Array | None = None,
    top_k: int | None = None,
    *,
    row_tokens: Array | None = None,
    capacity: int = 0,
    num_tokens: int | None = None,
    num_experts: int | None = None,
    permuted_probs_grad: Array | None = None,
    routing_map: Array | None = None,
    rows: Sequence[int] | None = None,
    tokens_grad: Array | None = None,
    probs_grad: Output = None,
    device: Device | None = None,
) -> Any | Profile:
    """Gradients of `token_permute`: tokens_grad, or (tokens_grad, probs_grad) with permuted_probs_grad.

    permuted_grad  (M, H): fp32, bf16 or fp16;   permuted_probs_grad  (M), any float dtype
    sorted_indices (T * top_k), int32, as `token_permute` gave them;   rows   as it was given them
    row_tokens     (M), int32, in place of sorted_indices, as `token_permute` gave them with this capacity; num_tokens
                   is T then, where tokens_grad does not say it, and num_experts is E, where these are not all rows
    tokens_grad    (T, H), the dtype of permuted_grad
    probs_grad     (T, top_k), or (T, E) with a routing_map (T, E) or with row_tokens
    """
    tokens = _tokens("token_permute_grad", sorted_indices, top_k, num_tokens, tokens_grad)
    call = Call("token_permute_grad", device, permuted_grad)
    call.output("tokens_grad", tokens_grad, (tokens, size(permuted_grad, 1)), dtype_of(permuted_grad))
    wants_probs = True if permuted_probs_grad is not None and probs_grad is None else probs_grad
    if row_tokens is not None:
        columns = size(permuted_grad, 0) // max(capacity, 1) if num_experts is None else num_experts
    else:
        columns = max(top_k or 0, 0) if routing_map is None else size(routing_map, 1)
    call.optional("probs_grad", wants_probs, (tokens, columns), dtype_of(permuted_probs_grad))
    slots = {"sorted_indices": sorted_indices, "row_tokens": row_tokens, "capacity": capacity}
    slots |= {"routing_map": routing_map, "top_k": top_k, "rows": rows}
    return given(call(permuted_grad=permuted_grad, permuted_probs_grad=permuted_probs_grad, **slots))


@kernel
def token_unpermute_grad(
    out_grad: Array,
    sorted_indices: Array | None = None,
    *,
    row_tokens: Array | None = None,
    capacity: int = 0,
    permuted: Array | None = None,
    probs: Array | None = None,
    num_rows: int | None = None,
    routing_map: Array | None = None,
    top_k: int | None = None,
    bias: Array | None = None,
    topk_ids: Array | None = None,
    rows: Sequence[int] | None = None,
    permuted_grad: Array | None = None,
    probs_grad: Output = None,
    device: Device | None = None,
) -> Any | Profile:
    """Gradients of `token_unpermute`: permuted_grad, or (permuted_grad, probs_grad) with permuted and probs.

    out_grad       (T, H): fp32, bf16 or fp16
    sorted_indices (T * K), int32, as `token_unpermute` had them; no row stands twice
    row_tokens     (M), int32, in place of sorted_indices, with capacity, as for `token_unpermute`: probs are (T, E)
    permuted       (M, H), for probs_grad;   probs   (T, K);   top_k   K where there are no probs
    routing_map    (T, E): probs and probs_grad are (T, E) then, and K is top_k
    bias           (E, H), with topk_ids (T, K), as for `token_unpermute`
    permuted_grad  (M, H): M is that of permuted, or num_rows, or that of rows, of row_tokens, or T * K
    probs_grad     (T, K), or as probs
    """
    if permuted is not None:
        m = size(permuted, 0)
    elif num_rows is not None:
        m = num_rows
    else:
        indices = sorted_indices if row_tokens is None else row_tokens
        m = rows[1] - rows[0] if rows is not None and len(rows) == 2 else size(indices, 0)
    call = Call("token_unpermute_grad", device, out_grad)
    call.output("permuted_grad", permuted_grad, (max(m, 0), size(out_grad, 1)), dtype_of(out_grad))
    wants_probs = True if permuted is not None and probs is not None and probs_grad is None else probs_grad
    call.optional("probs_grad", wants_probs, shape_of(probs), dtype_of(probs))
    slots = {"sorted_indices": sorted_indices, "row_tokens": row_tokens, "capacity": capacity}
    slots |= {"routing_map": routing_map, "top_k": top_k, "rows": rows}
    added = {"bias": bias, "topk_ids": topk_ids}
    return given(call(out_grad=out_grad, permuted=permuted, probs=probs, **slots, **added))


class Reordered(NamedTuple):
    """What `reorder_chunks` gives: out (A, H), out_probs (A), row_ids (A), expert_counts (E)."""

    out: Array
    out_probs: Array | None = None
    row_ids: Array | None = None
    expert_counts: Array | None = None


@kernel
def reorder_chunks(
    tokens: Array,
    chunk_counts: Array,
    *,
    probs: Array | None = None,
    inverse: bool = False,
    out: Array | None = None,
    out_probs: Output = None,
    row_ids: Output = None,
    expert_counts: Output = None,
    device: Device | None = None,
) -> Reordered | Profile:
    """Rows that came from N ranks, those of each sorted by expert, in the order of experts over all; or back.

    tokens         (A, H): fp32, bf16 or fp16
    chunk_counts   (N, E), int32 or int64: rows from rank n for expert e, A in all
    probs          (A), any float dtype: out_probs goes with it, of the same dtype where it is made
    inverse        from the order of experts to that of ranks, which is the gradient too
    out            (A, H), the dtype of tokens
    row_ids        (A), int32, if True: the row of tokens that each row of out was
    expert_counts  (E), int32, if True
    """
    rows = size(tokens, 0)
    call = Call("reorder_chunks", device, tokens).output("out", out, shape_of(tokens), dtype_of(tokens))
    wants_probs = True if probs is not None and out_probs is None else out_probs
    call.optional("out_probs", wants_probs, (rows,), dtype_of(probs))
    call.optional("row_ids", row_ids, (rows,), "int32")
    call.optional("expert_counts", expert_counts, (size(chunk_counts, 1),), "int32")
    result = call(tokens=tokens, chunk_counts=chunk_counts, probs=probs, inverse=inverse)
    return Reordered(*result) if isinstance(result, tuple) else result
