// Cores of a phase that have one proof: the checker cannot tell them apart, and would find nothing in any of them, or the
// same in all.
#ifndef CUBIST_NPU_MODEL_SYNC_SAME_PROOF_H_
#define CUBIST_NPU_MODEL_SYNC_SAME_PROOF_H_

#include <cstddef>
#include <vector>

#include "npu_model/sync/plan.h"
#include "npu_model/sync/shared_gm.h"
#include "npu_model/trace/record.h"

namespace cubist::sync {

// For each core the first one with its proof, itself where there is none. They run the same instructions under the same
// flags, on the same bytes of their own buffers, or on bytes that lie alike among the edges of all that is written there,
// and write bytes of the same tensors twice. Of GM that pipes may quarrel about they stand at a constant distance from each
// other, elsewhere it does not matter where; what a core counts on of earlier phases is its own (HoldsReads).
// watches[c] is there for the first ones.
std::vector<std::size_t> FirstWithProof(const ChipSpec& chip, const trace::Phase& phase,
                                        const std::vector<const CorePlan*>& plans,
                                        const std::vector<Tensors>& written_twice, const GmState& gm,
                                        std::vector<GmWatch>* watches);

// Whether all that a core reads of some tensors was there before the phase.
bool HoldsReads(const trace::CoreRecord& core, const std::vector<char>& of_tensors, const GmState& gm);

}  // namespace cubist::sync

#endif  // CUBIST_NPU_MODEL_SYNC_SAME_PROOF_H_
